#!/usr/bin/env bash
# Qwen2.5-0.5B-Instruct on GSM8K. Any argument overrides a key of the training, such as run.steps=2.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-11-gsm8k-qwen}

rlhf grpo --config "$here/config.yaml" run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
