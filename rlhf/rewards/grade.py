"""The grade of one response: the type that workers, pool and scorer share, up to the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.config.reward import FLOAT32_MAX, RewardPart
from rlhf.processes.workers import DIED as DIED  # crashed, or ran out of memory
from rlhf.processes.workers import TIMEOUT as TIMEOUT  # killed at the deadline

if TYPE_CHECKING:
    from rlhf.types import ScoredRollout

# The status of one part of one response.
OK = "ok"  # graded, right or wrong
NO_ANSWER = "no_answer"  # the response states no answer in the requested form
BAD_GOLD = "bad_gold"  # the gold answer of the row cannot be compared with anything
UNSCORABLE = "unscorable"  # no verdict: a function returned None, or no process could be started
NOT_JUDGED = "not_judged"  # a function in TRL's signature returned None: others judge
FAILED = "failed"  # an exception, or a user function returned no number, or one that is too large

ANSWER_CLASSES = "answer_classes"  # the job that finds equal answers
WITH_EQUALITY = ("math", "gsm8k", "multiple_choice", "exact", "f1")  # parts that can compare two answers
MAX_TEXT = 2000  # characters of an extracted answer or a detail that are sent to the driver
UNGRADED = 0.02  # share of responses without a grade above which there is a warning
FAILURES = (FAILED, TIMEOUT, DIED)
STATUSES = (OK, NO_ANSWER, BAD_GOLD, TIMEOUT, DIED, UNSCORABLE, NOT_JUDGED, FAILED)


def count_answers(samples: Iterable[ScoredRollout]) -> tuple[int, int]:
    """(responses with an answer, responses that had to state one). Rewards that read no answer require none."""
    answered, missing = 0, 0
    for sample in samples:
        answered += sample.extracted != ""
        missing += sample.extracted == "" and sample.status == NO_ANSWER
    return answered, answered + missing


def too_large(value: float, total: float, numbers: Mapping[str, float | None], *, bound: float, row: str) -> str:
    """Check the size of a reward and its further numbers. Returns the problem, or an empty string.

    Args:
        value, total: value of the part, and the whole reward with it.
        numbers: further numbers by name.
        bound: reward.bound.
        row: names the response in the message.
    """
    for name, number in (("a reward of", value), *((f"{name} =", number) for name, number in numbers.items())):
        if number is not None and not abs(number) <= FLOAT32_MAX:
            return f"{name} {number:g} for {row}, too large for a float32. Scale it down, or clip it."
    if abs(total) <= bound:
        return ""
    in_sum = "" if value == total else f" ({total:g} in the sum)"
    return f"a reward of {value:g}{in_sum} for {row}, over reward.bound={bound:g}. Scale it down, or raise the bound."


class Grade(NamedTuple):
    """The grade of one response by one part of the reward, or by the whole reward."""

    value: float | None  # the reward; None makes the response unscorable
    status: str = OK  # one of STATUSES; for the whole reward, the first status that is not ok
    extracted: str = ""  # the answer that was graded; empty if the response states none
    detail: str = ""  # the reason of a failure, else empty
    # Further numbers of a user function, which are logged; of the whole reward, the value of every part by name, before
    # its weight, and these numbers as `part/number`.
    metrics: Mapping[str, float | None] = MappingProxyType({})
    group: tuple[Grade, ...] = ()  # one grade per response, from a function that grades a whole group

    def as_message(self) -> dict[str, Any]:
        """JSON for the driver, with bounded texts."""
        cut = {"extracted": self.extracted[:MAX_TEXT], "detail": self.detail[:MAX_TEXT], "metrics": dict(self.metrics)}
        return {**self._asdict(), **cut, "group": [grade.as_message() for grade in self.group]}

    @staticmethod
    def from_message(message: dict[str, Any]) -> Grade:
        """Read `as_message`. Raises KeyError, TypeError or ValueError if a worker sent anything else."""
        value = None if message["value"] is None else float(message["value"])
        status, extracted, detail = (str(message[name]) for name in ("status", "extracted", "detail"))
        metrics = {str(name): float(number) for name, number in dict(message["metrics"]).items()}
        return Grade(value, status, extracted, detail, metrics, tuple(map(Grade.from_message, message["group"])))


def part_outcomes(parts: Sequence[RewardPart], grade: Grade) -> tuple[dict[str, str], dict[str, str]]:
    """The `part_status` and `errors` of a ScoredRollout; `grade` is that of the whole reward of these parts."""
    by_part = {part.name: by for part, by in zip(parts, grade.group, strict=True)}
    errors = {name: " ".join(by.detail.split()) for name, by in by_part.items() if by.status in FAILURES}
    return {name: by.status for name, by in by_part.items()}, errors


def error_text(status: str, detail: str) -> str:
    """The message of a failed call."""
    return detail if status == FAILED else f"{status}: {detail}"
