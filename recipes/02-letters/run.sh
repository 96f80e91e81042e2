#!/usr/bin/env bash
# Learn to sort letters with a reward that gives partial credit. Arguments override keys of the GRPO training.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-02-letters}
data=runs/letters-data

[ -e $data/test.jsonl ] || python "$here/make_data.py" $data
[ -e runs/letters-sft/model ] || rlhf sft --config "$here/sft.yaml"
rlhf grpo --config "$here/config.yaml" reward.0.name="$here/reward.py:in_place" run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
