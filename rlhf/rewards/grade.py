"""The grade of one response by one reward: the type that workers, pool and scorer share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rlhf.types import ScoredRollout

# The status of one part of one response.
OK = "ok"  # graded, right or wrong
NO_ANSWER = "no_answer"  # the response states no answer in the requested form
BAD_GOLD = "bad_gold"  # the gold answer of the row cannot be compared with anything
TIMEOUT = "timeout"  # killed at the deadline
DIED = "died"  # the process crashed, or ran out of memory
UNSCORABLE = "unscorable"  # a user function returned None
FAILED = "failed"  # an exception, or a user function returned something that is not a number

PLAIN_KEYS = 3  # number of keys in most messages: value, status and extracted
STATUSES = (OK, NO_ANSWER, BAD_GOLD, TIMEOUT, DIED, UNSCORABLE, FAILED)


def count_answers(samples: Iterable[ScoredRollout]) -> tuple[int, int]:
    """(responses with an answer, responses that had to state one); a reward that reads no answers requires none."""
    answered, missing = 0, 0
    for sample in samples:
        answered += sample.extracted != ""
        missing += sample.extracted == "" and sample.status == NO_ANSWER
    return answered, answered + missing


class Grade(NamedTuple):
    """One reward of one response.

    Attributes:
        value: the reward; None if there is none.
        status: one of STATUSES.
        extracted: the answer that was graded, "" if the response states none.
        detail: the reason of a failure, "" without one.
        metrics: further numbers of a user function, which are logged.
        group: one grade per response, from a function that grades a whole group.
    """

    value: float | None
    status: str = OK
    extracted: str = ""
    detail: str = ""
    metrics: Mapping[str, float] = MappingProxyType({})
    group: tuple[Grade, ...] = ()

    def as_message(self, limit: int) -> dict[str, Any]:
        """JSON for the driver; `limit` is the longest text, in characters."""
        message: dict[str, Any] = {"value": self.value, "status": self.status, "extracted": self.extracted[:limit]}
        if self.detail:
            message["detail"] = self.detail[:limit]
        if self.metrics:
            message["metrics"] = dict(self.metrics)
        if self.group:
            message["group"] = [grade.as_message(limit) for grade in self.group]
        return message

    @staticmethod
    def from_message(message: dict[str, Any]) -> Grade:
        """Read `as_message`. Raises KeyError, TypeError or ValueError if a worker sent anything else."""
        value = None if message["value"] is None else float(message["value"])
        plain = Grade(value, str(message["status"]), str(message["extracted"]))
        if len(message) == PLAIN_KEYS:
            return plain
        metrics = {str(name): float(number) for name, number in message.get("metrics", {}).items()}
        group = tuple(map(Grade.from_message, message.get("group", ())))
        return plain._replace(detail=str(message.get("detail", "")), metrics=metrics, group=group)
