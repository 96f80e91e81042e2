#!/usr/bin/env bash
# A teacher is trained on right work, then it teaches. Any argument overrides a key of the run with the teacher.
set -eu
here=$(dirname "$0")
run=${RUN:-runs/recipe-07-teacher}
work=runs/recipe-07-data

[ -e runs/quickstart-data ] || rlhf quickstart --output runs/quickstart-data
[ -e $work/right_work.jsonl ] || python "$here/make_data.py" runs/quickstart-data/train.jsonl $work/right_work.jsonl
[ -e $work/teacher/model ] || rlhf sft --config "$here/teacher.yaml"
rlhf grpo --config "$here/config.yaml" run.dir="$run" "$@"
rlhf report "$run" --curve "$run/curve.svg"
