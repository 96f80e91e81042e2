"""A curriculum of one's own: train most on the kind of problem that the model solves about half of the time.

    python loop.py [section.key=value ...]

A group whose rollouts are all right or all wrong teaches nothing. With a share p of right answers, p (1 - p) says how
much a group is expected to teach. So the loop keeps p for each kind of problem and draws prompts in that proportion.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import yaml

import rlhf

CONFIG = Path(__file__).parent / "config.yaml"
NEWEST = 0.3  # weight of the newest step in the running share of right answers
LEAST = 0.02  # weight of a kind that teaches almost nothing, so that it is not forgotten


def kind_of(prompt: Any) -> str:
    """The kind of `What is 347 + 285?`, by its number of carries."""
    left, right = (int(number) for number in re.findall(r"\d+", prompt.messages[-1]["content"]))
    return f"{sum(left % place + right % place >= place for place in (10, 100, 1000))} carries"


def main(overrides: dict[str, Any]) -> None:
    with rlhf.Trainer(CONFIG, **overrides) as trainer:
        config, rng = trainer.config, random.Random(trainer.config.run.seed)
        pools = defaultdict(list)
        for prompt in trainer.prompts:
            pools[kind_of(prompt)].append(prompt)
        kinds, right = sorted(pools), dict.fromkeys(pools, 0.5)

        while trainer.step < config.run.steps:
            weights = [max(right[kind] * (1 - right[kind]), LEAST) for kind in kinds]
            drawn = Counter(rng.choices(kinds, weights, k=config.rollout.prompts_per_step))
            groups = trainer.sample([prompt for kind in kinds for prompt in rng.sample(pools[kind], drawn[kind])])
            trainer.update(groups)
            trainer.publish()

            rewards = defaultdict(list)
            for group in groups:
                rewards[kind_of(group.prompt)] += [sample.reward or 0.0 for sample in group.samples]
            for kind, values in rewards.items():
                right[kind] += NEWEST * (sum(values) / len(values) - right[kind])
            if trainer.step % 5 == 0:
                print(*(f"{kind}: {drawn[kind]} drawn, {right[kind]:.2f} right" for kind in kinds), sep="; ")


if __name__ == "__main__":
    main({key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in sys.argv[1:])})
