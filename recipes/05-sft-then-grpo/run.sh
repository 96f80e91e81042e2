#!/usr/bin/env bash
# Imitate demonstrations, then learn from graded answers. Arguments override keys of the GRPO training.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-05-sft-then-grpo}
data=runs/quickstart-data

[ -e $data ] || rlhf quickstart --output $data
[ -e "$run-sft/model" ] || rlhf sft --config "$here/../../configs/sft_quickstart.yaml" run.dir="$run-sft"
# the warm-up of the rate as a share, so that run.steps may be any number
rlhf grpo --config "$here/../../configs/quickstart.yaml" model.path="$run-sft/model" run.dir="$run" \
    learner.schedule.warmup_steps=0 learner.schedule.warmup_fraction=0.125 "$@"
rlhf report "$run" --curve "$run/curve.svg"
