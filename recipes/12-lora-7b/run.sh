#!/usr/bin/env bash
# Adapters on Qwen2.5-7B-Instruct. Any argument overrides a key of the training, such as run.steps=2.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-12-lora-7b}

rlhf grpo --config "$here/../../configs/one_gpu_80gb.yaml" --config "$here/config.yaml" run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
