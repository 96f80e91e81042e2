"""The diagnosis of a run: rules that find problems in its metrics, and the healthy range of each metric.

A rule looks at the last few steps, and some compare them with the first steps. It is a pure function of metrics and
config: the run applies it after every step, and the report applies it to a finished run. A rule says what it observed
and which key to change. Every bound is far from the values of healthy runs of this trainer.

A rule warns of a certain problem. A value outside its healthy range may have a good reason, so it is only a notice, at
the end of a run and in the report, whose charts show the range. docs/metrics.md has the same ranges.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, NamedTuple

from rlhf.log.clock import LEARNER_PHASES
from rlhf.types import rewards_differ

Row = Mapping[str, Any]

STEPS = 5  # steps that a rule looks at; one step of few prompts can look odd by chance

FEW_ANSWERS = 0.1
CUT_OFF = 0.9
EQUAL_GROUPS = {"hard": 0.8, "easy": 0.95}  # of the groups; runs that have learned their data end at up to 0.85
HIGH_KL = 1.0  # nats per token, for the policy against the reference; runs that learn stay below 0.2
HIGH_CLIP_FRACTION = 0.2  # runs that learn clip less than 0.02 of the tokens
MASKED, MASKED_STEPS = 0.25, 3  # of the tokens, in each of so many steps in a row; masks are for outliers
COLLAPSED = 0.1  # of the first entropy
TOO_STALE, UNGRADED = 0.05, 0.02  # of the rollouts; of the grades
FEW_CALLS = 0.05  # mean calls per rollout; with fewer, the share of failed calls is chance
FAILING_CALLS = 0.9  # of the calls
WAITING = 0.6  # of the time without evaluations; at a lag of 0 one side always waits for half of it or more
SLOW = 0.5  # of the learners' waiting
FULL_CACHE = 0.25  # of the forward passes; 0 where the cache holds all sequences that run at once


class View(NamedTuple):
    """The part of a run that a rule looks at."""

    last: Sequence[Row]  # rows of the last STEPS steps
    before: Row  # the row before them, or the first of them
    first: Sequence[Row]  # rows of the first STEPS steps
    config: Mapping[str, Any]  # every key of the run's config, with dots, and its value

    def mean(self, name: str, rows: Sequence[Row] | None = None) -> float:
        """Mean of a metric over `rows`, by default the last steps. NaN, which exceeds no bound, if a row lacks it."""
        values = [row.get(name, math.nan) for row in (self.last if rows is None else rows)]
        return statistics.fmean(values) if values else math.nan

    def rise(self, *names: str) -> float:
        """Sum of the increases of these cumulative counters over the last steps."""
        return sum(self.last[-1].get(name, 0) - self.before.get(name, 0) for name in names)

    def total(self, *names: str) -> float:
        """Sum of these metrics over the last steps; a row that lacks one counts as 0."""
        return math.fsum(row.get(name, 0.0) for row in self.last for name in names)

    def findings(self) -> Iterator[tuple[str, str, str]]:
        """(title, observation, advice) of each rule that finds a problem."""
        for title, rule in RULES.items():
            for observation, advice in islice(rule(self), 1):
                with_values = re.sub(r"\{(.*?)\}", lambda key: f"{key[1]}={self.config.get(key[1])}", advice)
                yield title, observation, with_values


Problems = Iterator[tuple[str, str]]  # observation and advice, in which {key} stands for the key and its value


def few_answers(view: View) -> Problems:
    if (share := view.mean("reward/answered_fraction")) <= FEW_ANSWERS:
        advice = "Ask for that form with data.prompt_suffix, or choose a reward that reads what the model writes."
        if not view.mean("rollout/stopped_fraction") >= 0.5:
            advice = "Most were cut off: raise {rollout.max_response_tokens}."
        yield f"{share:.1%} of the responses held an answer in the form that the reward reads.", advice


def equal_groups(view: View) -> Problems:
    share, mean, low, high = (view.mean(f"reward/{name}") for name in ("equal_group_fraction", "mean", "min", "max"))
    # with a critic, groups of equal rewards have advantages, unless all groups have the same reward
    has_signal = view.config.get("algo.advantage") == "gae" and rewards_differ((low, high))
    has_signal |= view.config.get("algo.teacher.coef") is not None
    level, remedy = ("easy", "harder") if mean > (low + high) / 2 else ("hard", "easier")
    if not share >= EQUAL_GROUPS[level] or has_signal or any(few_answers(view)):  # that rule names the cause
        return
    if math.isnan(mean):
        failed = [name for name in view.last[-1] if name.startswith("reward/status/") and view.rise(name) > 0]
        names = ", ".join(name.removeprefix("reward/status/") for name in failed if not name.endswith("/ok"))
        yield f"No response could be scored{names and f' ({names})'}.", "Repair the reward, or the data that it reads."
    yield (
        f"In {share:.0%} of the groups all rewards were equal, which teaches nothing; the mean reward was {mean}.",
        f"The data is too {level} for the model: use {remedy} data.train, set rollout.dynamic_sampling=true, or raise "
        "{rollout.samples_per_prompt}."
        if rewards_differ((low, high))
        else "All responses have the same reward: read some (rlhf.show). Does the reward read the answers, and is the "
        "data neither too hard nor too easy (data.train)?",
    )


def cut_off(view: View) -> Problems:
    if (share := 1 - view.mean("rollout/stopped_fraction")) >= CUT_OFF:
        mask = ", or set algo.mask_truncated=false" if view.config.get("algo.mask_truncated") else ""
        yield (
            f"{share:.0%} of the responses did not stop by themselves.",
            "Raise {rollout.max_response_tokens}, or give a stop string (rollout.stop)" + mask + ".",
        )


def high_kl(view: View) -> Problems:
    if (kl := view.mean("policy/kl_k1")) >= HIGH_KL:
        remedy = "Raise {algo.kl_coef}, or lower {learner.optimizer.lr}."
        estimator, place = view.config.get("algo.kl_estimator"), view.config.get("algo.kl_place")
        used = view.config.get("algo.kl_coef", 0.0) > 0
        if used and (estimator, place) == ("k1", "loss"):
            remedy = "{algo.kl_estimator} in the loss does not limit the KL, and a larger kl_coef does harm: use k3."
        elif used and place == "reward" and estimator != "k1":
            remedy = "{algo.kl_estimator} in the reward limits the KL little near the reference: use k1."
        yield (
            f"The policy is {kl:.2f} nats per token away from the reference.",
            f"Read some responses: is the reward gamed? {remedy}",
        )


def entropy_collapse(view: View) -> Problems:
    """Entropy also falls in a run that learns; there the reward rises."""
    entropy, first = view.mean("policy/entropy"), view.mean("policy/entropy", view.first)
    reward, first_reward = view.mean("reward/mean"), view.mean("reward/mean", view.first)
    highest = max(row.get("reward/max", 0.0) for row in view.last)
    if entropy <= COLLAPSED * first and reward - first_reward <= 0.1 * (highest - first_reward):
        yield (
            f"Entropy fell from {first:.3g} to {entropy:.3g} nats per token, and the reward did not rise: it went from "
            f"{first_reward:.3g} to {reward:.3g}.",
            "Lower {learner.optimizer.lr}, raise {algo.clip_high}, or add algo.entropy_coef.",
        )


def much_clipping(view: View) -> Problems:
    if (share := view.mean("policy/clip_fraction")) >= HIGH_CLIP_FRACTION:
        yield (
            f"{share:.0%} of the tokens were clipped: the updates of one step move the policy far.",
            "Lower {learner.optimizer.lr}, {learner.epochs_per_step} or {learner.minibatches_per_epoch}.",
        )


def much_masking(view: View) -> Problems:
    """`importance_correction: truncated` logs a fraction too, but leaves nothing out."""
    masks = {
        "geometric_mask": "widen {algo.geometric_mask}",
        "off_policy_mask": "raise {algo.off_policy_mask}",
        "importance_outside": "widen the bounds {algo.importance_floor} and {algo.importance_cap}, or set "
        "importance_correction=truncated instead of {algo.importance_correction}",
    }
    if view.config.get("algo.importance_correction") != "masked":
        del masks["importance_outside"]
    for mask, remedy in masks.items():
        shares = [row.get(f"policy/{mask}_fraction", 0.0) for row in view.last[-MASKED_STEPS:]]
        if len(shares) == MASKED_STEPS and min(shares) > MASKED:
            key = "importance_correction" if mask == "importance_outside" else mask
            yield (
                f"algo.{key} left out {min(shares):.0%} of the tokens or more in each of the last {len(shares)} steps.",
                "Let the policy that samples be nearer: lower {learner.optimizer.lr}, {rollout.max_policy_lag} or "
                f"{{learner.minibatches_per_epoch}}. Or {remedy}.",
            )


def engine_drift(view: View) -> Problems:
    """The bound is the cost of rounding for this model, measured when the run started (cluster/canary.py)."""
    if (excess := max(row.get("policy/engine_kl_excess", 0.0) for row in view.last)) > 1:
        newest = view.last[-1].items()
        by_position = [f"{name}={kl:.2g}" for name, kl in newest if name.startswith("policy/engine_kl/from_")]
        lagging = "Lower {rollout.max_policy_lag}. If it stays at a lag of 0: "
        yield (
            f"The engines' policy is {excess:.2g} times as far from the learner's as rounding explains "
            f"({', '.join(by_position)} nats per token).",
            (lagging if view.config.get("rollout.max_policy_lag") else "")
            + "Do they compute the same model? Look at rotary scaling, windows, and the versions of vllm and "
            "transformers; run rlhf.doctor. Train on such rollouts with algo.importance_correction alone.",
        )


def stale_rollouts(view: View) -> Problems:
    sampled = view.rise("account/sampled")
    if sampled > 0 and (share := view.rise("account/stale") / sampled) >= TOO_STALE:
        yield (
            f"{share:.0%} of the rollouts were too old when a step could take them, and were dropped.",
            "Raise {rollout.max_policy_lag} or {cluster.learners}, or set rollout.on_stale=wait.",
        )


def grader_failures(view: View) -> Problems:
    counters = [name for name in view.last[-1] if name.startswith("reward/status/")]
    lost = [name for name in counters if name.endswith(("/timeout", "/died", "/failed"))]
    grades = view.rise(*counters)
    if grades > 0 and (share := view.rise(*lost) / grades) >= UNGRADED:
        names = " and ".join(name.removeprefix("reward/status/") for name in lost if view.rise(name) > 0)
        yield (
            f"{share:.1%} of the grades are missing ({names}).",
            "Raise {reward.wall_seconds}, {reward.cpu_seconds} or {reward.memory_mb}; if the reward is your own, look "
            "at its errors in the log.",
        )


class Wait(NamedTuple):
    """One side of a run that waits for the other."""

    who: str  # learner or engine
    share: float  # of the time without evaluations
    cause: str
    keys: tuple[str, ...]  # to raise; the config accepts each of them

    @property
    def line(self) -> str:
        """For the terminal: `learner waits 62% (slow prompts): raise rollout.max_policy_lag`."""
        return f"{self.who} waits {self.share:.0%} ({self.cause}): raise {' or '.join(self.keys)}"


def wait(view: View) -> Wait | None:
    """Who waited for WAITING of the last steps, if a key can change that.

    On shared GPUs they take turns, and on CPU they share cores, so only learners that wait for slow prompts could do
    better there.
    """
    config, learner_s = view.config, view.total("time/learner_idle") - view.total("time/evaluation")
    window_s = learner_s + view.total(*(f"time/{phase}" for phase in LEARNER_PHASES))
    if window_s <= 0:
        return None
    shares = {"learner": learner_s / window_s, "engine": view.total("time/engine_idle") / window_s}
    who = max(shares, key=shares.__getitem__)
    lag = config.get("rollout.max_policy_lag", 0)
    apart = config.get("cluster.device") != "cpu" and config.get("cluster.placement") == "separate"
    cause, keys = "", tuple[str, ...]()
    if who == "learner" and view.total("time/slow_groups") >= SLOW * learner_s:
        cause, keys = "slow prompts", ("rollout.max_policy_lag",)
    elif apart and lag:
        cause, keys = f"{'sampling' if who == 'learner' else 'training'} takes longer", (f"cluster.{OTHERS[who]}",)
    elif apart and not config.get("run.deterministic"):  # which wants a lag of 0
        cause, keys = "sampling and training take turns", ("rollout.max_policy_lag", f"cluster.{OTHERS[who]}")
    return Wait(who, shares[who], cause, keys) if keys and shares[who] >= WAITING else None


OTHERS = {"learner": "engines", "engine": "learners"}  # what a side waits for


def learner_waits(view: View) -> Problems:
    yield from _waits(view, "learner")


def engine_waits(view: View) -> Problems:
    yield from _waits(view, "engine")


def _waits(view: View, who: str) -> Problems:
    if (found := wait(view)) is not None and found.who == who:
        yield (
            f"The {who}s waited for {found.share:.0%} of the time ({found.cause}).",
            f"Raise {' or '.join(f'{{{key}}}' for key in found.keys)}; docs/performance.md says more.",
        )


def full_cache(view: View) -> Problems:
    if (share := view.mean("rollout/kv_cache_wait_fraction")) >= FULL_CACHE:
        size = "kv_cache_gib" if view.config.get("cluster.device") == "cpu" else "gpu_memory_utilization"
        yield (
            f"The KV cache was full in {share:.0%} of the engines' forward passes: requests waited for others to end, "
            "or were preempted and computed again.",
            f"Raise {{rollout.{size}}} or {{cluster.engines}}. If no memory is left, lower "
            "{rollout.max_concurrent_sequences}: then fewer are preempted.",
        )


def no_tool_calls(view: View) -> Problems:
    if view.mean("environment/used_fraction") == 0:
        yield (
            "No rollout called a tool, so the model cannot learn to use one.",
            "Does the prompt show the tools (--plan), and does the model write calls in the form of its template "
            "(rlhf.show)? {rollout.tool_parser} has to read that form. Train on a few conversations with calls first "
            "(rlhf.sft).",
        )


def failing_tools(view: View) -> Problems:
    calls, errors = view.mean("environment/tool_calls"), view.mean("environment/tool_errors")
    if calls >= FEW_CALLS and errors > FAILING_CALLS * calls:
        yield (
            f"{errors / calls:.0%} of the tool calls failed.",
            "Read the answers (rlhf.show): is a tool broken? If the model cannot write its calls, train on a few "
            "conversations with calls first (rlhf.sft).",
        )


def too_few_turns(view: View) -> Problems:
    if (share := view.mean("environment/ended_by/max_turns")) >= CUT_OFF:
        yield (
            f"{share:.0%} of the rollouts ended at the limit of turns.",
            "Raise {rollout.max_turns}. Read some (rlhf.show): does the model repeat a call, or never see its answer?",
        )


RULES: dict[str, Callable[[View], Problems]] = {
    "no answers": few_answers,
    "equal rewards in most groups": equal_groups,
    "responses are cut off": cut_off,
    "no tool was ever called": no_tool_calls,
    "almost all tool calls fail": failing_tools,
    "rollouts end at their last turn": too_few_turns,
    "KL to the reference is running away": high_kl,
    "entropy collapsed": entropy_collapse,
    "much clipping": much_clipping,
    "a mask leaves out many tokens": much_masking,
    "engines and learner drift apart": engine_drift,
    "rollouts are dropped as too old": stale_rollouts,
    "grades are missing": grader_failures,
    "learners wait": learner_waits,
    "engines wait": engine_waits,
    "the KV cache is full": full_cache,
}


@dataclass(frozen=True)
class Finding:
    """A problem that a rule found in the steps `first` to `last`; `seen`: the observation at step `last`."""

    title: str
    first: int
    last: int
    seen: str
    advice: str

    @property
    def text(self) -> str:
        return f"{self.seen} {self.advice}"


class Diagnosis:
    """Applies the rules after every training step, in order; `findings` has one by title for each problem."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.findings: dict[str, Finding] = {}
        self._config = config
        self._first: list[Row] = []
        self._rows: list[Row] = []

    def after_step(self, step: int, row: Row) -> list[Finding]:
        """Add the metrics of a step. Returns the findings of rules that had found no problem before."""
        row = {**row, "step": step}
        self._first = [*self._first, row][:STEPS]
        self._rows = [*self._rows, row][-STEPS - 1 :]
        current = self.now() if len(self._rows) >= min(STEPS, self._config["run.steps"]) else []
        new = [finding for finding in current if finding.title not in self.findings]
        for finding in current:
            first = self.findings.get(finding.title, finding).first
            self.findings[finding.title] = replace(finding, first=first)
        return new

    def after_evaluation(self, values: Row) -> None:
        """Add the metrics of an evaluation to those of the last step."""
        if self._rows:
            self._rows[-1] = {**self._rows[-1], **values}

    def notice(self) -> str:
        """One sentence that names the metrics outside their healthy range in the last steps; empty if none is."""
        outside = outside_at_the_end(self._rows)
        named = ", ".join(f"{metric} {value:.3g} ({healthy})" for metric, value, healthy in outside)
        return named and f"outside the healthy range in the last steps: {named}. docs/metrics.md says what each means."

    def now(self) -> list[Finding]:
        """All findings for the last steps, however few steps there were."""
        step = self._rows[-1]["step"]
        return [Finding(title, step, step, seen, advice) for title, seen, advice in self._view().findings()]

    def who_waits(self) -> str:
        """One line about the side that waited in the last steps; empty before there are STEPS, or if none does."""
        found = wait(self._view()) if len(self._rows) >= STEPS else None
        return "" if found is None else found.line

    def _view(self) -> View:
        return View(self._rows[-STEPS:], self._rows[0], self._first, self._config)


