"""Engines that are lost and replaced, without the stack: who samples when, and when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlhf.cluster.actors import ActorGroup, ClusterError, LostError
from rlhf.cluster.engine_recovery import EngineRecovery

LOST = LostError("engine 0 is lost: it died.")


class FakeEngines:
    """A group of engines without actors."""

    name = "engine"

    def __init__(self, count: int) -> None:
        self.actors = [f"old {rank}" for rank in range(count)]
        self.absent: set[int] = set()

    @property
    def present(self) -> list[str]:
        return [actor for rank, actor in enumerate(self.actors) if rank not in self.absent]

    def replace(self, rank: int, new: str) -> None:
        self.actors[rank] = new
        self.absent.discard(rank)


class World:
    """Fake engines, of which lost ones are replaced; a new one starts when `build` is set, and is compared at `check`.

    `failure` is what a start ends with, `failed` what the recovery did.
    """

    def __init__(self, engines: int, *, fewest: int = 1, allowed: int = 2, failure: Exception | None = None) -> None:
        self.engines = FakeEngines(engines)
        self.build, self.check, self.failed = asyncio.Event(), asyncio.Event(), list[Exception]()
        group: Any = self.engines
        self.recovery = EngineRecovery(
            group, start=self._start, join=self._join, fail=self.failed.append, min_engines=fewest
        )
        self.recovery.begin(allowed)
        self._failure = failure

    async def _start(self, rank: int) -> Any:
        await self.build.wait()
        await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure
        return f"new {rank}"

    async def _join(self, rank: int, new: Any) -> None:
        self.recovery.unverified.add(rank)
        self.engines.replace(rank, new)
        await self.check.wait()
        self.recovery.unverified.discard(rank)


@pytest.fixture(autouse=True)
def nothing_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(self: ActorGroup) -> None:
        pass

    monkeypatch.setattr(ActorGroup, "end", end)


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_rollout_stays_with_its_engine_while_that_can_sample_and_nothing_else_changes_by_it() -> None:
    async def scenario() -> None:
        world = World(3)
        choose = world.recovery.next_engine
        assert await choose([4, 9, 2], 1) == 1
        assert await choose([4, 9, 2]) == 2  # requests that prefer none go where the fewest are
        assert await choose([24, 56, 30], 1) == 1
        assert await choose([24, 57, 30], 1) == 0  # the queue would cost more than the prefix cache saves
        assert world.recovery.recover(1, LOST)
        assert await choose([4, 0, 2], 1) == 2
        world.build.set()
        while not world.recovery.unverified:
            await asyncio.sleep(0)
        assert await choose([4, 0, 2], 1) == 2  # it has not been compared yet
        world.check.set()
        while world.recovery.unverified:
            await asyncio.sleep(0)
        assert await choose([4, 9, 2], 1) == 1

    play(scenario)


def test_the_others_sample_while_a_lost_engine_is_replaced_and_the_new_one_only_after_it_was_compared() -> None:
    async def scenario() -> None:
        world = World(2)
        recovery, engines = world.recovery, world.engines
        assert await recovery.next_engine([0, 3]) == 0
        assert recovery.recover(0, LOST)
        assert recovery.recover(0, LOST)  # a second call on it fails too: the same loss
        assert await recovery.next_engine([0, 3]) == 1
        assert engines.present == ["old 1"]
        world.build.set()
        while not recovery.unverified:
            await asyncio.sleep(0)
        assert engines.present == ["new 0", "old 1"]  # it takes part in the transfer
        assert await recovery.next_engine([0, 3]) == 1
        world.check.set()
        while recovery.unverified:
            await asyncio.sleep(0)
        assert await recovery.next_engine([0, 3]) == 0

    play(scenario)


@pytest.mark.parametrize(("engines", "fewest"), [(1, 1), (2, 2)])
def test_sampling_waits_for_a_new_engine_where_too_few_are_left(engines: int, fewest: int) -> None:
    async def scenario() -> None:
        world = World(engines, fewest=fewest)
        assert world.recovery.recover(0, LOST)
        assert not world.recovery.has_enough()
        waiting = asyncio.ensure_future(world.recovery.next_engine([0] * engines))
        assert not (await asyncio.wait({waiting}, timeout=0.3))[0]
        world.build.set()
        while not world.recovery.has_enough():
            await asyncio.sleep(0)
        assert not waiting.done()
        world.check.set()
        assert await waiting == 0

    play(scenario)


def test_engines_lost_between_two_transfers_are_replaced_up_to_a_budget() -> None:
    async def scenario() -> None:
        world = World(4, allowed=2)
        assert [world.recovery.recover(rank, LOST) for rank in (0, 1, 2)] == [True, True, False]
        world.recovery.lost = 0
        assert world.recovery.recover(2, LOST)
        await world.recovery.close()

    play(scenario)


@pytest.mark.parametrize("failure", [LostError("no resources"), ClusterError("canary: engine 0 does not hold ...")])
def test_an_engine_that_cannot_be_replaced_ends_the_run_unless_enough_are_left_to_try_again(
    failure: ClusterError,
) -> None:
    async def scenario() -> None:
        for engines in (1, 2):
            world = World(engines, failure=failure)
            world.recovery.recover(0, LOST)
            world.build.set()
            for _ in range(9):
                await asyncio.sleep(0)
            tries_again = engines == 2 and isinstance(failure, LostError)
            assert world.failed == ([] if tries_again else [failure])
            await world.recovery.close()

    play(scenario)


def test_the_end_waits_for_no_transfer_that_a_new_engine_holds_up() -> None:
    async def scenario() -> None:
        world, weights, waiting = World(9, allowed=9), asyncio.Condition(), list[int]()

        async def join(rank: int, _: Any) -> None:
            async with weights:
                waiting.append(rank)
                if len(waiting) < 9:
                    await weights.wait()  # until the learners hold what the engines have
                await asyncio.Event().wait()  # the transfer of the last one is never answered

        world.recovery._join = join
        assert all(world.recovery.recover(rank, LOST) for rank in range(9))
        world.build.set()
        while len(waiting) < 9:
            await asyncio.sleep(0)
        await world.recovery.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
