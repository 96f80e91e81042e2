"""The grade of one response by one reward: the type that workers, pool and scorer share."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    value: float | None
    status: str = OK
    extracted: str = ""
    detail: str = ""
