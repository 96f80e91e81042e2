"""The driver's half of the endpoint, before a process that misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S
from worlds import make_config

from rlhf.environments import endpoint as endpoint_module
from rlhf.environments.branches import Branches
from rlhf.environments.endpoint import Endpoint
from rlhf.environments.turns import FailedError, Limits
from rlhf.processes.output import MAX_LINES
from rlhf.processes.outside import may_signal
from rlhf.sampling.chat import MAX_CONNECTIONS
from rlhf.types import Outcome

pytestmark = pytest.mark.slow

# In place of vLLM's app: it answers pings, asks what the test says when a rollout begins, and prints the answers.
PROCESS = """
import json, os, socket, sys

control = socket.socket(fileno=int(sys.argv[2])).makefile("rw")
sys.stdin.read()

def send(message):
    control.write(json.dumps(message) + "\\n")
    control.flush()

send({"ready": True})
for line in control:
    message = json.loads(line)
    if "ping" in message:
        send(message)
    for asked in json.loads(sys.argv[1]) if "open" in message else ():
        send({"session": message["open"], "messages": [], "tools": [], "counts": True, "ignored": [], **asked})
    if "answer" in message:
        print("\\x1b[31m", message, flush=True)
"""


def played(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    runs: list[Callable[[Endpoint, Mapping[str, str]], Awaitable[Outcome]]],
    said: list[str],
    *,
    asks: str = "[]",
    branches: Branches | None = None,
) -> list[Any]:
    """What rollouts return or raise, one after the other; `said` gets the lines that are said."""
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen",
        lambda command, **how: start([sys.executable, "-S", "-c", PROCESS, asks, *command[3:]], **how),
    )  # fmt: skip
    endpoint = Endpoint(make_config(folder), said.append)
    nothing: Any = None
    rollout = branches or Branches(nothing, nothing, Limits(8, 64, max_sequence_tokens=64), ())

    async def play() -> list[Any]:
        outcomes: list[Any] = []
        for run in runs:
            try:
                outcomes.append(await endpoint.play(rollout, partial(run, endpoint)))
            except FailedError as error:
                outcomes.append(error)
        return outcomes

    try:
        return asyncio.run(play())
    finally:
        endpoint.close()


def until(holds: Callable[[], object]) -> Callable[[Endpoint, Mapping[str, str]], Awaitable[Outcome]]:
    async def waits(_: Endpoint, __: Mapping[str, str]) -> Outcome:
        while not holds():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)  # for what should not come
        return Outcome(reward=1.0)

    return waits


def test_a_process_that_stops_costs_its_rollouts_and_another_one_serves_at_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    async def stops(endpoint: Endpoint, where: Mapping[str, str]) -> Outcome:
        assert endpoint.pid is not None
        seen.append((where["url"], endpoint.pid))
        os.kill(endpoint.pid, signal.SIGSTOP)
        monkeypatch.setattr(endpoint_module, "PING_S", 0.2)
        await asyncio.sleep(WAIT_S)
        return Outcome(reward=1.0)

    async def goes_on(endpoint: Endpoint, where: Mapping[str, str]) -> Outcome:
        seen.append((where["url"], endpoint.pid))
        monkeypatch.setattr(endpoint_module, "PING_S", 1.0)
        await asyncio.sleep(1.0 + (endpoint_module.MAX_PINGS + 1) * endpoint_module.PING_S)
        return Outcome(reward=1.0)

    stopped, healthy = played(monkeypatch, tmp_path, [stops, goes_on], [])
    assert isinstance(stopped, FailedError)
    assert "answered nothing for 1 s" in str(stopped)
    assert healthy == Outcome(reward=1.0)  # it said nothing but its pings for longer than that
    (first, killed), (second, alive) = seen
    assert first == second
    assert killed != alive
    assert not may_signal(killed)


def test_what_the_process_prints_and_the_keys_that_programs_name_are_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asks = [{"ask": number, "ignored": [f"key{number}", f"other{number}"]} for number in range(100)]
    said: list[str] = []

    def named() -> list[str]:
        warnings = [line.split() for line in said if "programs set" in line]
        return [word for words in warnings for word in words if word.startswith(("key", "other"))]

    def printed() -> list[str]:
        return [line for line in said if line.startswith("endpoint: ")]

    all_came = until(lambda: len(printed()) >= MAX_LINES and len(named()) >= endpoint_module.MAX_IGNORED)
    played(monkeypatch, tmp_path, [all_came], said, asks=json.dumps(asks))
    assert len(named()) == endpoint_module.MAX_IGNORED
    assert len(printed()) == MAX_LINES
    assert any("cannot be rendered" in line for line in said)


def test_a_rollout_has_a_bounded_number_of_turns_under_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing: Any = None
    limits = Limits(8, 64, max_sequence_tokens=64)
    tasks: Any = set(range(MAX_CONNECTIONS))
    busy = Branches(nothing, nothing, limits, (), answering=tasks)
    said: list[str] = []
    played(monkeypatch, tmp_path, [until(lambda: said)], said, asks='[{"ask": 0}]', branches=busy)
    assert "asks for over 128 turns at once" in said[0]
