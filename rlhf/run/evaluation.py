"""The metric of a policy on held-out prompts: avg@k, pass@k and maj@k of k sampled responses; two evaluations compared.

The metric is one part of the reward, `evaluation.metric`. A response without a value of it counts as ungraded, never as
wrong. A comparison says on how many problems two evaluations differ, and whether chance alone could explain that.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf.config.reward import logged_name, may_be_accuracy
from rlhf.environments.turns import CALL_LIMIT
from rlhf.rewards.grade import NO_ANSWER, OK, UNGRADED, count_answers
from rlhf.run.rollout_log import rollout_row
from rlhf.types import Prompt, Rollout, RolloutGroup, ScoredRollout

Rows = list[dict[str, Any]]

RIGHT = 0.5  # an answer with a higher value counts as right
RESAMPLES = 1000
ROUNDING = 1e-9  # rounding error of a difference of means
MAX_SUM = 1e6  # up to this sum of absolute whole differences, the distribution is computed exactly
SIGNS, SIGNS_AT_ONCE = 20_000, 1_000  # random assignments of signs, for other differences


async def evaluate(
    prompts: Mapping[str, Sequence[Prompt]],
    sample: Callable[[Prompt], Awaitable[RolloutGroup]],
    *,
    at_once: int,
    count: Callable[[], None] = lambda: None,
) -> dict[str, list[RolloutGroup]]:
    """Sample and grade all prompts of each data set, in their order; `count` is called after each group.

    `at_once` groups are in progress: the deadline of a group must not run while it waits in a queue.
    """
    slots = asyncio.Semaphore(at_once)

    async def sample_in_slot(prompt: Prompt) -> RolloutGroup:
        async with slots:
            group = await sample(prompt)
        count()
        return group

    return {source: await asyncio.gather(*map(sample_in_slot, rows)) for source, rows in prompts.items()}


def rollouts_of(groups: Mapping[str, Sequence[RolloutGroup]]) -> list[Rollout]:
    """All rollouts of an evaluation."""
    return [sample.rollout for rows in groups.values() for group in rows for sample in group.samples]


def metric_value(sample: ScoredRollout, metric: str) -> float | None:
    """The metric of a response: the value of a part of its reward, before the weight; None if it was not graded.

    A rollout whose tool call or program exceeded a limit counts as 0: the model caused that.
    """
    if sample.status == CALL_LIMIT and not sample.reward_parts:
        return 0.0
    return sample.reward_parts.get(metric)


def evaluation_metrics(groups: Mapping[str, Sequence[RolloutGroup]], metrics: Mapping[str, str]) -> dict[str, float]:
    """`group_metrics` of each data set, named eval/<data set>/<name>. `metrics` names the metric of each data set."""
    by_source = {source: group_metrics(rows, metrics[source]) for source, rows in groups.items()}
    return {f"eval/{source}/{name}": value for source, values in by_source.items() for name, value in values.items()}


def group_metrics(groups: Sequence[RolloutGroup], metric: str) -> dict[str, float]:
    """avg@k, pass@k and maj@k with their intervals (/low and /high), and the means of other parts as part/NAME.

    avg@k: mean over problems of the mean value of their graded responses. Problems without any are left out.
    pass@k: share of problems with a right response, if all values are from 0 to 1.
    maj@k: value of the most frequent answer.
    pass@k and maj@k count only problems whose k responses are all graded, because an ungraded one may be right.
    `metric`: the name of the metric; empty if nothing grades the responses.
    """
    k, samples = len(groups[0].samples), [sample for group in groups for sample in group.samples]
    metrics: dict[str, float] = {}
    answered, asked = count_answers(samples)
    if metric:
        values = _values(groups, metric)
        ungraded, outside = np.isnan(values), (values < 0) | (values > 1)
        whole = np.flatnonzero(~ungraded.any(axis=1))
        by_problem = {"avg": _means(values)}
        if k > 1 and may_be_accuracy(metric) and not outside.any():
            by_problem["pass"] = (values[whole].max(axis=1) > RIGHT).astype(float)
        if k > 1 and asked:  # else the reward reads no answers
            by_problem["maj"] = np.array([_majority(groups[index], metric) for index in whole])
        for name, means in by_problem.items():
            if len(means):
                low, high = bootstrap_interval(means)
                metrics |= {f"{name}@{k}": float(means.mean()), f"{name}@{k}/low": low, f"{name}@{k}/high": high}
        metrics |= {"outside_fraction": float(outside.sum() / (~ungraded).sum())} if outside.any() else {}
        metrics["ungraded_fraction"] = float(ungraded.mean())
    for name in dict.fromkeys(name for sample in samples for name in sample.reward_parts if name != metric):
        if len(means := _means(_values(groups, name))):
            metrics[f"part/{logged_name(name)}"] = float(means.mean())
    if asked:
        metrics["answered_fraction"] = answered / asked
    lengths = [sample.rollout.response_length for sample in samples]
    stopped = [sample.rollout.finish_reason == "stop" for sample in samples]
    return metrics | {"response_length": float(np.mean(lengths)), "stopped_fraction": float(np.mean(stopped))}


def _values(groups: Sequence[RolloutGroup], metric: str) -> np.ndarray:
    """[problems, k] values of the metric; NaN for ungraded responses."""
    values = [[metric_value(sample, metric) for sample in group.samples] for group in groups]
    return np.array(values, dtype=float)  # None becomes NaN


def _means(values: np.ndarray) -> np.ndarray:
    """[N] mean value of each problem over its graded responses, of the N problems that have any."""
    return np.nanmean(values[~np.isnan(values).all(axis=1)], axis=1)


def ungraded_warning(source: str, groups: Sequence[RolloutGroup], metric: str) -> str:
    """A warning with the reasons if more than UNGRADED of the responses have no value of the metric; else empty."""
    samples = [sample for group in groups for sample in group.samples]
    missing = [sample.status for sample in samples if metric_value(sample, metric) is None]
    if not metric or len(missing) <= UNGRADED * len(samples):
        return ""
    statuses = Counter("no value" if status in (OK, NO_ANSWER) else status for status in missing)
    why = ", ".join(f"{count} x {status}" for status, count in statuses.most_common())
    problem = f"evaluation of {source}: {metric} gave no value for {len(missing)} of {len(samples)} responses ({why})"
    if len(missing) < len(samples):
        return f"{problem}. They do not count as wrong: avg@k is over the others."
    others = sorted({name for sample in samples for name, value in sample.reward_parts.items() if value is not None})
    remedy = f" There are values of {', '.join(others)}: name one as evaluation.metric." if others else ""
    return f"{problem}, so nothing was measured.{remedy}"


def bootstrap_interval(values: np.ndarray) -> tuple[Any, Any]:
    """The 2.5% and 97.5% quantiles of the mean in RESAMPLES draws of N problems each, with replacement.

    `values`: [N], one per problem, since responses to the same problem are not independent; [N, P] for P intervals.
    """
    return _interval(_drawn_means(values, np.random.default_rng(0)))


def mean_over_sets(groups: Mapping[str, Sequence[RolloutGroup]], metrics: Mapping[str, str]) -> dict[str, float]:
    """The mean of avg@k over the data sets, each with the same weight, as eval/mean/avg with /low and /high.

    The interval is that of `bootstrap_interval`; each draw takes problems of every data set. Empty if no response of a
    data set is graded.
    """
    by_set = [_means(_values(rows, metrics[source])) for source, rows in groups.items()]
    if not all(map(len, by_set)):
        return {}
    rng = np.random.default_rng(0)
    low, high = _interval(np.mean([_drawn_means(values, rng) for values in by_set], axis=0))
    mean = float(np.mean([values.mean() for values in by_set]))
    return {"eval/mean/avg": mean, "eval/mean/avg/low": low, "eval/mean/avg/high": high}


def sizes_of_sets(groups: Mapping[str, Sequence[RolloutGroup]]) -> dict[str, tuple[int, int]]:
    """The number of problems of each data set, and of responses to each."""
    return {source: (len(rows), len(rows[0].samples)) for source, rows in groups.items()}


def _drawn_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[RESAMPLES] or [RESAMPLES, P] means of N problems that are drawn with replacement."""
    problems = len(values)
    drawn = rng.multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)
    return drawn @ values / problems


