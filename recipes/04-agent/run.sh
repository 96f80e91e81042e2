#!/usr/bin/env bash
# Train the model inside of a program that asks it over HTTP. Any argument overrides a key of the training.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
run=${RUN:-runs/recipe-04-agent}
data=runs/tools-quickstart-data

[ -e $data ] || rlhf quickstart --task tools --output $data
rlhf grpo --config "$here/../../configs/tools_quickstart.yaml" --config "$here/config.yaml" \
    environment.command="[python, '$here/agent.py']" run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