def diagnose_run(rows: Sequence[Row], config: Mapping[str, Any]) -> list[Finding]:
    """The findings of a whole run, from its rows of metrics.jsonl. Rows without a training step are ignored."""
    diagnosis = Diagnosis(config)
    for row in training_steps(rows):
        diagnosis.after_step(row["step"], row)
    return list(diagnosis.findings.values())


def training_steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "time/step" in row]


class Range(NamedTuple):
    """A closed range; None: no bound on this side."""

    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None:
            return f"below {self.high}"
        return f"above {self.low}" if self.high is None else f"{self.low} to {self.high}"

    def contains(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


HEALTHY = {
    "reward/equal_group_fraction": Range(None, 0.8),
    "reward/answered_fraction": Range(0.9, None),
    "policy/ratio": Range(0.99, 1.01),
    "policy/ratio_max": Range(None, 10),
    "policy/clip_fraction": Range(None, 0.1),
    "policy/dual_clip_fraction": Range(None, 0.01),
    "policy/kl_k[1234]": Range(None, 0.5),
    "policy/kl_old": Range(None, 0.01),
    "policy/engine_kl_excess": Range(None, 1),
    "policy/effective_sample_fraction": Range(0.9, None),
    "policy/importance_weight": Range(0.95, 1.05),
    "policy/importance_outside_fraction": Range(None, 0.01),
    "policy/geometric_mask_fraction": Range(None, 0.05),
    "policy/off_policy_mask_fraction": Range(None, 0.05),
    "rollout/stopped_fraction": Range(0.9, None),
    "rollout/kv_cache_wait_fraction": Range(None, 0.05),
    "critic/clip_fraction": Range(None, 0.3),
    "router/max_load": Range(1, 3),
    "router/load_entropy": Range(0.9, None),
    "router/balance_loss": Range(1, 1.5),
    "eval/*/stopped_fraction": Range(0.9, None),
    "eval/*/answered_fraction": Range(0.9, None),
    "eval/*/ungraded_fraction": Range(None, UNGRADED),
}


class Outside(NamedTuple):
    """A metric outside its healthy range."""

    metric: str
    value: float
    healthy: str


def healthy_range(metric: str) -> Range | None:
    """The healthy range of a metric, or None if it has none."""
    return next((healthy for pattern, healthy in HEALTHY.items() if fnmatchcase(metric, pattern)), None)


def outside_at_the_end(rows: Sequence[Row]) -> list[Outside]:
    """Metrics whose mean is outside their healthy range; the mean is over the last training steps that log them."""
    rows = training_steps(rows)[-STEPS:]
    outside = []
    for metric in dict.fromkeys(name for row in rows for name in row):
        if healthy := healthy_range(metric):
            mean = statistics.fmean(row[metric] for row in rows if metric in row)
            if not healthy.contains(mean):
                outside.append(Outside(metric, mean, str(healthy)))
    return outside
