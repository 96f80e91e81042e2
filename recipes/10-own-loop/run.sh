#!/usr/bin/env bash
# A loop of your own. Any argument overrides a key of config.yaml, such as run.steps=2.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-10-own-loop}

[ -e runs/quickstart-data ] || rlhf quickstart --output runs/quickstart-data
python "$here/loop.py" run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
