"""Makes the recipe's model, its demonstrations and its problems: python make_data.py FOLDER

The problem is to write letters in the order of the alphabet. In the demonstrations a careless pupil does so, who at
each place exchanges two neighbours with a probability of 0.4. An answer of theirs is seldom right from end to end.
"""

import json
import random
import sys
from pathlib import Path

from rlhf.learner.tiny_model import make_model, make_tokenizer, save_model

LETTERS, LENGTH = "abcdefghijklmnop", 8
EXCHANGED = 0.4
ROWS = {"demonstrations": 8000, "train": 8000, "test": 256}


def careless(letters: str, rng: random.Random) -> str:
    written = sorted(letters)
    for place in range(len(written) - 1):
        if rng.random() < EXCHANGED:
            written[place : place + 2] = written[place + 1], written[place]
    return "".join(written)


def row(name: str, rng: random.Random) -> dict[str, object]:
    letters = "".join(rng.sample(LETTERS, LENGTH))
    question = f"Sort {letters}"
    if name != "demonstrations":
        return {"question": question, "answer": "".join(sorted(letters))}
    turns = (("user", question), ("assistant", careless(letters, rng)))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


folder, rng = Path(sys.argv[1]), random.Random(0)
save_model(make_model(seed=0), make_tokenizer(), folder / "untrained")
for name, count in ROWS.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(name, rng)) + "\n" for _ in range(count)))
