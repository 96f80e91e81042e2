"""Replaces engines that die during a run, while the others go on sampling. States of an engine:

    absent      it does not answer, a call failed, or a health check failed: no further call goes to it
    started     a new engine has the weights of model.path; it waits until the learners hold what the engines have
    unverified  the learners send the current weights to all engines; it does not sample yet
    ready       the canary has compared it with the learner

Workers choose among the engines of a numbered list (`cluster.engine_choice`), and report a request that failed. An
engine that is lost during a transfer is not replaced: the others have half of the new weights. The run then starts
again from its newest checkpoint (`run.max_restarts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.cluster.actors import END_S, ActorGroup, ClusterError, LostError
from rlhf.cluster.engine_choice import EngineListener, ListedEngines
from rlhf.config.printing import say

if TYPE_CHECKING:
    from rlhf.sampling.engine import RolloutEngine

HEALTH_PERIOD_S = 5.0
HEALTH_DEADLINE_S = 120.0
ENGINE_DEATH_NOTICE_S = 30  # after a failed transfer; vLLM hears of a dead worker within 5 s, later on busy cores
T = TypeVar("T")


class EngineRecovery:
    """Replaces the lost engines of a run, and tells its listeners which engines are ready.

    Args:
        engines: the group; its `absent` ranks are those that are lost and not replaced yet.
        start: starts a new engine for a rank.
        join: puts a started engine at its rank, and sends it the current weights.
        fail: called with the error if an engine cannot be replaced, or an unexpected one occurs.
        background: starts work that ends with the cluster.
        min_engines: the list is empty while fewer engines than this are ready (`cluster.min_engines`).
    """

    def __init__(
        self,
        engines: ActorGroup[RolloutEngine],
        *,
        start: Callable[[int], Awaitable[ActorGroup[RolloutEngine]]],
        join: Callable[[int, ActorGroup[RolloutEngine]], Awaitable[None]],
        fail: Callable[[Exception], None],
        background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        min_engines: int,
    ) -> None:
        self._engines, self._start, self._join, self._fail = engines, start, join, fail
        self._background, self._min_engines = background, min_engines
        self._lost, self._allowed = 0, 0  # engines, since the last transfer
        self._ready = set(range(len(engines.actors)))
        self._doubted = set[int]()  # healthy engines of which a request has failed since the last transfer
        self._examined = set[int]()  # engines whose health is being checked after a report
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners: list[EngineListener] = []
        self._number = 0
        self._listed: ListedEngines = {}
        self._failure: str | None = None  # the error after which no engine is replaced any more
        self._since = dict[int, int]()  # number of the list from which an engine is new; others are as at the start
        self._publish()

    def begin(self, allowed: int) -> None:
        """From now on replace lost engines, at most so many between two transfers (`run.max_restarts`)."""
        self._allowed = allowed
        self._in_background(self._watch())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work in the background; an error in it ends the run."""
        self._tasks.append(task := self._background(work))
        task.add_done_callback(self._fail_with)

    def _fail_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._fail(error)

    def begin_transfer(self) -> None:
        """Count lost and doubted engines from 0 again."""
        self._lost = 0
        self._doubted.clear()

    # --- the list of ready engines ---

    def subscribe(self, listener: EngineListener) -> None:
        """Send this listener the present list, and each later one."""
        self._listeners.append(listener)
        listener.update(self._number, self._listed, self._failure)

    def unsubscribe(self, listener: EngineListener) -> None:
        self._listeners.remove(listener)

    def _publish(self, *, new: int | None = None) -> None:
        """Send a list with the next number; requests of the engine `new` that were made before do not count."""
        self._number += 1
        if new is not None:
            self._since[new] = self._number
        ready = self._ready if len(self._ready) >= self._min_engines else ()
        homes = enumerate(self._engines.homes.items())
        self._listed = {rank: (self._engines.actors[rank], dict([home])) for rank, home in homes if rank in ready}
        for listener in self._listeners:
            listener.update(self._number, self._listed, self._failure)

    def report(self, rank: int, number: int, error: str, silent: bool) -> None:
        """A request to an engine of list `number` failed. A newer list follows, or has been sent already.

        If the engine is dead or has failed, or did not answer until the deadline (`silent`), it is replaced. If it is
        healthy, the request is made again, once between two transfers.
        """
        if self._is_listed_since(rank, number) and rank not in self._examined:
            self._examined.add(rank)
            self._in_background(self._examine(rank, number, error, silent))

    def _is_listed_since(self, rank: int, number: int) -> bool:
        return rank in self._ready and self._since.get(rank, 0) <= number

    async def _examine(self, rank: int, number: int, error: str, silent: bool) -> None:
        try:
            healthy = not silent and await self._is_healthy(rank)
        finally:
            self._examined.discard(rank)
        if not self._is_listed_since(rank, number):  # the watch noticed the loss first
            return
        if healthy and rank not in self._doubted:
            self._doubted.add(rank)
            say(f"warning: {error} The engine is healthy, so the request is made again.")
            self._publish(new=rank)
        elif not self.recover(rank, LostError(error)):
            self._failure = error
            self._publish()

    async def _is_healthy(self, rank: int) -> bool:
        try:
            await self._engines.call_one(
                rank, lambda engine: engine.check_health(), what="health", deadline_s=HEALTH_DEADLINE_S
            )
        except LostError:
            return False
        return True

    # --- replacement ---

    def recover(self, rank: int, error: LostError) -> bool:
        """Replace an engine after this error; False if too many were lost."""
        if rank in self._engines.absent:
            return True
        if self._lost >= self._allowed:
            return False
        self._lost += 1
        self._engines.absent.add(rank)
        self._ready.discard(rank)
        say(f"warning: {error} It is replaced, and its prompts are sampled by another engine.")
        self._publish()
        self._in_background(self._replace(rank))
        return True

    async def _replace(self, rank: int) -> None:
        lost: ActorGroup[RolloutEngine] = ActorGroup(self._engines.name, [self._engines.actors[rank]], deadline_s=END_S)
        await lost.end()  # kills its child processes too, if it still answers
        new: ActorGroup[RolloutEngine] | None = None
        while new is None:
            try:
                new = await self._start(rank)
            except LostError as error:
                if not self.has_enough():
                    raise
                say(f"warning: {error} The run goes on without this engine; it is started again.")
        await self._join(rank, new)
        if rank not in self._engines.absent:  # the watch may have found it dead meanwhile, and replaces it
            self._ready.add(rank)
            self._publish(new=rank)

    def has_enough(self) -> bool:
        """Whether at least `min_engines` are left."""
        return len(self._engines.present) >= self._min_engines

    async def _watch(self) -> None:
        """Ask every engine for its health, so that the loss of an idle one is noticed within seconds too."""
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            for rank in range(len(self._engines.actors)):
                if rank not in self._engines.absent:
                    try:
                        await self._engines.call_one(rank, lambda engine: engine.check_health(), what="health")
                    except LostError as error:
                        self.recover(rank, error)

    async def close(self) -> None:
        """Stop replacing engines; the end of Ray kills actors that have not joined."""
        # Cancel all before one is awaited: one that waits for the weights' lock ends after its holder.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def while_healthy(engines: ActorGroup[RolloutEngine], sending: Awaitable[T]) -> T:
    """Await a transfer, and give it up when an engine is dead or has failed; the sender would wait for its deadline.

    If the transfer fails, the engines are checked first: a dead engine is then the cause, not the learner's error.

    Raises:
        LostError: an engine or a learner is lost; the run can start again.
        ClusterError: an engine did not load the weights, and would not load them another time.
    """
    task, present = asyncio.ensure_future(sending), engines.present

    async def check() -> None:
        await engines.call(lambda engine: engine.check_health(), deadline_s=HEALTH_DEADLINE_S)
        if engines.present != present:  # another task noticed the loss first, and replaces the engine
            raise LostError("the transfer of weights failed: an engine was lost")

    try:
        while not task.done():
            await asyncio.wait({task}, timeout=HEALTH_PERIOD_S)
            if not task.done():
                await check()
        if isinstance(error := task.exception(), ValueError):
            raise ClusterError(str(error)) from None
        if error is not None:
            for _ in range(ENGINE_DEATH_NOTICE_S):  # the learner may notice a death before the engine does
                await check()
                await asyncio.sleep(1)
        return await task
    finally:
        task.cancel()