def _interval(means: np.ndarray) -> tuple[Any, Any]:
    low, high = np.quantile(means, [0.025, 0.975], axis=0).tolist()
    return low, high


def _majority(group: RolloutGroup, metric: str) -> float | None:
    """Value of the most frequent answer in its most frequent spelling. Ties go to the first; 0 without an answer."""
    answered = [sample for sample in group.samples if sample.extracted]
    for name in ("vote", "extracted"):
        winners = [winner for winner, _ in Counter(getattr(sample, name) for sample in answered).most_common(1)]
        answered = [sample for sample in answered if getattr(sample, name) in winners]
    return metric_value(answered[0], metric) if answered else 0.0


# --- two evaluations ---


class Comparison(NamedTuple):
    """A metric before and after on the same problems."""

    name: str  # accuracy if all values are from 0 to 1, else the name of the metric
    problems: int  # with a graded response in both evaluations
    left_out: int  # the other problems
    before: float  # mean over the problems of the mean value of their graded responses
    after: float
    better: int  # problems with a higher mean
    worse: int
    ungraded: tuple[int, int]  # responses without a value, before and after
    p_value: float

    def __str__(self) -> str:
        first, second = self.ungraded
        missing = f"\nungraded, and not counted: {first} responses before, {second} after" if first or second else ""
        missing += f"; {self.left_out} problems without a graded response in both" if self.left_out else ""
        if not self.problems:
            return f"{self.name}: no problem has a graded response in both evaluations{missing}"
        return (
            f"{self.name} {self.before:.3f} -> {self.after:.3f} on the same {self.problems} problems: {self.better} "
            f"better, {self.worse} worse, {self.problems - self.better - self.worse} as before{missing}\n"
            f"p = {self.p_value:.2g} (paired test: how often chance alone would give a change of this size)"
        )


