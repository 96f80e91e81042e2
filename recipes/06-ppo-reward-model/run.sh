#!/usr/bin/env bash
# A reward model learns from preferences, then PPO learns from it. Any argument overrides a key of the PPO run.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-06-ppo-reward-model}

[ -e runs/quickstart-data ] || rlhf quickstart --output runs/quickstart-data
[ -e runs/quickstart-reward/model ] || rlhf reward-model --config "$here/../../configs/reward_model_quickstart.yaml" run.epochs=1
rlhf ppo --config "$here/../../configs/ppo_reward_model_quickstart.yaml" --config "$here/config.yaml" \
    run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
