"""The check runner: every check has a deadline, and a failed check does not stop the next ones."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import psutil

from rlhf.config.grpo import GRPOConfig

if TYPE_CHECKING:
    from rlhf.cluster.canary import Canary
    from rlhf.cluster.engines import Engines
    from rlhf.types import PolicyTargets, Prompt

Status = Literal["ok", "warn", "fail", "skip"]  # skip: not possible on this machine or with this config


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    status: Status
    text: str
    remedy: str = ""  # what to do about a warning or a failure
    name: str = ""  # of the check; the runner sets it, and the seconds
    seconds: float = 0.0


class NotCheckedError(Exception):
    """A check cannot run because an earlier one failed; the message says which."""


@dataclass
class Patient:
    """The examined run, and the results that later checks need; reading a missing one raises NotCheckedError."""

    config: GRPOConfig
    tiny: bool = False  # whether the doctor made the model itself
    least_free: float = math.inf  # bytes: this machine's lowest free memory at the end of a check
    cleanup: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    nodes: dict[str, dict[str, Any]] = field(init=False)  # by name: `report` of the node, its `gpus` and `cards`
    prompts: list[Prompt] = field(init=False)  # the first of each source, after the reset of an environment
    rows: list[Prompt] = field(init=False)  # the same prompts before an environment changes them
    engines: Engines = field(init=False)  # the running engines, with the learners
    canary: Canary = field(init=False)  # passed by engines and learners
    targets: PolicyTargets = field(init=False)  # for the step that the learners hold

    def __getattr__(self, name: str) -> Any:
        if name in MISSING:
            raise NotCheckedError(MISSING[name])
        raise AttributeError(name)


MISSING = {
    "nodes": "the nodes did not answer",
    "prompts": "model or data could not be loaded",
    "engines": "engines and learners did not start",
    "canary": "engines and learners do not agree",
    "targets": "there was no update",
}


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    run: Callable[[Patient], Awaitable[Finding]]  # an exception is a failure, with its message
    deadline_s: float
    remedy: str  # what to do if it raises an exception or exceeds its deadline


async def examine(check: Check, patient: Patient) -> Finding:
    """Run one check until it returns, fails or exceeds its deadline."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(check.deadline_s) as limit:
            finding = await check.run(patient)
    except NotCheckedError as reason:
        finding = Finding("warn", f"not checked: {reason}")
    except Exception as error:  # any error of a check is its result; the other checks still run
        if isinstance(error, TimeoutError) and limit.expired():
            finding = Finding("fail", f"no answer within {check.deadline_s:.0f} s", check.remedy)
        else:
            text = str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
            finding = Finding("fail", text, check.remedy)
    return replace(finding, name=check.name, seconds=round(time.monotonic() - began, 2))


async def examine_all(checks: Sequence[Check], patient: Patient, report: Callable[[Finding], None]) -> list[Finding]:
    """Run the checks in order; each result is reported at once."""
    results = []
    async with patient.cleanup:
        for check in checks:
            results.append(await examine(check, patient))
            patient.least_free = min(patient.least_free, psutil.virtual_memory().available)
            report(results[-1])
    return results


def report_lines(result: Finding) -> Iterator[str]:
    """`ok    versions     20 packages ...  [0.1 s]`; further lines and the remedy below."""
    status = result.status if result.status != "fail" else "FAIL"
    first, *rest = result.text.splitlines() or [""]
    yield f"{status:<5} {result.name:<11} {first}  [{result.seconds:.1f} s]"
    yield from (f"{'':<18}{line}" for line in rest)
    if result.remedy:
        yield f"{'':<18}-> {result.remedy}"
