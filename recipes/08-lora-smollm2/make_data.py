"""Write the task of `make real-model`: which of four two-digit numbers is the largest?

    python make_data.py FOLDER [SEED]

train.jsonl has 4,096 problems and test.jsonl 256 others. Each is a short conversation: two solved examples, then the
question. The examples show the form of an answer, so what is left to learn is to compare numbers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

TRAIN_ROWS, TEST_ROWS = 4096, 256
NUMBERS, LOW, HIGH = 4, 10, 100
INSTRUCTION = "Answer with one number."
EXAMPLES = ((34, 71, 12, 55), (83, 20, 96, 47))


def question(numbers: tuple[int, ...]) -> str:
    return f"Which is the largest: {', '.join(map(str, numbers))}?"


def row(numbers: tuple[int, ...]) -> dict[str, Any]:
    """A row for the trainer: the conversation up to the question, and the right number."""
    turns = [{"role": "system", "content": INSTRUCTION}]
    for example in EXAMPLES:
        turns.append({"role": "user", "content": question(example)})
        turns.append({"role": "assistant", "content": str(max(example))})
    return {"messages": [*turns, {"role": "user", "content": question(numbers)}], "answer": str(max(numbers))}


def make_problems(count: int, seed: int) -> list[tuple[int, ...]]:
    """`count` problems in seeded order; no two have the same numbers, in any order, nor those of an example."""
    rng = random.Random(f"largest {seed}")
    used = {frozenset(example) for example in EXAMPLES}
    problems: list[tuple[int, ...]] = []
    while len(problems) < count:
        numbers = tuple(rng.sample(range(LOW, HIGH), NUMBERS))
        if frozenset(numbers) not in used:
            used.add(frozenset(numbers))
            problems.append(numbers)
    return problems


def write_task(folder: Path, seed: int) -> None:
    problems = make_problems(TRAIN_ROWS + TEST_ROWS, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", problems[:TRAIN_ROWS]), ("test", problems[TRAIN_ROWS:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(numbers)) + "\n" for numbers in part))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [folder, *seed] if len(seed) < 2 and not folder.startswith("-"):
            write_task(Path(folder), int(*seed))
        case _:
            raise SystemExit(__doc__)
