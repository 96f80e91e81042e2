"""Calls of functions that wait (`async def`), all at once in one worker, each with a deadline from its own start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from rlhf.rewards.grade import Grade
from rlhf.rewards.protocol import Channel, encoded

BEAT_S = 0.2  # how often a worker tells the driver that no call blocks the others


class WaitingCalls:
    """Runs all calls in the same event loop, so that a client in the user's module can be used by several calls.

    Args:
        call: job -> its grade; raises nothing but MemoryError.
        names: the functions that wait; a job of any other ends the loop and is left to the caller.
    """

    def __init__(
        self, channel: Channel, call: Callable[[dict[str, Any]], Awaitable[Grade]], names: Collection[str]
    ) -> None:
        self._channel, self._call, self._names = channel, call, names
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: list[dict[str, Any]] = []
        self._left: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    def run(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run these calls and those that arrive meanwhile until none is left; returns jobs that do not wait."""
        self._left = []
        self._loop.run_until_complete(self._run(jobs))
        return self._left

    async def _run(self, jobs: list[dict[str, Any]]) -> None:
        self._channel.socket.setblocking(False)
        self._start(jobs)
        self._loop.add_reader(self._channel.socket, self._read)
        try:
            while self._tasks or self._replies:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), BEAT_S)
                self._news.clear()
                replies, self._replies = self._replies, []
                message = {"replies": replies, "cpu": time.process_time(), "last": False}
                await self._loop.sock_sendall(self._channel.socket, encoded(message))
        finally:
            self._loop.remove_reader(self._channel.socket)

    def _read(self) -> None:
        messages, is_open = self._channel.receive()
        for message in messages:
            self._start(message["jobs"])
        if not is_open:
            os._exit(0)

    def _start(self, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            if job["name"] not in self._names:
                self._left.append(job)
                continue
            task = self._loop.create_task(self._answer(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, job: dict[str, Any]) -> None:
        try:
            grade = await self._call(job)
        except MemoryError:
            os._exit(1)  # the driver runs every call again by itself, and finds the one that takes all memory
        self._replies.append({**grade.as_message(), "number": job["number"]})
        self._news.set()
