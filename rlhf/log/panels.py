"""Groups of metrics: the sections and charts of the report and of the wandb dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from rlhf.config.reward import logged_name, may_be_accuracy
from rlhf.log.sinks import BOUNDS


class Panel(NamedTuple):
    """One chart."""

    title: str
    metrics: tuple[str, ...]  # patterns of names
    unit: str = ""
    log: bool = False  # of the y-axis


METRIC = "Metric of the evaluation"  # the report replaces this title by the name of the metric

SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Examples": (
        Panel("Loss", ("train/loss", "eval/loss"), "nats"),
        Panel("Perplexity", ("train/perplexity", "eval/perplexity")),
        Panel("Pairs in the right order", ("train/accuracy", "eval/accuracy")),
        Panel("Margin of the scores", ("train/margin", "eval/margin")),
    ),
    "Reward": (
        Panel("Reward", ("reward/mean",)),
        Panel("Parts of the reward", ("reward/part/*",)),
        Panel("Groups of equal rewards", ("reward/equal_group_fraction",)),
        Panel("Responses with an answer", ("reward/answered_fraction",)),
        Panel("Size of the advantages", ("policy/advantage_abs",)),
    ),
    "Evaluation": (
        Panel(METRIC, ("eval/*/avg@*", "eval/*/pass@*", "eval/*/maj@*")),
        Panel("Other parts of the reward", ("eval/*/part/*",)),
        Panel("Responses that nothing graded", ("eval/*/ungraded_fraction",)),
        Panel("Values outside of 0 to 1", ("eval/*/outside_fraction",)),
        Panel("Rows that are trained on", ("eval/*in_training_fraction",)),
        Panel("Response length", ("eval/*/response_length",), "tokens"),
        Panel("Responses that stopped", ("eval/*/stopped_fraction",)),
        Panel("Responses with an answer", ("eval/*/answered_fraction",)),
    ),
    "Responses": (
        Panel("Length", ("rollout/response_length/mean", "rollout/response_length/p95"), "tokens"),
        Panel("Responses that stopped", ("rollout/stopped_fraction",)),
        Panel("Lag of the weights", ("rollout/lag/mean", "rollout/lag/max"), "steps"),
    ),
    "Environment": (
        Panel("Turns", ("environment/turns/mean",)),
        Panel("Calls of a rollout", ("environment/tool_calls", "environment/tool_errors")),
        Panel("Rollouts that call a tool", ("environment/used_fraction",)),
        Panel("How rollouts end", ("environment/ended_by/*",)),
        Panel("Waiting for the environment", ("environment/seconds",), "s"),
    ),
    "Policy": (
        Panel("Entropy", ("policy/entropy",), "nats per token"),
        Panel("Loss", ("policy/loss",)),
        Panel("Clipped tokens", ("policy/clip_fraction", "policy/dual_clip_fraction")),
        Panel("Largest ratio", ("policy/ratio_max",), log=True),
        Panel("Effective samples", ("policy/effective_sample_fraction",)),
        Panel("Importance weight", ("policy/importance_weight", "policy/importance_outside_fraction")),
        Panel("Sequences left out", ("policy/geometric_mask_fraction", "policy/off_policy_mask_fraction")),
    ),
    "KL": (
        Panel("KL to the reference", ("policy/kl_k[1234]",), "nats per token"),
        Panel("KL to the teachers", ("policy/teacher_kl",), "nats per token"),
        Panel("KL of the step's updates", ("policy/kl_old",), "nats per token"),
        Panel("Engine against learner", ("policy/engine_kl",), "nats per token", log=True),
        Panel("Engine against learner, by turn", ("policy/engine_kl/turn_*",), "nats per token", log=True),
        Panel("Engine against learner, over its bound", ("policy/engine_kl_excess",), log=True),
        Panel("Engine against learner, |difference|", ("policy/engine_logprob_difference",), "nats", log=True),
        Panel("KL of a response", ("policy/kl_response",), "nats"),
        Panel("KL coefficient", ("policy/kl_coef",)),
    ),
    "Learner": (
        Panel("Learning rate", ("learner/lr", "critic/lr")),
        Panel("Gradient norm", ("learner/grad_norm", "critic/grad_norm"), log=True),
        Panel("Updates skipped", ("learner/updates_skipped", "critic/updates_skipped")),
        Panel("Weights changed", ("weights/changed",)),
        Panel("Weights sent", ("weights/sent_mib",), "MiB"),
    ),
    "Critic": (
        Panel("Explained variance", ("critic/explained_variance",)),
        Panel("Value loss", ("critic/loss",)),
        Panel("Value and return", ("critic/value", "critic/return")),
    ),
    "Experts": (
        Panel("Load", ("router/max_load", "router/load_entropy")),
        Panel("Balancing loss", ("router/balance_loss",)),
    ),
    "Speed": (
        Panel("Step", ("time/step",), "s"),
        Panel("Engines", ("rollout/tokens_per_second",), "tokens/s"),
        Panel("KV cache of the engines", ("rollout/kv_cache_usage", "rollout/kv_cache_wait_fraction")),
        Panel("Learners", ("learner/tokens_per_second",), "tokens/s"),
        Panel("Model FLOPs utilization", ("learner/mfu",)),
        Panel("Waiting", ("time/engine_idle", "time/learner_idle", "time/slow_groups"), "s"),
        Panel("Microbatches", ("learner/packing_efficiency", "learner/*_fraction")),
    ),
    "Rollouts, counted": (
        Panel("Not trained on", ("account/filtered", "account/stale", "account/failed"), "rollouts"),
        Panel("Outcomes of grading", ("reward/status/*",), "responses"),
        Panel("Not computed", ("learner/skipped_rollouts",), "rollouts"),
        Panel("Epoch of the data", ("data/epoch",)),
        Panel("Prompts that teach nothing", ("data/curriculum/*_fraction",)),
        Panel("Prompts drawn in the place of others", ("data/curriculum/replaced",)),
    ),
}


def matching(panel: Panel, names: Iterable[str]) -> list[str]:
    """The metrics among `names` that the panel shows; the bounds of intervals are part of their metric's curve."""
    present = [name for name in names if not name.endswith(BOUNDS)]
    return [name for pattern in panel.metrics for name in present if fnmatchcase(name, pattern)]


def metric_titles(metrics: Mapping[str, str], evaluations: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The title of the metric of each data set: "accuracy (NAME)" if all values are from 0 to 1, else its name."""
    logged = set[str]().union(*evaluations)
    unbounded = {source for source in metrics if f"eval/{source}/outside_fraction" in logged}
    return {
        source: f"accuracy ({logged_name(metric)})"
        if may_be_accuracy(metric) and source not in unbounded
        else logged_name(metric)
        for source, metric in metrics.items()
        if metric
    }


def metric_title(metrics: Mapping[str, str], evaluations: Iterable[Mapping[str, Any]]) -> str:
    """`metric_titles` as one text, which names the data sets only if their titles differ."""
    titles = metric_titles(metrics, evaluations)
    distinct = dict.fromkeys(titles.values())
    return ", ".join(distinct if len(distinct) < 2 else (f"{source}: {title}" for source, title in titles.items()))
