"""Model and data of a task whose problems differ in difficulty: sums of two numbers of one to four digits.

    python -m benchmarks.studies.mixed_task [--output runs/studies/mixed-data]

The same careless pupil as the quickstart's works on them: a problem of more digits has more carries to forget and more
columns to slip in. So the model that imitates it solves most problems of one digit, and few of four. Both numbers have
the same count of digits, and each count has the same share of the rows. There are only 45 problems of one digit, so
these come several times. The problems of the held-out rows are in no other row.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
from pathlib import Path

from rlhf.learner.tiny_model import make_model, make_tokenizer, save_model
from rlhf.quickstart import Problem, make_demonstrations, warm_up, warmup_config, write_rows
from rlhf.types import Prompt

MODULE = "benchmarks.studies.mixed_task"
DATA = Path("runs/studies/mixed-data")
DIGITS = (1, 2, 3, 4)
ROWS = {"train": 1024, "test": 512}
HELD_OUT_FRACTION = 1 / 3  # of the problems of one digit; of the others fewer are needed
WARMUP_STEPS = 1000


def make_rows(seed: int, rows: dict[str, int] = ROWS) -> dict[str, list[Problem]]:
    """The problems by file, in random order, as many of each count of digits."""
    rng = random.Random(f"mixed problems {seed}")
    files: dict[str, list[Problem]] = {name: [] for name in rows}
    for digits in DIGITS:
        numbers = range(10 ** (digits - 1), 10**digits)
        if digits == 1:
            pairs = [(left, right) for left in numbers for right in numbers if left <= right]
            rng.shuffle(pairs)
        else:
            wanted = 2 * sum(rows.values())
            pairs = list(dict.fromkeys(tuple(sorted(rng.choices(numbers, k=2))) for _ in range(wanted)))
        cut = round(len(pairs) * HELD_OUT_FRACTION)
        for name, own in (("test", pairs[:cut]), ("train", pairs[cut:])):
            for number in range(rows[name] // len(DIGITS)):
                left, right = rng.sample(own[number % len(own)], 2)
                files[name].append(Problem(left, right, columns=digits))
    for problems in files.values():
        rng.shuffle(problems)
    return files


def write(folder: Path, *, seed: int = 0, steps: int = WARMUP_STEPS) -> None:
    """Model, `train.jsonl` and `test.jsonl` in a new folder; the process should end soon, as after `warm_up`."""
    files = make_rows(seed)
    save_model(make_model(seed=seed), make_tokenizer(), folder / "untrained")
    for name, problems in files.items():
        write_rows(folder / f"{name}.jsonl", [{"question": p.question, "answer": p.answer} for p in problems])
    count = steps * warmup_config(folder, seed=seed).learner.sequences_per_update
    write_rows(folder / "demonstrations.jsonl", make_demonstrations(files["train"], count, seed))
    warm_up(folder, seed=seed)


def digits(prompt: Prompt) -> int:
    """Of the first number of `What is 347 + 285?`."""
    return len(prompt.messages[-1]["content"].split()[2])


def add_argument(parser: argparse.ArgumentParser) -> None:
    """`--mixed-data`, of a study that trains this task."""
    parser.add_argument("--mixed-data", type=Path, default=DATA, help=f"of {MODULE}; made if not there")


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Makes model and data of the mixed task.")
    parser.add_argument("--output", type=Path, default=DATA)
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    partial = options.output.with_name(f"{options.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write(partial)
    partial.rename(options.output)


if __name__ == "__main__":
    main()
