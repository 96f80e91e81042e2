"""Engines that die while the run goes on: each is replaced by a new one, and the others go on sampling.

    lost      it does not answer, a call failed, or a health check failed: no further call goes to it
    built     a new engine has started, with the weights of model.path
    present   the learners have sent it the current weights: with the next transfer, or at once while they still hold
              what the engines have. Then the canary compares it before it samples.

A caller that waited for a lost engine asks `next_engine` for another one. An engine that is lost during a transfer is
not replaced: the others have half of the new weights. The run then starts again from its newest checkpoint
(`run.max_restarts`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import ray

from rlhf.cluster.actors import END_S, ActorGroup, ClusterError, LostError
from rlhf.config.printing import say

HEALTH_PERIOD_S = 5.0
HEALTH_DEADLINE_S = 120.0
ENGINE_DEATH_NOTICE_S = 30  # after a failed transfer; vLLM hears of a dead worker within 5 s, later on busy cores
LOOK_EVERY_S = 0.1

R = TypeVar("R")


class Replacements:
    """Replaces the lost engines of a run.

    Args:
        engines: the group; its `absent` ranks are those that are lost or have no current weights.
        start: builds a new engine for a rank.
        join: called when one is built; gives it the weights unless the next transfer has to.
        fewest: sampling and transfers wait while fewer engines than this are left (`cluster.min_engines`).
        allowed: at most so many engines are replaced between two transfers (`run.max_restarts`).
    """

    def __init__(
        self,
        engines: ActorGroup,
        *,
        start: Callable[[int], Awaitable[ActorGroup]],
        join: Callable[[int], Awaitable[None]],
        fewest: int,
        allowed: int = 0,
    ) -> None:
        self.allowed = allowed
        self.built: dict[int, ActorGroup] = {}
        self._engines, self._start, self._join = engines, start, join
        self._fewest = fewest
        self._joining: set[int] = set()  # present, and without the current weights or their check
        self._lost = 0  # since the last transfer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # set when a replacement fails

    def take_over(self, rank: int, error: LostError) -> bool:
        """Replace an engine after this error; False if too many were lost."""
        if rank in self._engines.absent:
            return True
        if self._lost >= self.allowed:
            return False
        self._lost += 1
        self._engines.absent.add(rank)
        say(f"warning: {error} It is replaced, and its prompts are sampled by another engine.")
        self._tasks[rank] = asyncio.ensure_future(self._replace(rank))
        return True

    async def _replace(self, rank: int) -> None:
        try:
            await self._end(self._engines.actors[rank])
            while rank not in self.built:
                try:
                    self.built[rank] = await self._start(rank)
                except LostError as error:
                    if len(self._engines.present) < self._fewest:
                        raise
                    say(f"warning: {error} The run goes on without this engine; it is started again.")
            await self._join(rank)
        except Exception as error:
            if not self._failed.done():
                self._failed.set_exception(error)
                self._failed.exception()  # marks it as seen: it is raised only where a caller waits

    async def _end(self, actor: Any) -> None:
        """Kill an engine's actor, and the processes below it where the actor still answers."""
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(END_S):
                await actor.end_children.remote()
        ray.kill(actor)

    async def next_engine(self, in_flight: Sequence[int], prefer: int | None = None) -> int:
        """`prefer` if it can sample, or else the engine that has the fewest requests; waits while too few are left."""
        while True:
            self.raise_failure()
            ranks = set(range(len(in_flight))) - self._engines.absent - self._joining
            if len(ranks) >= self._fewest:
                return prefer if prefer in ranks else min(sorted(ranks), key=in_flight.__getitem__)
            await asyncio.sleep(LOOK_EVERY_S)

    async def enough(self) -> None:
        """Before a transfer: wait until enough engines can take part."""
        self.raise_failure()
        while len(self._engines.present) + len(self.built) < self._fewest:
            await asyncio.sleep(LOOK_EVERY_S)
            self.raise_failure()
        self._lost = 0

    def admit(self) -> dict[int, ActorGroup]:
        """Engines that have been built become present; they do not sample before `ready`."""
        admitted, self.built = self.built, {}
        for rank, group in admitted.items():
            self._engines.replace(rank, group)
            self._engines.absent.discard(rank)
            self._joining.add(rank)
        return admitted

    def send_back(self, admitted: Mapping[int, ActorGroup]) -> None:
        """Undo `admit`, since these engines got no weights: the next transfer admits those that were not lost."""
        self.built |= {rank: group for rank, group in admitted.items() if rank not in self._engines.absent}
        self._engines.absent |= admitted.keys()
        self._joining -= admitted.keys()

    def ready(self) -> None:
        """Call this when every present engine has the current weights."""
        self._joining.clear()

    def raise_failure(self) -> None:
        """Raise what a replacement ended with, if one failed."""
        if self._failed.done():
            self._failed.result()

    async def unless_failed(self, call: Coroutine[Any, Any, R]) -> R:
        """The result of a call; if a replacement fails first, its error is raised."""
        task = asyncio.ensure_future(call)
        waited: set[asyncio.Future[Any]] = {task, self._failed}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.raise_failure()
            return await task
        finally:
            task.cancel()

    async def watch(self) -> None:
        """Ask every engine for its health, so that the loss of an idle one is noticed within seconds too."""
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            for rank in range(len(self._engines.actors)):
                if rank not in self._engines.absent:
                    try:
                        await self._engines.call_one(rank, "check_health", what="health")
                    except LostError as error:
                        self.take_over(rank, error)

    async def close(self, *, kill: bool) -> None:
        """End all replacements; `kill` the actors that are built and not in use yet."""
        for task in self._tasks.values():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClusterError):
                await task
        for group in self.built.values() if kill else ():
            ray.kill(group.actors[0])


async def while_healthy(engines: ActorGroup, sending: Awaitable[Any]) -> None:
    """Wait for a transfer until an engine is dead or has failed to load; the sender alone would wait for its deadline.

    If the transfer fails, the engines are checked first: a dead engine is the cause, not the learner's error.

    Raises:
        LostError: an engine or a learner is lost; the run can start again.
        ClusterError: an engine has not loaded what was sent, and would not load it another time.
    """
    task, present = asyncio.ensure_future(sending), engines.present

    async def check() -> None:
        await engines.call("check_health", deadline_s=HEALTH_DEADLINE_S)
        if engines.present != present:  # another task has noticed it first, and replaces the engine
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
        await task
    finally:
        task.cancel()
