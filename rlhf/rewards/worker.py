"""The workers that grade: `rlhf.processes` starts them, confined, and calls `load` and `serve`.

A worker is given either jobs that compute, and answers them together, or calls of `async def` functions, which run all
at once in one event loop, so that a client in the user's module can be used by several calls.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rlhf.processes.channel import Channel
from rlhf.processes.output import printing_as
from rlhf.processes.outside import adopt_orphans, children_of, kill_children
from rlhf.rewards import registry
from rlhf.rewards.grade import Grade
from rlhf.rewards.trl_rewards import has_trl_signature

BEAT_S = 0.2  # pause between signs of life: no call blocks the others, or another test has begun
RECURSION_LIMIT = 3000  # enough for every answer that the parser accepts; as many C frames fit the stack

Job = dict[str, Any]


def load(hello: dict[str, Any]) -> tuple[Grader, dict[str, Any]]:
    """Import the user functions. Raises ValueError."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    functions = {}
    for part in hello["user_functions"]:
        with printing_as(part["name"]):
            functions[part["name"]] = registry.load_user_function(part)
    grader = Grader(functions, hello["wall_seconds"])
    groups = [name for name, function in functions.items() if has_trl_signature(function)]
    return grader, {"waits": grader.waits, "groups": groups}


def serve(channel: Channel, grader: Grader) -> None:
    grader.serve(channel)


class Grader:
    """Grades with user functions, by name, and built-in rewards."""

    def __init__(self, functions: dict[str, Any], wall_seconds: float) -> None:
        self._functions, self._wall_seconds = functions, wall_seconds
        self.waits = [name for name, function in functions.items() if registry.waits(function)]
        self._own = children_of(os.getpid())  # processes that the modules started; they live as long as the worker
        adopt_orphans()  # so that a call's detached processes end with the call
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_sign_of_life = 0.0  # time of the last sign of life while tests run

    def serve(self, channel: Channel) -> None:
        """Answer jobs until the driver hangs up."""
        self._channel, is_open = channel, True
        while is_open:
            messages, is_open = channel.receive(wait=True)
            # jobs of all messages that have arrived, so that calls of the next message do not wait for these
            jobs = [job for message in messages for job in message["jobs"]]
            try:
                if jobs and jobs[0]["name"] in self.waits:
                    self._loop.run_until_complete(self._hold(jobs))
                    kill_children(spared=self._own)
                elif jobs:
                    self._reply(jobs, [self._compute(job) for job in jobs])
            except MemoryError:  # some memory may be lost for good, so another worker takes over
                channel.send({"died": "out of memory"})
                return

    def _reply(self, jobs: Sequence[Job], grades: Sequence[Grade]) -> None:
        pairs = zip(jobs, grades, strict=True)
        self._channel.send({"replies": [{**grade.as_message(), "number": job["number"]} for job, grade in pairs]})

    def _compute(self, job: Job) -> Grade:
        if job["name"] == "code":
            job["time"] = self._wall_seconds, self._say_alive
        is_built_in = job["name"] not in self._functions  # parsers may print parts of responses, which is not shown
        with printing_as(None if is_built_in else job["name"]):
            grade = registry.run(job, self._functions)
        if not is_built_in or job["name"] == "code":
            kill_children(spared=self._own)
        return grade

    def _say_alive(self) -> None:
        if time.monotonic() - self._last_sign_of_life > BEAT_S:
            self._last_sign_of_life = time.monotonic()
            self._reply([], [])

    async def _hold(self, jobs: list[Job]) -> None:
        """Run these calls, and those that arrive meanwhile, until all are answered."""
        self._begin(jobs)
        self._loop.add_reader(self._channel.socket, self._read)
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, timeout=BEAT_S)
            self._tasks -= done
            for task in done:
                task.result()  # MemoryError
            self._reply([], [])
        self._loop.remove_reader(self._channel.socket)

    def _read(self) -> None:
        messages, is_open = self._channel.receive()
        for message in messages:
            self._begin(message["jobs"])
        if not is_open:
            os._exit(0)

    def _begin(self, jobs: list[Job]) -> None:
        self._tasks |= {self._loop.create_task(self._answer(job)) for job in jobs}

    async def _answer(self, job: Job) -> None:
        with printing_as(job["name"]):
            grade = await registry.call_waiting_function(self._functions[job["name"]], job, self._wall_seconds)
        self._reply([job], [grade])
