"""Calls of functions that wait (`async def`), all at once in one worker, each with a deadline from its own start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlhf.rewards.protocol import Channel, encoded

BEAT_S = 0.2  # how often a worker tells the driver that no call blocks the others


class WaitingCalls:
    """Runs all calls in the same event loop, so that a client in the user's module can be used by several calls.

    Args:
        call: job -> its reply; never raises an exception.
        waits: whether a job is a call that waits; any other job ends the loop and is left to the caller.
    """

    def __init__(
        self,
        channel: Channel,
        call: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        waits: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._channel, self._call, self._waits = channel, call, waits
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: list[dict[str, Any]] = []
        self._left: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    def run(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run these calls and those that arrive meanwhile until none is left; returns jobs that do not wait."""
        self._loop.run_until_complete(self._run(jobs))
        left, self._left = self._left, []
        return left

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
                message = {"replies": replies, "cpu": time.process_time()}
                await self._loop.sock_sendall(self._channel.socket, encoded(message))
        finally:
            self._loop.remove_reader(self._channel.socket)

    def _read(self) -> None:
        messages, is_open = self._channel.receive()
        for message in messages:
            self._start([job for job in message["jobs"] if self._waits(job)])
            self._left += [job for job in message["jobs"] if not self._waits(job)]
        if not is_open:
            os._exit(0)

    def _start(self, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            task = self._loop.create_task(self._answer(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, job: dict[str, Any]) -> None:
        try:
            reply = await self._call(job)
        except MemoryError:
            os._exit(1)  # the driver runs every call again by itself, and finds the one that takes all memory
        self._replies.append({**reply, "number": job["number"]})
        self._news.set()
