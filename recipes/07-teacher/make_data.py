"""Writes what the teacher of this recipe is trained on: right work on problems of the quickstart.

python make_data.py TRAIN.jsonl OUTPUT.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from rlhf.quickstart import Problem

ROWS = 6_400


def main(train: str, output: str) -> None:
    rows = []
    for line in Path(train).read_text().splitlines()[:ROWS]:
        question = json.loads(line)["question"]
        left, right = map(int, re.findall(r"\d+", question))
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": Problem(left, right).worked()}]
        rows.append(json.dumps({"messages": talk}) + "\n")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text("".join(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
