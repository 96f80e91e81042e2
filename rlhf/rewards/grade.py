"""The grade of one response by one reward: the type that workers, pool and scorer share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# The status of one part of one response.
OK = "ok"  # graded, right or wrong
NO_ANSWER = "no_answer"  # the response states no answer in the requested form
BAD_GOLD = "bad_gold"  # the gold answer of the row cannot be compared with anything
TIMEOUT = "timeout"  # killed at the deadline
DIED = "died"  # the process crashed, or ran out of memory
UNSCORABLE = "unscorable"  # a user function returned None
FAILED = "failed"  # an exception, or a user function returned something that is not a number

STATUSES = (OK, NO_ANSWER, BAD_GOLD, TIMEOUT, DIED, UNSCORABLE, FAILED)


@dataclass(frozen=True)
class Grade:
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
    metrics: dict[str, float] = field(default_factory=dict)
    group: tuple[Grade, ...] = ()

    def as_message(self, limit: int) -> dict[str, Any]:
        """JSON for the driver; `limit` is the longest text, in characters."""
        message: dict[str, Any] = {"value": self.value, "status": self.status}
        message |= {"extracted": self.extracted[:limit], "detail": self.detail[:limit]}
        if self.metrics:
            message["metrics"] = self.metrics
        if self.group:
            message["group"] = [grade.as_message(limit) for grade in self.group]
        return message

    @staticmethod
    def from_message(message: dict[str, Any]) -> Grade:
        """Read `as_message`. Raises KeyError, TypeError or ValueError if a worker sent anything else."""
        return Grade(
            None if message["value"] is None else float(message["value"]),
            str(message["status"]),
            str(message["extracted"]),
            str(message["detail"]),
            {str(name): float(value) for name, value in message.get("metrics", {}).items()},
            tuple(Grade.from_message(one) for one in message.get("group", ())),
        )
