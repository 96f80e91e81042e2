#!/usr/bin/env bash
# The same run without a lag and with one. Any argument overrides a key of both.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-13-policy-lag}

for lag in 0 2; do
    rlhf grpo --config "$here/../11-gsm8k-qwen/config.yaml" --config "$here/config.yaml" \
        rollout.max_policy_lag=$lag run.dir="$run/lag-$lag" "$@"
done
rlhf report "$run"/lag-* --minutes --curve "$run/curve.svg"
