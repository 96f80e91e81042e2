"""How the calls of each part of the reward ended: the driver's account, made from the groups that it gets."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf.config.reward import ENVIRONMENT_PART, MODEL_PART, RewardConfig, RewardPart
from rlhf.rewards.grade import FAILURES, NOT_JUDGED, OK, STATUSES, UNSCORABLE, error_text

if TYPE_CHECKING:
    from rlhf.config.grpo import GRPOConfig
    from rlhf.types import RolloutGroup, ScoredRollout

MAX_ERRORS_KEPT, MAX_ERRORS_SHOWN = 1000, 5  # per part; an error may quote the response, so each may be distinct


class RewardOutcomes:
    """Counts how calls ended, and decides when too many have failed.

    `counters`: those of the checkpoint from which a run is resumed. Messages and `reward.failure_fraction` count every
    response that arrived, also those of evaluations.
    """

    def __init__(self, config: RewardConfig, counters: Mapping[str, int] | None = None) -> None:
        self.counters = Counter(counters)  # calls for the rollouts of finished training steps, by `part/status`
        self._config, self._arrived = config, Counter(counters)
        self._judged_outside = {part.name for part in config.all_parts if part.is_judged_outside}
        self._errors: dict[str, Counter[str]] = defaultdict(Counter)  # by part: error -> how often
        self._reported: dict[str, set[str]] = defaultdict(set)  # by part: errors that new_errors has returned

    def check(self, group: RolloutGroup) -> None:
        """Count the responses of a graded group. Raises RuntimeError if too many calls failed."""
        for sample in group.samples:
            self.check_response(group.prompt.id, sample.part_status, sample.errors)

    def check_response(self, row: str, part_status: Mapping[str, str], errors: Mapping[str, str]) -> None:
        """`check` for one response; `part_status` and `errors` are those of its ScoredRollout."""
        self._arrived.update(f"{name}/{status}" for name, status in part_status.items())
        for name, error in errors.items():
            text = error_text(part_status[name], error)
            if text in self._errors[name] or len(self._errors[name]) < MAX_ERRORS_KEPT:
                self._errors[name][text] += 1
            failures, calls = self._calls(name, FAILURES), self._calls(name)
            allowed = max(self._config.failures_always_allowed, self._config.failure_fraction * calls)
            if name in self._judged_outside and failures > allowed:
                raise RuntimeError(
                    f"reward {name!r}: {failures} of {calls} calls failed, last for {row} ({part_status[name]}: "
                    f"{error}), more than reward.failure_fraction={self._config.failure_fraction} allows. Repair the "
                    "function or its endpoint, or raise the fraction."
                )

    def add_step(self, groups: Iterable[RolloutGroup]) -> None:
        """Count the rollouts of a finished training step."""
        for sample in itertools.chain.from_iterable(group.samples for group in groups):
            self.counters.update(f"{name}/{status}" for name, status in sample.part_status.items())

    def failures(self, part: RewardPart) -> str:
        """The number of failed calls of a part and its most frequent errors, one per line. Empty if no call failed."""
        failed = self._calls(part.name, FAILURES)
        shown = self._errors[part.name].most_common(MAX_ERRORS_SHOWN)
        lines = [f"reward {part.name}: {failed} of {self._calls(part.name)} calls failed"]
        lines += [f"  {count} x {error}" for error, count in shown]
        if more := failed - sum(count for _, count in shown):
            lines.append(f"  {more} x other errors")
        return "\n".join(lines) if failed else ""

    def failed_always(self, part: RewardPart) -> bool:
        """True if a part was called and every call failed."""
        return 0 < self._calls(part.name) == self._calls(part.name, FAILURES)

    def missing_value_reason(self, part: RewardPart) -> str:
        """Why a part gave no value to any response; `new_errors` has the messages of failed calls."""
        if self.failed_always(part):
            return "every call failed"
        counted = {status: count for status in STATUSES if (count := self._arrived[f"{part.name}/{status}"])}
        if part.is_user_function and counted.keys() <= {UNSCORABLE, NOT_JUDGED}:
            return "it returned None each time"
        return f"its calls ended as {', '.join(f'{status} ({count})' for status, count in counted.items())}"

    def new_errors(self) -> list[str]:
        """New errors of functions, environments and reward models, at most MAX_ERRORS_SHOWN per part in all."""
        messages = []
        calls = {part.name: part.is_judged_outside and self._calls(part.name) for part in self._config.all_parts}
        for name, errors in self._errors.items():
            reported = self._reported[name]
            for error, count in errors.most_common() if calls.get(name, True) else ():
                if error not in reported and len(reported) < MAX_ERRORS_SHOWN:
                    reported.add(error)
                    of = f"of {calls[name]} calls" if name in calls else "of its rewards"
                    messages.append(f"reward {name}: {count} {of} failed with {error}")
        return messages

    def _calls(self, name: str, statuses: Sequence[str] = STATUSES) -> int:
        return sum(self._arrived[f"{name}/{status}"] for status in statuses)


def silent_rewards(
    config: GRPOConfig, outcomes: RewardOutcomes, groups: Sequence[RolloutGroup], *, step: int
) -> tuple[list[str], list[str]]:
    """Find parts of the reward that gave no response of a step a value, for each list of parts (`reward.by_source`).

    Returns warnings (every reward was None, or every call of a built-in part failed), and notes (one part gave no
    value, but other parts did).
    """
    warnings, notes = [], []
    by_source: dict[str, list[ScoredRollout]] = {}
    for group in groups:
        source = group.prompt.source if group.prompt.source in config.reward.by_source else ""
        ended = (each.rollout.outcome is None or each.rollout.outcome.status == OK for each in group.samples)
        by_source.setdefault(source, []).extend(itertools.compress(group.samples, ended))
    for source, samples in ((source, samples) for source, samples in by_source.items() if samples):
        key, prompts_note = (f"reward.by_source.{source}", f" for prompts of {source}") if source else ("reward", "")
        parts = config.reward.parts_of(source)
        values = {part.name: sum(s.reward_parts.get(part.name) is not None for s in samples) for part in parts}
        silent = {part.name: outcomes.missing_value_reason(part) for part in parts if not values[part.name]}
        if config.learns_from_rewards and all(sample.reward is None for sample in samples):
            silent |= _silent_others(config, samples)
            reasons = "; ".join(f"{name}: {why}" for name, why in silent.items())
            shares = ", ".join(f"{name} {count} of {len(samples)}" for name, count in values.items())
            warnings.append(
                f"{key}: every reward of step {step}{prompts_note} was None: "
                f"{reasons or f'no response has a value of each part ({shares})'}. None of these rollouts was trained "
                "on. Repair the reward, or the rows that it reads (docs/rewards.md)."
            )
            continue
        for name, why in silent.items():
            count = f"{len(samples)} responses of step {step}{prompts_note}"
            notes.append(f"{key}: {name} judged none of the {count}: {why}.")
        warnings += [
            f"{outcomes.failures(part)}\n  It counts as 0 for each of them."
            for part in parts
            if not part.is_judged_outside and part.name not in silent and outcomes.failed_always(part)
        ]
    return warnings, notes


def _silent_others(config: GRPOConfig, samples: Sequence[ScoredRollout]) -> dict[str, str]:
    """The reward model and the environment, with a reason, if they gave no response a value."""
    named = {name for sample in samples for name, value in sample.reward_parts.items() if value is not None}
    others = {
        MODEL_PART: (config.reward_model, "it gave no score"),
        ENVIRONMENT_PART: (config.environment.parts, "it gave no reward"),
    }
    return {name: why for name, (is_there, why) in others.items() if is_there and name not in named}