def graded_responses(groups: Mapping[str, Sequence[RolloutGroup]], metrics: Mapping[str, str]) -> Rows:
    """A row per response: prompt, gold answer, text, extracted answer, the metric of its data set, and its value."""
    return [
        rollout_row(group, sample) | {"metric": metrics[source], "value": metric_value(sample, metrics[source])}
        for source, rows in groups.items()
        for group in rows
        for sample in group.samples
    ]


def read_responses(file: Path, *, samples_per_prompt: Collection[int], metrics: Collection[str]) -> Rows:
    """Rows of `graded_responses`, one per line.

    ValueError if the file has other rows, numbers of responses per problem or metrics.
    """
    try:
        rows: Rows = [json.loads(line) for line in file.read_text().splitlines()]
        counts = {len(values) for values in _values_by_problem(rows).values()}
        names = {row["metric"] for row in rows}
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"a row has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{file}: does not hold graded responses ({why}). Write it with rlhf.evaluate --responses."
        ) from None
    if counts != set(samples_per_prompt):
        numbers, asked = (" or ".join(map(str, sorted(n))) or "no" for n in (counts, set(samples_per_prompt)))
        raise ValueError(
            f"{file}: it has {numbers} responses per problem, but evaluation.samples_per_prompt={asked}. Evaluate both "
            "models with the same config; a file of several models cannot be compared."
        )
    if names != set(metrics):
        earlier, now = (" and ".join(sorted(of)) for of in (names, set(metrics)))
        raise ValueError(
            f"{file}: it has values of {earlier}, but evaluation.metric is {now} here. Evaluate both models with the "
            "same metric."
        )
    return rows


