"""Replaces engines that die during a run, while the others go on sampling. States of an engine:

    absent      it does not answer, a call failed, or a health check failed: no further call goes to it
    started     a new engine has the weights of model.path; it waits until the learners hold what the engines have
    unverified  the learners send the current weights to all engines; it does not sample yet
    ready       the canary has compared it with the learner

A caller that waited for a lost engine asks `next_engine` for another one. An engine that is lost during a transfer is
not replaced: the others have half of the new weights. The run then starts again from its newest checkpoint
(`run.max_restarts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rlhf.cluster.actors import END_S, ActorGroup, ClusterError, LostError
from rlhf.config.printing import say

if TYPE_CHECKING:
    from rlhf.rollout.engine import RolloutEngine

HEALTH_PERIOD_S = 5.0
HEALTH_DEADLINE_S = 120.0
ENGINE_DEATH_NOTICE_S = 30  # after a failed transfer; vLLM hears of a dead worker within 5 s, later on busy cores
LOOK_EVERY_S = 0.1
T = TypeVar("T")
QUEUE = 8  # requests by which the engine of the earlier turns may lead in any case


class EngineRecovery:
    """Replaces the lost engines of a run.

    Args:
        engines: the group; its `absent` ranks are those that are lost and not replaced yet.
        start: starts a new engine for a rank.
        join: puts a started engine at its rank, and sends it the current weights.
        fail: called with the error if an engine cannot be replaced.
        min_engines: sampling waits while fewer engines than this are ready (`cluster.min_engines`).
    """

    def __init__(
        self,
        engines: ActorGroup[RolloutEngine],
        *,
        start: Callable[[int], Awaitable[ActorGroup[RolloutEngine]]],
        join: Callable[[int, ActorGroup[RolloutEngine]], Awaitable[None]],
        fail: Callable[[Exception], None],
        min_engines: int,
    ) -> None:
        self.lost = 0  # engines since the last transfer
        self.unverified = set[int]()  # ranks whose new engine has not been compared with the learner yet
        self._engines, self._start, self._join, self._fail = engines, start, join, fail
        self._min_engines, self._allowed = min_engines, 0
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, allowed: int) -> None:
        """From now on replace lost engines, at most so many between two transfers (`run.max_restarts`)."""
        self._allowed = allowed
        self._tasks.add(asyncio.ensure_future(self._watch()))

    def recover(self, rank: int, error: LostError) -> bool:
        """Replace an engine after this error; False if too many were lost."""
        if rank in self._engines.absent:
            return True
        if self.lost >= self._allowed:
            return False
        self.lost += 1
        self._engines.absent.add(rank)
        say(f"warning: {error} It is replaced, and its prompts are sampled by another engine.")
        self._tasks.add(asyncio.ensure_future(self._replace(rank)))
        return True

    async def _replace(self, rank: int) -> None:
        try:
            lost: ActorGroup[RolloutEngine] = ActorGroup(
                self._engines.name, [self._engines.actors[rank]], deadline_s=END_S
            )
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
        except Exception as error:
            self._fail(error)

    def has_enough(self) -> bool:
        """Whether at least `min_engines` are left."""
        return len(self._engines.present) >= self._min_engines

    async def next_engine(self, in_flight: Sequence[int], prefer: int | None = None) -> int:
        """The ready engine with the fewest requests; waits while too few are ready.

        `prefer`: chosen unless it has over twice as many requests; its cache then saves less than the queue costs.
        """
        while True:
            ready = set(range(len(in_flight))) - self._engines.absent - self.unverified
            if len(ready) >= self._min_engines:
                fewest = min(sorted(ready), key=in_flight.__getitem__)
                if prefer is not None and prefer in ready and in_flight[prefer] <= 2 * in_flight[fewest] + QUEUE:
                    return prefer
                return fewest
            await asyncio.sleep(LOOK_EVERY_S)

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

    def cancel(self) -> None:
        """Stop replacing engines; the end of Ray kills actors that have not joined."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """`cancel`, and wait until no replacement holds the weights' lock."""
        self.cancel()  # all before one is awaited: a task that waits for the lock ends when another releases it
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
