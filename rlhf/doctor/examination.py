"""What a check is, and how a list of them is gone through: each with a deadline, none hiding another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rlhf.config.run import GRPOConfig

if TYPE_CHECKING:
    from rlhf.cluster.cluster import Cluster
    from rlhf.types import Prompt

T = TypeVar("T")
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What a check found; `remedy` says what to do about a warning or a failure."""

    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Result:
    """A finding with the check it is of and the seconds that it took."""

    name: str
    status: Status
    text: str
    remedy: str
    seconds: float


@dataclass
class Patient:
    """The run that is examined, and what earlier checks leave for later ones; None where they failed."""

    config: GRPOConfig
    prompts: list[Prompt] | None = None  # the first of each source, tokenized
    nodes: dict[str, dict[str, Any]] | None = None  # by name: `report` of the node, its `gpus`
    cluster: Cluster | None = None
    at_end: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


class NotCheckedError(Exception):
    """A check needs what an earlier one did not find; the message says which."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        run: looks at the patient; an exception is a failure with its message.
        remedy: what to do when it raises or does not answer in time.
    """

    name: str
    run: Callable[[Patient], Awaitable[Finding]]
    deadline_s: float
    remedy: str


async def examine(check: Check, patient: Patient) -> Result:
    """Run one check to its finding, an error of its own or its deadline."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(check.deadline_s) as limit:
            finding = await check.run(patient)
    except NotCheckedError as reason:
        finding = Finding("warn", f"not checked: {reason}")
    except Exception as error:  # whatever breaks one check is its finding, and the others still run
        if isinstance(error, TimeoutError) and limit.expired():
            finding = Finding("fail", f"no answer within {check.deadline_s:.0f} s", check.remedy)
        else:
            text = str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
            finding = Finding("fail", text, check.remedy)
    return Result(check.name, finding.status, finding.text, finding.remedy, round(time.monotonic() - began, 2))


async def examine_all(checks: Sequence[Check], patient: Patient, tell: Callable[[Result], None]) -> list[Result]:
    """Run the checks in order; each result is told as soon as it is there."""
    results = []
    async with patient.at_end:
        for check in checks:
            results.append(await examine(check, patient))
            tell(results[-1])
    return results


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call what blocks without blocking the deadlines; a thread that never ends does not keep the program."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def work() -> None:
        try:
            found = function(*arguments)
        except BaseException as error:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_exception, error)
        else:
            outcome = (future.set_result, found)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return await future


def lines(result: Result) -> Iterator[str]:
    """`ok    versions     20 packages ...   0.1 s`, and below it the remedy where there is one."""
    status = result.status if result.status != "fail" else "FAIL"
    first, *rest = result.text.splitlines() or [""]
    yield f"{status:<5} {result.name:<11} {first}  [{result.seconds:.1f} s]"
    yield from (f"{'':<18}{line}" for line in rest)
    if result.remedy:
        yield f"{'':<18}-> {result.remedy}"