def compare(earlier: Rows, later: Rows) -> Comparison:
    """Compare two evaluations problem by problem; ValueError if these, or their numbers of responses, differ."""
    before, after = _values_by_problem(earlier), _values_by_problem(later)
    if not before or {key: len(v) for key, v in before.items()} != {key: len(v) for key, v in after.items()}:
        raise ValueError(
            f"the two evaluations differ in their problems ({len(before)} and {len(after)}, of which "
            f"{len(before.keys() & after.keys())} are in both) or in evaluation.samples_per_prompt. Evaluate both "
            "models with the same config and data."
        )
    means = np.array([[_mean(before[key]), _mean(after[key])] for key in before])
    kept = ~np.isnan(means).any(axis=1)
    # change of the sum over the responses; a whole number if all are graded 0 or 1
    change = (np.diff(means)[:, 0] * list(map(len, before.values())))[kept]
    change = np.where(np.abs(change - change.round()) < ROUNDING, change.round(), change)
    metric = earlier[0]["metric"]
    is_accuracy = may_be_accuracy(metric) and all(0 <= row["value"] <= 1 for row in _graded([*earlier, *later]))
    return Comparison(
        name="accuracy" if is_accuracy else metric,
        problems=int(kept.sum()),
        left_out=int((~kept).sum()),
        before=float(means[kept, 0].mean()) if kept.any() else np.nan,
        after=float(means[kept, 1].mean()) if kept.any() else np.nan,
        better=int((change > 0).sum()),
        worse=int((change < 0).sum()),
        ungraded=(len(earlier) - len(_graded(earlier)), len(later) - len(_graded(later))),
        p_value=sign_flip_p_value(change),
    )


def _graded(rows: Rows) -> Rows:
    return [row for row in rows if row["value"] is not None]


def _values_by_problem(rows: Rows) -> dict[tuple[str, str], list[float | None]]:
    """The values of the responses to each problem; two files may use the same id for different problems."""
    values: dict[tuple[str, str], list[float | None]] = {}
    for row in rows:
        values.setdefault((row["prompt_id"], row["prompt"]), []).append(row["value"])
    return values


def _mean(values: Sequence[float | None]) -> float:
    """The mean of the graded values; NaN if none is graded."""
    graded = [value for value in values if value is not None]
    return sum(graded) / len(graded) if graded else np.nan


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Two-sided p-value of the sign-flip test (Fisher's randomization test for pairs).

    If nothing changed, each difference is as likely to have the other sign. The p-value is the share of all
    assignments of signs whose sum is at least as far from 0 as the observed one. It is exact for whole numbers;
    otherwise it is estimated from SIGNS random assignments and the observed one. With one response per problem, right
    or wrong, this is McNemar's exact test. `differences`: [N], one per problem: the sum over its responses, after minus
    before.
    """
    observed, most = abs(differences.sum()), np.abs(differences).sum()
    if most > MAX_SUM or (differences != differences.round()).any():
        rng, shape = np.random.default_rng(0), (SIGNS_AT_ONCE, len(differences))
        sums = np.concatenate([rng.choice((-1.0, 1.0), shape) @ differences for _ in range(SIGNS // SIGNS_AT_ONCE)])
        return float((1 + (np.abs(sums) >= observed - ROUNDING * most).sum()) / (1 + SIGNS))
    chances: np.ndarray = np.ones(1)  # chances[i]: probability that the sum is i - len(chances) // 2
    for size in np.abs(differences[differences != 0]).astype(int):
        either_sign = np.zeros(len(chances) + 2 * size)
        either_sign[: len(chances)] += 0.5 * chances
        either_sign[2 * size :] += 0.5 * chances
        chances = either_sign
    sums = np.arange(len(chances)) - len(chances) // 2
    return float(min(1.0, chances[np.abs(sums) >= observed].sum()))
