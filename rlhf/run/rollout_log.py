"""Logs of the rollouts of a step: their metrics before any update, and their rows in rollouts/."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf.config.reward import logged_name
from rlhf.log.reductions import Binned, Histogram, Mean, StepMetrics, UpdateOutcome, counts_of
from rlhf.rewards.grade import count_answers
from rlhf.types import Minibatch, PolicyTargets, Rollout, RolloutGroup, ScoredRollout, StepBatch, rewards_differ

DIGITS = 4  # to which values of a token are rounded


@dataclass(frozen=True)
class FinishedStep:
    """A training step with its number, from 1."""

    step: int
    groups: Sequence[RolloutGroup]
    batch: StepBatch
    advantages: np.ndarray  # [R]
    targets: PolicyTargets
    epochs: Sequence[Sequence[Minibatch]]  # of the policy; empty while a critic warms up
    updates: Sequence[UpdateOutcome]
    extra_metrics: dict[str, float]  # of the program; logged as they are


def rollout_metrics(
    groups: Sequence[RolloutGroup], advantages: np.ndarray, *, version: int, asynchronous: bool
) -> StepMetrics:
    """Metrics of the rollouts of a step, before any update.

    `version` is that of the weights that the step trains; a token lags by the difference to its own. Only an
    `asynchronous` run, in which rollouts may lag, logs the lag.
    """
    samples = [sample for group in groups for sample in group.samples]
    several = [group for group in groups if len(group.samples) > 1]
    metrics: StepMetrics = {
        "reward": Histogram(tuple(s.reward for s in samples if s.reward is not None)),
        "reward/equal_group_fraction": _mean([not rewards_differ(group.rewards()) for group in several]),
        "reward/answered_fraction": Mean(*count_answers(samples)),
        "rollout/response_length": Histogram(tuple(float(s.rollout.response_length) for s in samples)),
        "rollout/stopped_fraction": _mean([s.rollout.finish_reason == "stop" for s in samples]),
        "policy/advantage/histogram": Binned(*counts_of(advantages)),
        "policy/advantage_abs": Mean(float(np.abs(advantages).sum()), float(len(advantages))),
    }
    if asynchronous:
        sampled = [sample.rollout for sample in samples if sample.rollout.version_spans]
        metrics["rollout/lag"] = Histogram(tuple(float(version - rollout.oldest_version) for rollout in sampled))
        lags = Counter[int]()  # sampled tokens by the age of their weights, in training steps
        for span in itertools.chain.from_iterable(sample.rollout.version_spans for sample in samples):
            lags[version - span.version] += span.end - span.start
        for lag, tokens in sorted(lags.items()):
            metrics[f"rollout/tokens_at_lag/{lag}"] = Mean(float(tokens), float(lags.total()))
        interrupted = [places for rollout in sampled if (places := interruptions(rollout))]
        metrics["rollout/interrupted"] = Mean(float(len(interrupted)), 1.0)
        metrics["rollout/recomputed_tokens"] = Mean(float(sum(map(sum, interrupted))), 1.0)
    metrics |= environment_metrics([sample.rollout for sample in samples if sample.rollout.outcome is not None])
    for name in dict.fromkeys(name for sample in samples for name in sample.reward_parts):
        known = [value for s in samples if (value := s.reward_parts.get(name)) is not None]
        metrics[f"reward/part/{logged_name(name)}"] = _mean(known)
    return metrics


def interruptions(rollout: Rollout) -> list[int]:
    """Where new weights came in the middle of a turn: how many tokens its sequence had, whose keys were dropped.

    A turn that goes on from the ids of the turn before, with newer weights, counts too.
    """
    return [
        before.end
        for sequence in rollout.sequences
        for before, after in itertools.pairwise(sequence.version_spans)
        if before.end == after.start and before.version != after.version
    ]


def environment_metrics(rollouts: Sequence[Rollout]) -> StepMetrics:
    """Metrics of rollouts that had an environment or tools; empty if none had."""
    if not rollouts:
        return {}
    metrics: StepMetrics = {
        "environment/turns": Histogram(tuple(float(rollout.facts["turns"]) for rollout in rollouts)),
        "environment/seconds": _mean([rollout.facts["environment_seconds"] for rollout in rollouts]),
        "environment/sequences": _mean([len(rollout.sequences) for rollout in rollouts]),
    }
    if any(untrained := [rollout.facts.get("untrained_tokens", 0) for rollout in rollouts]):
        metrics["environment/untrained_tokens"] = _mean(untrained)
    if offered := [rollout.facts for rollout in rollouts if "tool_calls" in rollout.facts]:
        metrics["environment/tool_calls"] = _mean([facts["tool_calls"] for facts in offered])
        metrics["environment/tool_errors"] = _mean([facts["tool_errors"] for facts in offered])
        metrics["environment/used_fraction"] = _mean([facts["tool_calls"] > 0 for facts in offered])
    for ended_by, count in sorted(Counter(rollout.facts["ended_by"] for rollout in rollouts).items()):
        metrics[f"environment/ended_by/{ended_by}"] = Mean(float(count), float(len(rollouts)))
    return metrics


def _mean(values: Sequence[float]) -> Mean:
    """The mean of values, or the share of flags that are True."""
    return Mean(float(sum(values)), float(len(values)))


def rollout_rows(step: int, groups: Sequence[RolloutGroup], advantages: Sequence[float]) -> list[dict[str, Any]]:
    """The graded rollouts of a step as rows of a JSON file, in the order of the advantages."""
    rows = [rollout_row(group, sample) for group in groups for sample in group.samples]
    return [{"step": step, **row, "advantage": advantage} for row, advantage in zip(rows, advantages, strict=True)]


def rollout_row(group: RolloutGroup, sample: ScoredRollout) -> dict[str, Any]:
    """A graded rollout as a row of a JSON file; `turns`, `facts` and `in_thought` are left out if empty or False.

    `prompt` is the last message of the prompt and `context` the messages before it.
    """
    rollout = sample.rollout
    messages = group.prompt.messages if rollout.opening is None else rollout.opening
    optional = {"turns": list(rollout.turns), "facts": rollout.facts, "in_thought": group.prompt.in_thought}
    return {
        "prompt_id": rollout.prompt_id,
        "epoch": rollout.epoch,
        "sample": rollout.sample,
        "context": list(messages[:-1]),
        "prompt": messages[-1]["content"] if messages else "",
        "answer": group.prompt.answer,
        "text": sample.text,
        "extracted": sample.extracted,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "status": sample.status,
        "finish_reason": rollout.finish_reason,
        "response_tokens": rollout.response_length,
        "versions": [list(span) for span in rollout.version_spans],
        **{name: value for name, value in optional.items() if value},
    }


def token_values(batch: StepBatch, targets: PolicyTargets, tokenizer: Any) -> list[dict[str, list[Any]]]:
    """The tokens of each rollout of the step from its first sampled one on, as text, with two values per token.

    The values are the advantage and the log-prob of the learner minus that of the engine; None if the token was not
    sampled. Rollouts whose old log-probs were not computed have no differences.
    """
    tokens, rows = batch.tokens, []
    for first, last in itertools.pairwise(batch.row_bounds):
        starts = (tokens.cu_seqlens[:-1] + batch.prompt_lengths)[first:last]
        at = np.concatenate(list(map(np.arange, starts, tokens.cu_seqlens[first + 1 : last + 1])))
        mask = tokens.response_mask[at]

        def rounded(column: np.ndarray, mask: np.ndarray = mask) -> list[float | None]:
            values = column.round(DIGITS).tolist()
            return [value if sampled else None for value, sampled in zip(values, mask, strict=True)]

        texts = [tokenizer.decode([token]) for token in tokens.token_ids[at].tolist()]
        row: dict[str, list[Any]] = {"tokens": texts, "token_advantages": rounded(targets.advantages[at])}
        if targets.old_logprobs is not None and (old := targets.old_logprobs[at])[mask].any():
            row["token_differences"] = rounded(old - tokens.rollout_logprobs[at])
        rows.append(row)
    return rows
