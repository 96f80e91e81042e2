"""Accuracy of a policy on held-out prompts: avg@k, pass@k and maj@k of k sampled responses.

And two evaluations of the same problems: how many problems changed, and could chance alone explain that?
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf.rewards.grade import count_answers
from rlhf.run.rollout_log import rollout_row
from rlhf.types import Prompt, Rollout, RolloutGroup, ScoredRollout

Rows = list[dict[str, Any]]

RIGHT = 0.5  # an answer with a higher score counts as right
RESAMPLES = 1000


async def evaluate(
    prompts: Mapping[str, Sequence[Prompt]],
    sample: Callable[[Prompt], Awaitable[RolloutGroup]],
    *,
    at_once: int,
    count: Callable[[], None] = lambda: None,
) -> dict[str, list[RolloutGroup]]:
    """Sample and grade all prompts of each data set, in their order; `count` is called after each group.

    Args:
        at_once: groups in progress at the same time; a group's deadline must not run while it is queued.
    """
    slots = asyncio.Semaphore(at_once)

    async def sample_in_slot(prompt: Prompt) -> RolloutGroup:
        async with slots:
            group = await sample(prompt)
        count()
        return group

    return {
        source: await asyncio.gather(*(sample_in_slot(prompt) for prompt in rows)) for source, rows in prompts.items()
    }


def rollouts_of(groups: Mapping[str, Sequence[RolloutGroup]]) -> list[Rollout]:
    """All rollouts of an evaluation."""
    return [sample.rollout for rows in groups.values() for group in rows for sample in group.samples]


def evaluation_metrics(groups: Mapping[str, Sequence[RolloutGroup]]) -> dict[str, float]:
    """Those of each data set, named eval/<data set>/<metric>@<k>."""
    by_source = {source: group_metrics(rows) for source, rows in groups.items()}
    return {f"eval/{source}/{name}": value for source, metrics in by_source.items() for name, value in metrics.items()}


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """avg@k: mean score. pass@k: share of prompts with a right answer. maj@k: score of the most frequent answer.

    Each with its interval, named with /low and /high.
    """
    k, samples = len(groups[0].samples), [sample for group in groups for sample in group.samples]
    scores = np.array([[score_of(sample) for sample in group.samples] for group in groups])
    lengths = [sample.rollout.response_length for sample in samples]
    stopped = [sample.rollout.finish_reason == "stop" for sample in samples]
    by_problem = {"avg": scores.mean(axis=1)}
    if k > 1:
        by_problem["pass"] = (scores.max(axis=1) > RIGHT).astype(float)
        by_problem["maj"] = np.array([_majority(group) for group in groups])
    metrics: dict[str, float] = {}
    for name, values in by_problem.items():
        low, high = bootstrap_interval(values)
        metrics |= {f"{name}@{k}": float(values.mean()), f"{name}@{k}/low": low, f"{name}@{k}/high": high}
    answered, asked = count_answers(samples)
    if asked:
        metrics["answered_fraction"] = answered / asked
    return metrics | {"response_length": float(np.mean(lengths)), "stopped_fraction": float(np.mean(stopped))}


def bootstrap_interval(values: np.ndarray) -> tuple[Any, Any]:
    """The 2.5% and 97.5% quantiles of the mean in RESAMPLES draws of N problems each, with replacement.

    Args:
        values: [N], one per problem: responses to the same problem are not independent. Or [N, P]: P lists of bounds.
    """
    problems = len(values)
    drawn = np.random.default_rng(0).multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)
    low, high = np.quantile(drawn @ values / problems, [0.025, 0.975], axis=0).tolist()
    return low, high


def score_of(sample: ScoredRollout) -> float:
    """The first part of the reward that judges this response (the grader), without format or length terms."""
    judged = (value for value in sample.reward_parts.values() if value is not None)
    return 0.0 if sample.reward is None else next(judged, 0.0)


def _majority(group: RolloutGroup) -> float:
    """Score of the most frequent answer, in its most frequent spelling; ties go to the first."""
    answered = [sample for sample in group.samples if sample.extracted]
    for name in ("vote", "extracted"):
        winners = [winner for winner, _ in Counter(getattr(sample, name) for sample in answered).most_common(1)]
        answered = [sample for sample in answered if getattr(sample, name) in winners]
    return score_of(answered[0]) if answered else 0.0


# --- two evaluations ---


class Comparison(NamedTuple):
    """Accuracy before and after on the same problems; `better` and `worse` count the problems that changed."""

    problems: int
    before: float
    after: float
    better: int
    worse: int
    p_value: float

    def __str__(self) -> str:
        return (
            f"accuracy {self.before:.3f} -> {self.after:.3f} on the same {self.problems} problems: {self.better} "
            f"better, {self.worse} worse, {self.problems - self.better - self.worse} as before\n"
            f"p = {self.p_value:.2g} (exact paired test: how often chance alone would give a change of this size)"
        )


def graded_responses(groups: Mapping[str, Sequence[RolloutGroup]]) -> Rows:
    """A row per response: prompt, gold answer, text, extracted answer, and whether it is right."""
    samples = [(group, sample) for rows in groups.values() for group in rows for sample in group.samples]
    return [rollout_row(group, sample) | {"right": score_of(sample) > RIGHT} for group, sample in samples]


def read_responses(file: Path, *, samples_per_prompt: Collection[int]) -> Rows:
    """Rows of `graded_responses`, one per line.

    Raises:
        ValueError: it holds no such rows, or not as many per problem as the config's data sets, `samples_per_prompt`.
    """
    try:
        rows: Rows = [json.loads(line) for line in file.read_text().splitlines()]
        counts = {responses for _, responses in _right_counts(rows).values()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file}: does not hold graded responses ({error}). Write it with rlhf.evaluate --responses."
        ) from None
    if counts != set(samples_per_prompt):
        numbers, asked = (" or ".join(map(str, sorted(n))) or "no" for n in (counts, set(samples_per_prompt)))
        raise ValueError(
            f"{file}: it has {numbers} responses per problem, and evaluation.samples_per_prompt={asked}. Evaluate both "
            "models with the same config; a file of several models is none to compare with."
        )
    return rows


def compare(earlier: Rows, later: Rows) -> Comparison:
    """Compare graded responses problem by problem; ValueError if they are not equally many to the same problems."""
    before, after = _right_counts(earlier), _right_counts(later)
    if not before or {key: n for key, (_, n) in before.items()} != {key: n for key, (_, n) in after.items()}:
        raise ValueError(
            f"the two evaluations differ in their problems ({len(before)} and {len(after)}, of which "
            f"{len(before.keys() & after.keys())} are in both) or in evaluation.samples_per_prompt. Evaluate both "
            "models with the same config and data."
        )
    change = np.array([after[key][0] - right for key, (right, _) in before.items()])
    return Comparison(
        problems=len(before),
        before=sum(row["right"] for row in earlier) / len(earlier),
        after=sum(row["right"] for row in later) / len(later),
        better=int((change > 0).sum()),
        worse=int((change < 0).sum()),
        p_value=sign_flip_p_value(change),
    )


def _right_counts(rows: Rows) -> dict[tuple[str, str], tuple[int, int]]:
    """(right responses, responses) of each problem; two files may use the same id for different problems."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        key = (row["prompt_id"], row["prompt"])
        right, responses = counts.get(key, (0, 0))
        counts[key] = (right + int(row["right"]), responses + 1)
    return counts


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Two-sided p-value of the exact sign-flip test (Fisher's randomization test for pairs).

    If nothing changed, each difference is as likely to have the other sign. The p-value is the share of all
    assignments of signs whose sum is at least as far from 0 as the observed one. With one response per problem this
    is McNemar's exact test.

    Args:
        differences: [N] int, right responses after minus before.
    """
    chances: np.ndarray = np.ones(1)  # chances[i]: probability that the sum is i - len(chances) // 2
    for size in np.abs(differences[differences != 0]):
        either_sign = np.zeros(2 * size + 1)
        either_sign[[0, -1]] = 0.5
        chances = np.convolve(chances, either_sign)
    sums = np.arange(len(chances)) - len(chances) // 2
    return float(min(1.0, chances[np.abs(sums) >= abs(differences.sum())].sum()))
