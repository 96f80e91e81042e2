"""What looks wrong in the metrics of a run: a table of rules, each with what was seen and which key to turn.

A rule looks at the last few steps, and at the first ones where it compares. It is a pure function of metrics and
config, so the run applies it after every step and the report to a finished run. Every bound is far from what healthy
runs of this trainer show.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from rlhf.log.healthy import Outside, outside_their_range

Row = Mapping[str, Any]

STEPS = 5  # steps that a rule looks at; one step of few prompts can look odd by chance
HISTORY = 20  # steps before them, for the usual size of a gradient

FEW_ANSWERS = 0.1
CUT_OFF, EQUAL_GROUPS = 0.9, 0.95
HIGH_KL = 1.0  # nats per token, for the policy against the reference; runs that learn stay below 0.2
HIGH_CLIP_FRACTION = 0.2  # runs that learn clip less than 0.02 of the tokens
COLLAPSED = 0.1  # of the first entropy
SPIKE = 10.0  # times the median gradient norm
TOO_STALE, UNGRADED = 0.05, 0.02  # of the rollouts; of the grades
SLOW_GROUPS = 0.25  # of a step's time
KEPT_ROWS = 64  # at most, evenly spaced over the whole run; at least half as many if the run has them
GROWN, GROWN_GIB = 0.2, 0.25  # of a process's memory, in the second half of the run so far; caches fill up before


class View(NamedTuple):
    """What a rule sees of a run.

    Attributes:
        last: the last STEPS steps. before: up to HISTORY steps before them. first: the first STEPS.
        whole: steps of the whole run, evenly spaced.
    """

    last: Sequence[Row]
    before: Sequence[Row]
    first: Sequence[Row]
    whole: Sequence[Row]
    config: Mapping[str, Any]

    def mean(self, name: str, rows: Sequence[Row] | None = None) -> float | None:
        """Mean of a metric over the last steps; None unless all of them have it."""
        values = [row.get(name) for row in (self.last if rows is None else rows)]
        return None if not values or None in values else statistics.fmean(values)  # type: ignore[arg-type]

    def rise(self, *names: str) -> float:
        """By how much counters of the whole run rose in the last steps, added up."""
        earlier = self.before[-1] if self.before else self.last[0]
        return sum(self.last[-1].get(name, 0) - earlier.get(name, 0) for name in names)

    def key(self, name: str) -> str:
        return f"{name}={self.config.get(name)}"


class Found(NamedTuple):
    seen: str
    advice: str


def few_answers(view: View) -> Found | None:
    share = view.mean("reward/answered_fraction")
    if share is None or share > FEW_ANSWERS:
        return None
    advice = "Ask for that form with data.prompt_suffix, or choose a reward that reads what the model writes."
    if (view.mean("rollout/stopped_fraction") or 0.0) < 0.5:
        advice = f"Most were cut off: raise {view.key('rollout.max_response_tokens')}."
    return Found(f"{share:.1%} of the responses held an answer in the form that the reward reads.", advice)


def equal_groups(view: View) -> Found | None:
    share, mean, low, high = (view.mean(f"reward/{name}") for name in ("equal_group_fraction", "mean", "min", "max"))
    # with a critic, groups of equal rewards have advantages, unless all groups have the same reward
    if share is None or share < EQUAL_GROUPS or (view.config.get("algo.advantage") == "gae" and low != high):
        return None
    if few_answers(view) is not None:
        return None  # that rule gives the reason
    if mean is None:
        failed = [name for name in view.last[-1] if name.startswith("reward/status/") and view.rise(name) > 0]
        names = ", ".join(name.removeprefix("reward/status/") for name in failed if not name.endswith("/ok"))
        return Found(f"No response could be scored ({names}).", "Repair the reward, or the data that it reads.")
    seen = f"In {share:.0%} of the groups all rewards were equal, which teaches nothing; the mean reward was {mean}."
    if low is None or high is None or low == high:
        return Found(
            seen,
            "All responses have the same reward: read some (rlhf.show). Does the reward read the answers, "
            "and is the data neither too hard nor too easy (data.train)?",
        )
    is_, use = ("easy", "harder") if mean > (low + high) / 2 else ("hard", "easier")
    return Found(
        seen,
        f"The data is too {is_} for the model: use {use} data.train, set rollout.dynamic_sampling=true, or raise "
        f"{view.key('rollout.samples_per_prompt')}.",
    )


def cut_off(view: View) -> Found | None:
    share = view.mean("rollout/stopped_fraction")
    if share is None or 1 - share < CUT_OFF:
        return None
    return Found(
        f"{1 - share:.0%} of the responses did not stop by themselves.",
        f"Raise {view.key('rollout.max_response_tokens')}, or give a stop string (rollout.stop)"
        f"{', or set algo.mask_truncated=false' if view.config.get('algo.mask_truncated') else ''}.",
    )


def high_kl(view: View) -> Found | None:
    kl = view.mean("policy/kl_k1")
    if kl is None or kl < HIGH_KL:
        return None
    return Found(
        f"The policy is {kl:.2f} nats per token away from the reference.",
        f"Read some responses: is the reward gamed? Raise {view.key('algo.kl_coef')}, or lower "
        f"{view.key('learner.optimizer.lr')}.",
    )


def entropy_collapse(view: View) -> Found | None:
    """Entropy also falls in a run that learns; there the reward rises."""
    entropy, first = view.mean("policy/entropy"), view.mean("policy/entropy", view.first)
    reward, first_reward = view.mean("reward/mean"), view.mean("reward/mean", view.first)
    if None in (entropy, first, reward, first_reward) or entropy > COLLAPSED * first:  # type: ignore[operator]
        return None
    highest = max(row.get("reward/max", 0.0) for row in view.last)
    if reward - first_reward > 0.1 * (highest - first_reward):  # type: ignore[operator]
        return None
    return Found(
        f"Entropy fell from {first:.3g} to {entropy:.3g} nats per token, and the reward did not rise: it went from "
        f"{first_reward:.3g} to {reward:.3g}.",
        f"Lower {view.key('learner.optimizer.lr')}, raise {view.key('algo.clip_high')}, or add algo.entropy_coef.",
    )


def much_clipping(view: View) -> Found | None:
    share = view.mean("policy/clip_fraction")
    if share is None or share < HIGH_CLIP_FRACTION:
        return None
    return Found(
        f"{share:.0%} of the tokens were clipped: the updates of one step move the policy far.",
        f"Lower {view.key('learner.optimizer.lr')}, {view.key('learner.epochs_per_step')} or "
        f"{view.key('learner.minibatches_per_epoch')}.",
    )


def engine_drift(view: View) -> Found | None:
    """The bound is what rounding costs this model, measured when the run started (cluster/canary.py)."""
    excess = max((row["policy/engine_kl_excess"] for row in view.last if "policy/engine_kl_excess" in row), default=0.0)
    if excess <= 1:
        return None
    places = [f"{name}={kl:.2g}" for name, kl in view.last[-1].items() if name.startswith("policy/engine_kl/from_")]
    remedy = (
        "Do they compute the same model? Look at rotary scaling, windows, and the versions of vllm and transformers; "
        "run rlhf.doctor. Train on such rollouts with algo.importance_correction alone."
    )
    if view.config.get("rollout.max_policy_lag"):
        remedy = f"Lower {view.key('rollout.max_policy_lag')}. If it stays at a lag of 0: {remedy}"
    return Found(
        f"What the engines sample is {excess:.2g} times as far from the learner as rounding explains "
        f"({', '.join(places)} nats per token).",
        remedy,
    )


def gradient_spike(view: View) -> Found | None:
    norms = [row["learner/grad_norm"] for row in view.before if "learner/grad_norm" in row]
    newest = view.last[-1].get("learner/grad_norm")
    if len(norms) < HISTORY // 2 or newest is None or newest < SPIKE * statistics.median(norms):
        return None
    return Found(
        f"The gradient norm was {newest:.3g}, usually {statistics.median(norms):.3g}.",
        f"Look at the rollouts of the step. Lower {view.key('learner.max_grad_norm')} or "
        f"{view.key('learner.optimizer.lr')}.",
    )


def skipped_updates(view: View) -> Found | None:
    skipped = view.rise("learner/updates_skipped")
    if skipped <= 0:
        return None
    lower = f"Lower {view.key('learner.optimizer.lr')}, or go back to an earlier checkpoint (--resume-from)."
    if "rollout.samples_per_prompt" not in view.config:
        return Found(f"{skipped:.0f} updates were skipped, because a gradient was not finite.", lower)
    return Found(
        f"{skipped:.0f} updates were skipped, because a number was not finite: the warning of the step says which.",
        f"{lower} skipped/ in the run folder has the batches; if it happens at the first steps, run rlhf.doctor.",
    )


def stale_rollouts(view: View) -> Found | None:
    bound = view.config.get("rollout.max_policy_lag") or 0
    sampled = view.rise("account/sampled")
    share = view.rise("account/stale") / sampled if sampled > 0 else 0.0
    median = view.mean("rollout/lag/p50")
    step_s, slow_s = view.mean("time/step"), view.mean("time/slow_groups")
    if share >= TOO_STALE:
        return Found(
            f"{share:.0%} of the rollouts were too old when a step could take them, and were dropped.",
            f"Raise {view.key('rollout.max_policy_lag')} or {view.key('cluster.learners')}, or set "
            "rollout.on_stale=wait.",
        )
    if bound and step_s and slow_s and slow_s / step_s >= SLOW_GROUPS:
        return Found(
            f"Steps waited {slow_s / step_s:.0%} of their time for slow groups, so that none becomes too old.",
            f"Raise {view.key('rollout.max_policy_lag')} or {view.key('rollout.prompts_per_step')}, so that the "
            "longest responses take fewer steps.",
        )
    if bound < 2 or median is None or median < bound:
        return None
    return Found(
        f"Half of the rollouts are as old as rollout.max_policy_lag={bound} allows.",
        f"The learners are what a step waits for: raise {view.key('cluster.learners')}, or lower the lag, which then "
        "costs no speed.",
    )


def grader_failures(view: View) -> Found | None:
    counters = [name for name in view.last[-1] if name.startswith("reward/status/")]
    lost = [name for name in counters if name.endswith(("/timeout", "/died", "/failed"))]
    grades = view.rise(*counters)
    if grades <= 0 or (share := view.rise(*lost) / grades) < UNGRADED:
        return None
    names = " and ".join(name.removeprefix("reward/status/") for name in lost if view.rise(name) > 0)
    return Found(
        f"{share:.1%} of the grades are missing ({names}).",
        f"Raise {view.key('reward.wall_seconds')}, {view.key('reward.cpu_seconds')} or {view.key('reward.memory_mb')}; "
        "for a reward of your own, look at its errors in the log.",
    )


def growing_memory(view: View) -> Found | None:
    """Some process takes more in each quarter of the second half of the run; a cache that fills up grows less."""
    rows = view.whole[len(view.whole) // 2 :]
    if len(rows) < KEPT_ROWS // 4:
        return None
    bounds = [len(rows) * quarter // 4 for quarter in range(5)]
    grown = {}
    for name in (name for name in rows[0] if name.startswith("memory/")):
        quarters = [view.mean(name, rows[start:end]) for start, end in pairwise(bounds)]
        sizes = [size for size in quarters if size is not None]
        growth = sizes[-1] - sizes[0] if len(sizes) == 4 else 0.0
        # on CPU an engine uses one part of its cache after the other
        cache = view.config.get("rollout.kv_cache_gib", 0) if name.startswith("memory/engine/") else 0
        if growth <= max(GROWN * sizes[0], GROWN_GIB) or sizes[-1] - view.whole[0].get(name, sizes[0]) <= cache:
            continue
        if min(b - a for a, b in pairwise(sizes)) > growth / 6:
            grown[name] = (growth, sizes)
    if not grown:
        return None
    name, (_, sizes) = max(grown.items(), key=lambda item: item[1][0])
    return Found(
        f"{name} rose from {sizes[0]:.2f} to {sizes[-1]:.2f} GiB since step {rows[0]['step']}, and goes on.",
        "Look at what code of your own keeps, a reward most of all (reward.memory_mb bounds it). A restart with "
        "--resume gives the memory back.",
    )


RULES: dict[str, Callable[[View], Found | None]] = {
    "no answers": few_answers,
    "equal rewards in almost all groups": equal_groups,
    "responses are cut off": cut_off,
    "KL to the reference is running away": high_kl,
    "entropy collapsed": entropy_collapse,
    "much clipping": much_clipping,
    "engines and learner drift apart": engine_drift,
    "gradient spike": gradient_spike,
    "updates were skipped": skipped_updates,
    "lag at its bound": stale_rollouts,
    "grades are missing": grader_failures,
    "memory keeps growing": growing_memory,
}


@dataclass(frozen=True)
class Finding:
    """What a rule found, in the steps `first` to `last`; `seen` is of the last step."""

    title: str
    first: int
    last: int
    seen: str
    advice: str

    @property
    def text(self) -> str:
        return f"{self.seen} {self.advice}"


class Diagnosis:
    """Applies the rules after every training step, in order.

    Attributes:
        findings: by title, one for each rule that found something.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.findings: dict[str, Finding] = {}
        self._config = config
        self._first: list[Row] = []
        self._rows: list[Row] = []
        self._whole: list[Row] = []
        self._steps, self._every = 0, 1  # steps seen; each `every`-th is in _whole

    def after_step(self, step: int, row: Row) -> list[Finding]:
        """The findings of rules that had found nothing before."""
        row = {**row, "step": step}
        if len(self._first) < STEPS:
            self._first.append(row)
        self._rows = [*self._rows, row][-HISTORY - STEPS :]
        if self._steps % self._every == 0:
            self._whole.append(row)
        self._steps += 1
        if len(self._whole) > KEPT_ROWS:
            self._whole, self._every = self._whole[::2], 2 * self._every
        if len(self._rows) < min(STEPS, self._config["run.steps"]):
            return []
        new = []
        for finding in self.now():
            earlier = self.findings.get(finding.title)
            self.findings[finding.title] = finding if earlier is None else replace(finding, first=earlier.first)
            if earlier is None:
                new.append(finding)
        return new

    def after_evaluation(self, values: Row) -> None:
        """Add the metrics of an evaluation to those of the last step."""
        if self._rows:
            self._rows[-1] = {**self._rows[-1], **values}

    def notice(self) -> str:
        """Which metrics are outside of their healthy range in the last steps; "" if none is."""
        outside = outside_at_the_end(self._rows)
        named = ", ".join(f"{metric} {value:.3g} ({healthy})" for metric, value, healthy in outside)
        return (
            named and f"outside of the healthy range in the last steps: {named}. docs/metrics.md says what each means."
        )

    def now(self) -> list[Finding]:
        """What the rules find after the last step, however few steps there were."""
        view = View(self._rows[-STEPS:], self._rows[:-STEPS], self._first, self._whole, self._config)
        step = self._rows[-1]["step"]
        return [
            Finding(title, step, step, *found) for title, check in RULES.items() if (found := check(view)) is not None
        ]


def diagnose_run(rows: Sequence[Row], config: Mapping[str, Any]) -> list[Finding]:
    """The findings of a whole run, from its rows of metrics.jsonl; those without a training step are left out."""
    diagnosis = Diagnosis(config)
    for row in training_steps(rows):
        diagnosis.after_step(row["step"], row)
    return list(diagnosis.findings.values())


def outside_at_the_end(rows: Sequence[Row]) -> list[Outside]:
    """Metrics that are outside of their healthy range in the last steps of a run."""
    return outside_their_range(training_steps(rows)[-STEPS:])


def training_steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "time/step" in row]
