"""Accuracy of a policy on held-out prompts: avg@k, pass@k and maj@k of k sampled responses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from rlhf.rewards.grade import count_answers
from rlhf.types import Prompt, RolloutGroup, ScoredRollout

RIGHT = 0.5  # an answer with a higher score counts as right
RESAMPLES = 1000


async def evaluate(
    prompts: Mapping[str, Sequence[Prompt]],
    sample: Callable[[Prompt], Awaitable[RolloutGroup]],
    *,
    at_once: int,
    count: Callable[[], None] = lambda: None,
) -> dict[str, list[RolloutGroup]]:
    """Sample and grade all prompts of each data set, in their order.

    Args:
        at_once: groups in progress at the same time; a group's deadline must not run while it is queued.
        count: called after each group.
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


def evaluation_metrics(groups: Mapping[str, Sequence[RolloutGroup]]) -> dict[str, float]:
    """Metrics of `group_metrics` for each data set, named eval/<data set>/<metric>@<k>."""
    return {
        f"eval/{source}/{name}": value for source, rows in groups.items() for name, value in group_metrics(rows).items()
    }


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """avg@k: mean score. pass@k: share of prompts with a right answer. maj@k: score of the most frequent answer.

    Each with its interval, named with /low and /high.
    """
    k = len(groups[0].samples)
    scores = np.array([[score_of(sample) for sample in group.samples] for group in groups])
    lengths = [sample.rollout.response_length for group in groups for sample in group.samples]
    stopped = [sample.rollout.finish_reason == "stop" for group in groups for sample in group.samples]
    by_problem = {"avg": scores.mean(axis=1)}
    if k > 1:
        by_problem["pass"] = (scores.max(axis=1) > RIGHT).astype(float)
        by_problem["maj"] = np.array([_majority(group) for group in groups])
    metrics: dict[str, float] = {}
    for name, values in by_problem.items():
        low, high = bootstrap_interval(values)
        metrics |= {f"{name}@{k}": float(values.mean()), f"{name}@{k}/low": low, f"{name}@{k}/high": high}
    answered, asked = count_answers(sample for group in groups for sample in group.samples)
    if asked:
        metrics["answered_fraction"] = answered / asked
    return metrics | {"response_length": float(np.mean(lengths)), "stopped_fraction": float(np.mean(stopped))}


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """The 2.5% and 97.5% quantiles of the mean in RESAMPLES draws of N problems each, with replacement.

    Args:
        values: [N], one per problem: responses to the same problem are not independent.
    """
    problems = len(values)
    drawn = np.random.default_rng(0).multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)
    low, high = np.quantile(drawn @ values / problems, [0.025, 0.975])
    return float(low), float(high)


def score_of(sample: ScoredRollout) -> float:
    """The first part of the reward (the grader), without format or length terms."""
    first = next(iter(sample.reward_parts.values()), None)
    return first or 0.0


def _majority(group: RolloutGroup) -> float:
    """Score of the most frequent answer; ties go to the first."""
    answers = Counter(sample.extracted for sample in group.samples if sample.extracted)
    if not answers:
        return 0.0
    winner, _ = answers.most_common(1)[0]
    return next(score_of(sample) for sample in group.samples if sample.extracted == winner)
