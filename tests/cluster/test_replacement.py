"""Engines that are lost and replaced, without the stack: who samples when, and when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlhf.cluster.actors import ClusterError, LostError
from rlhf.cluster.replacement import Replacements

LOST = LostError("engine 0 is lost: it died.")


class FakeEngines:
    """A group of engines without actors."""

    def __init__(self, count: int) -> None:
        self.actors = [f"old {rank}" for rank in range(count)]
        self.absent: set[int] = set()

    @property
    def present(self) -> list[str]:
        return [actor for rank, actor in enumerate(self.actors) if rank not in self.absent]

    def replace(self, rank: int, new: str) -> None:
        self.actors[rank] = new


class World:
    """Replacements of fake engines; a new engine is built when `build` is set."""

    def __init__(self, engines: int, *, fewest: int = 1, allowed: int = 2, failure: Exception | None = None) -> None:
        self.engines = FakeEngines(engines)
        self.build, self.joined = asyncio.Event(), list[int]()
        group: Any = self.engines
        self.replacements = Replacements(
            group,
            start=self._start,
            join=self._join,
            fewest=fewest,
            allowed=allowed,
        )
        self._failure = failure

    async def _start(self, rank: int) -> Any:
        await self.build.wait()
        if self._failure is not None:
            raise self._failure
        return f"new {rank}"

    async def _join(self, rank: int) -> None:
        self.joined.append(rank)


@pytest.fixture(autouse=True)
def nothing_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(self: Replacements, actor: Any) -> None:
        pass

    monkeypatch.setattr(Replacements, "_end", end)


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_others_sample_while_a_lost_engine_is_replaced_and_a_new_one_only_with_the_current_weights() -> None:
    async def scenario() -> None:
        world = World(2)
        replacements, engines = world.replacements, world.engines
        assert await replacements.next_engine([0, 3]) == 0
        assert replacements.take_over(0, LOST)
        assert replacements.take_over(0, LOST)  # a second call on it fails too: the same loss
        assert await replacements.next_engine([0, 3]) == 1
        world.build.set()
        while not world.joined:
            await asyncio.sleep(0)
        assert engines.present == ["old 1"]
        admitted = replacements.admit()
        assert engines.present == ["new 0", "old 1"]  # it takes part in the transfer
        assert await replacements.next_engine([0, 3]) == 1
        replacements.send_back(admitted)
        assert engines.present == ["old 1"]
        replacements.admit()
        replacements.ready()
        assert await replacements.next_engine([0, 3]) == 0

    play(scenario)


def test_a_rollout_stays_with_its_engine_while_that_can_sample_and_nothing_else_changes_by_it() -> None:
    async def scenario() -> None:
        world = World(3)
        choose = world.replacements.next_engine
        assert await choose([4, 9, 2], 1) == 1
        assert await choose([4, 9, 2]) == 2  # requests that prefer none go where the fewest are
        assert world.replacements.take_over(1, LOST)
        assert await choose([4, 0, 2], 1) == 2
        world.build.set()
        while not world.joined:
            await asyncio.sleep(0)
        world.replacements.admit()
        assert await choose([4, 0, 2], 1) == 2  # it has not the current weights yet
        world.replacements.ready()
        assert await choose([4, 9, 2], 1) == 1

    play(scenario)


@pytest.mark.parametrize(("engines", "fewest"), [(1, 1), (2, 2)])
def test_sampling_and_transfers_wait_for_a_replacement_where_too_few_are_left(engines: int, fewest: int) -> None:
    async def scenario() -> None:
        world = World(engines, fewest=fewest)
        assert world.replacements.take_over(0, LOST)
        waiting = [
            asyncio.ensure_future(world.replacements.next_engine([0] * engines)),
            asyncio.ensure_future(world.replacements.enough()),
        ]
        assert not (await asyncio.wait(waiting, timeout=0.3))[0]
        world.build.set()
        await waiting[1]  # a transfer can go on, and brings the new engine in
        world.replacements.admit()
        assert not waiting[0].done()
        world.replacements.ready()
        assert await waiting[0] == 0

    play(scenario)


def test_engines_lost_between_two_transfers_are_replaced_up_to_a_budget() -> None:
    async def scenario() -> None:
        world = World(4, allowed=2)
        assert [world.replacements.take_over(rank, LOST) for rank in (0, 1, 2)] == [True, True, False]
        await world.replacements.enough()
        assert world.replacements.take_over(2, LOST)
        await world.replacements.close(kill=True)

    play(scenario)


@pytest.mark.parametrize("failure", [LostError("no resources"), ClusterError("canary: engine 0 has joined and ...")])
def test_a_replacement_that_fails_is_raised_where_somebody_waits(failure: ClusterError) -> None:
    async def scenario() -> None:
        world = World(1, failure=failure)
        world.build.set()
        world.replacements.take_over(0, LOST)
        with pytest.raises(ClusterError, match=str(failure)[:10]):
            await world.replacements.next_engine([0])

    play(scenario)


def test_a_call_on_an_engine_that_a_failed_replacement_left_paused_ends_with_that_failure() -> None:
    async def scenario() -> None:
        world = World(2, failure=ClusterError("the node of engine 0 is gone"))
        assert await world.replacements.unless_failed(asyncio.sleep(0, "sampled")) == "sampled"
        assert world.replacements.take_over(0, LOST)
        sampling = asyncio.ensure_future(world.replacements.unless_failed(asyncio.Event().wait()))
        await asyncio.sleep(0)
        assert not sampling.done()
        world.build.set()
        with pytest.raises(ClusterError, match="the node of engine 0 is gone"):
            await sampling

    play(scenario)
