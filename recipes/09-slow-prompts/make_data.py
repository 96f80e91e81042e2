"""Writes the quickstart's problems as two sets: `fast`, and `slow`, whose rollouts wait before they begin.

python make_data.py TRAIN.jsonl FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SLOW_S = 3.0  # seconds that a slow rollout waits
EVERY = 4  # a quarter is slow


def main(train: str, folder: str) -> None:
    rows = [json.loads(line) for line in Path(train).read_text().splitlines()]
    sets = {"slow": rows[::EVERY], "fast": [row for number, row in enumerate(rows) if number % EVERY]}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, its_rows in sets.items():
        texts = [json.dumps({**row, "wait_s": SLOW_S if name == "slow" else 0.0}) + "\n" for row in its_rows]
        (Path(folder) / f"{name}.jsonl").write_text("".join(texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
