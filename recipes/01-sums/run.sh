#!/usr/bin/env bash
# The quickstart: a tiny model learns to add. Any argument overrides a key of the training, such as run.steps=2.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-01-sums}
data=runs/quickstart-data

[ -e $data ] || rlhf quickstart --output $data
# the warm-up of the rate as a share, so that run.steps may be any number
rlhf grpo --config "$here/../../configs/quickstart.yaml" run.dir="$run" \
    learner.schedule.warmup_steps=0 learner.schedule.warmup_fraction=0.125 "$@"
rlhf report "$run" --curve "$run/curve.svg"
