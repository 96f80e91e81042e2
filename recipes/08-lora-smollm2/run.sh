#!/usr/bin/env bash
# A pretrained model learns with adapters. Any argument overrides a key of the training, such as run.steps=2.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-08-lora-smollm2}
data=runs/real-model-data

[ -e $data/SmolLM2-135M-Instruct ] || python "$here/fetch_model.py" $data/SmolLM2-135M-Instruct
[ -e $data/task/test.jsonl ] || python "$here/make_data.py" $data/task
rlhf grpo --config "$here/../../configs/real_model_cpu.yaml" --config "$here/config.yaml" run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
