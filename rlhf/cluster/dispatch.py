"""Groups for rollout workers in other processes: dispatched to the one with the fewest, and again if one is lost.

    Dispatcher.rollout_group ── ticket, prompt, purpose ──>  outbox of a worker ─┐
              <── answer, by ticket ──  Dispatcher.serve  <── news ── exchange <─┘

Pure asyncio. One call, `exchange`, brings a worker its new groups and brings back what it has finished since the last
one: a call costs the driver more than a group. An answer counts only if it comes from the worker that has the ticket
now. Another attempt at a group has the same ticket and the same seeds, since those come from its prompt.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from rlhf.environments.turns import FAILED
from rlhf.rollout.purpose import Purpose
from rlhf.types import Prompt, RolloutGroup

PAUSE_S = 0.01  # between two exchanges: groups that follow the ones just finished go with the next one
FAILED_COUNTS_S = 10.0  # a failed group counts so long: a worker where all fail at once is not the one with the fewest

Order = tuple[int, Prompt, Purpose] | int  # a group to begin: its ticket, prompt and purpose; or a ticket to cancel


class Answer(NamedTuple):
    """A graded group, or the error that ended it."""

    ticket: int
    result: RolloutGroup | Exception


class Printed(NamedTuple):
    """A line that an environment or a grader printed; a warning begins with `warning: `."""

    line: str


class FailedRequest(NamedTuple):
    """A request on an engine that failed; see `EngineChoice`."""

    engine: int
    number: int
    error: str
    silent: bool


News = Answer | Printed | FailedRequest
Exchange = Callable[[Sequence[Order]], Awaitable[Sequence[News]]]
Send = Callable[[Sequence[Order]], None]


class LostWorker(NamedTuple):
    error: Exception
    groups: int  # open ones, which have been dispatched again


class _Worker:
    """A worker that is served.

    Attributes:
        tickets: its open groups.
        failed: its groups that failed in the last FAILED_COUNTS_S.
    """

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self.tickets, self.failed = set[int](), 0
        self._exchange, self._send_orders, self._outbox, self._waits = exchange, send, list[Order](), False

    def count_failed(self, change: int) -> None:
        self.failed += change

    def give(self, order: Order) -> None:
        """Send an order with the next exchange, or at once if the present one waits for news."""
        if self._waits and not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)  # with the other orders of this moment
        self._outbox.append(order)

    def _send(self) -> None:
        if self._waits and self._outbox:
            orders, self._outbox = self._outbox, []
            self._send_orders(orders)

    async def exchange(self) -> Sequence[News]:
        orders, self._outbox, self._waits = self._outbox, [], True
        try:
            return await self._exchange(orders)
        finally:
            self._waits = False


class _Group:
    def __init__(self, prompt: Prompt, purpose: Purpose) -> None:
        self.prompt, self.purpose = prompt, purpose
        self.answer: asyncio.Future[RolloutGroup] = asyncio.get_running_loop().create_future()
        self.worker: _Worker | None = None  # None: it waits for one


class Dispatcher:
    """The open groups of a run, and the workers that have them.

    Args:
        hear: called with all other news, and the name of the worker.
    """

    def __init__(self, hear: Callable[[str, Printed | FailedRequest], None]) -> None:
        self._hear = hear
        self._tickets = itertools.count(1)
        self._groups: dict[int, _Group] = {}
        self._workers: list[_Worker] = []

    async def rollout_group(self, prompt: Prompt, purpose: Purpose) -> RolloutGroup:
        """The graded group of a prompt. Raises the error that ended it; if cancelled, its worker cancels it too."""
        ticket, group = next(self._tickets), _Group(prompt, purpose)
        self._groups[ticket] = group
        self._dispatch(ticket)
        try:
            return await group.answer
        except asyncio.CancelledError:
            if group.worker is not None:
                group.worker.tickets.discard(ticket)
                group.worker.give(ticket)
            raise
        finally:
            del self._groups[ticket]

    async def serve(self, name: str, exchange: Exchange, send: Send) -> LostWorker:
        """Give groups to a worker until it is lost. Its open groups then go to others, or wait for one.

        Args:
            exchange: sends orders and waits for news. Whatever it raises, the worker is lost.
            send: sends orders while an exchange waits for news; they may arrive before or after those of the exchange.
        """
        worker = _Worker(exchange, send)
        self._workers.append(worker)
        for ticket, group in self._groups.items():
            if group.worker is None:
                self._dispatch(ticket)
        while True:
            try:
                received = await worker.exchange()
            except Exception as error:
                self._workers.remove(worker)
                for ticket in worker.tickets:
                    self._dispatch(ticket)
                return LostWorker(error, len(worker.tickets))
            for news in received:
                if isinstance(news, Answer):
                    self._answer(worker, *news)
                else:
                    self._hear(name, news)
            await asyncio.sleep(PAUSE_S)

    def _dispatch(self, ticket: int) -> None:
        group = self._groups[ticket]
        group.worker = min(self._workers, key=lambda worker: len(worker.tickets) + worker.failed, default=None)
        if group.worker is not None:
            group.worker.tickets.add(ticket)
            group.worker.give((ticket, group.prompt, group.purpose))

    def _answer(self, worker: _Worker, ticket: int, result: RolloutGroup | Exception) -> None:
        if ticket not in worker.tickets:
            return  # it was cancelled
        worker.tickets.remove(ticket)
        if _has_failed(result):
            worker.count_failed(1)
            asyncio.get_running_loop().call_later(FAILED_COUNTS_S, worker.count_failed, -1)
        answer = self._groups[ticket].answer
        if answer.done():
            return  # it is cancelled in this moment
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def _has_failed(result: RolloutGroup | Exception) -> bool:
    if isinstance(result, Exception):
        return True
    outcomes = (sample.rollout.outcome for sample in result.samples)
    return any(outcome is not None and outcome.status == FAILED for outcome in outcomes)
