#!/usr/bin/env bash
# The same run twice: engines and learner one after the other, then at the same time. Arguments override keys of both.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-09-slow-prompts}
data=runs/recipe-09-data

[ -e runs/quickstart-data ] || rlhf quickstart --output runs/quickstart-data
[ -e $data/fast.jsonl ] || python "$here/make_data.py" runs/quickstart-data/train.jsonl $data
for lag in 0 2; do
    rlhf grpo --config "$here/config.yaml" environment="$here/environment.py:play" \
        rollout.max_policy_lag=$lag run.dir="$run/lag-$lag" "$@"
done
rlhf report "$run"/lag-* --minutes --curve "$run/curve.svg"
python "$here/compare.py" "$run"/lag-*
