"""Mutated LaTeX for a minute: no answer raises an exception, takes too long or ends its worker."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest
from answers.test_cases import ANSWERS

from rlhf.config.reward import RewardConfig
from rlhf.rewards.grade import FAILURES
from rlhf.rewards.scorer import Scorer

pytestmark = pytest.mark.faults

FUZZ_S = 60.0
ROWS = [row for rows in ANSWERS.values() for row in rows]  # a gold answer, its right answers, its wrong ones
TEXTS = [text for gold, *lists in ROWS for text in (gold, *itertools.chain(*lists)) if len(text) < 500]
PIECES_WRITTEN = r"""
    = \approx \sim < \le \in \ne ~ { } ( ) [ ] \{ \} | , ; : + - * / ^ _ ! ' % \% $ \pm \cup \cap \setminus \div \cdot
    \frac \sqrt \binom \log \sin \sum_{k=1}^ \int \lim \overline \text{ \text{and} \text{or} \boxed \pmod \bmod
    \circ \infty \emptyset \mathbb{R} \begin{pmatrix} \end{pmatrix} & \\ \ldots ... 0 1 7 .5 1e9 9^9 x i e \pi
"""
PIECES = [*PIECES_WRITTEN.split(), " ", "\n", "²", "½", "√", "千"]


def mutated(rng: random.Random, text: str) -> str:
    """The text after a few edits: a piece inserted, cut, doubled, repeated many times, or taken from another text."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.randrange(6))
        match rng.randrange(6):
            case 0 | 1:
                text = text[:start] + rng.choice(PIECES) + text[start:]
            case 2:
                text = text[:start] + text[end:]
            case 3:
                text = text[:end] + text[start:]
            case 4:
                other = rng.choice(TEXTS)
                text = text[:start] + other[rng.randrange(len(other) + 1) :]
            case 5:
                text = text[:start] + rng.choice(PIECES) * rng.choice((2, 3, 60, 200)) + text[start:]
    return text


def test_no_mutated_answer_or_gold_answer_breaks_the_grader() -> None:
    rng, counts, broken = random.Random(26), Counter[str](), []
    config = RewardConfig.model_validate({"parts": [{"name": "math", "mode": "strict"}], "workers": 2})
    deadline = time.monotonic() + FUZZ_S
    with Scorer(config) as scorer:
        while time.monotonic() < deadline:
            golds = [rng.choice(TEXTS) for _ in range(256)]
            golds = [mutated(rng, gold) if rng.random() < 0.3 else gold for gold in golds]
            answers = [mutated(rng, rng.choice((gold, rng.choice(TEXTS)))) for gold in golds]
            batches = scorer.submit_batch([rf"\boxed{{{answer}}}" for answer in answers], golds)
            for answer, gold, graded in zip(answers, golds, scorer.graded_batch(batches), strict=True):
                counts[graded.status] += 1
                broken += [(answer, gold, graded.status)] if graded.status in FAILURES else []
    assert broken == []
    assert counts["ok"] > 1000
