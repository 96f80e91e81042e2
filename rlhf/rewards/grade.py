"""What grading one response by one reward gives; the vocabulary of workers, pool and scorer."""

from __future__ import annotations

from dataclasses import dataclass

# The status of one part of one response.
OK = "ok"  # graded, right or wrong
NO_ANSWER = "no_answer"  # the response states no answer in the form that is asked for
BAD_GOLD = "bad_gold"  # the row's gold answer cannot be graded against
TIMEOUT = "timeout"  # killed at the deadline
DIED = "died"  # the process crashed, or ran out of memory
UNSCORABLE = "unscorable"  # a user function returned None
FAILED = "failed"  # it raised an exception, or a user function returned what is not a number

STATUSES = (OK, NO_ANSWER, BAD_GOLD, TIMEOUT, DIED, UNSCORABLE, FAILED)


@dataclass(frozen=True)
class Grade:
    """One reward of one response.

    Attributes:
        value: the reward; None where there is none.
        status: one of STATUSES.
        extracted: the answer that was graded, "" if none was found.
        detail: what went wrong, "" if nothing did.
    """

    value: float | None
    status: str = OK
    extracted: str = ""
    detail: str = ""
