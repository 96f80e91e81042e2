#!/usr/bin/env bash
# Learn to ask a calculator. Any argument overrides a key of the training, such as run.steps=2.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-03-tool}
data=runs/tools-quickstart-data

[ -e $data ] || rlhf quickstart --task tools --output $data
rlhf grpo --config "$here/../../configs/tools_quickstart.yaml" run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
