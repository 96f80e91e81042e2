"""Engines that are lost and replaced, without the stack: which are listed when, and when the run is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.cluster.actors import ActorGroup, ClusterError, LostError, record_call
from rlhf.cluster.engine_choice import ListedEngines
from rlhf.cluster.engine_recovery import EngineRecovery

LOST = LostError("engine 0 is lost: it died.")


class FakeEngines:
    """A group of engines without actors; `health` is how the check of each one ends."""

    name = "engine"

    def __init__(self, count: int) -> None:
        self.actors = [f"old {rank}" for rank in range(count)]
        self.homes = {actor: f"home of {actor}" for actor in self.actors}
        self.absent: set[int] = set()
        self.health: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in self.actors]

    async def call_one(self, rank: int, ask: Callable[[Any], Any], **_: Any) -> None:
        assert record_call(ask) == ("check_health",)
        await asyncio.shield(self.health[rank])

    @property
    def present(self) -> list[str]:
        return [actor for rank, actor in enumerate(self.actors) if rank not in self.absent]

    def replace(self, rank: int, new: str) -> None:
        self.actors[rank] = new
        self.absent.discard(rank)


class World:
    """Fake engines, of which lost ones are replaced; a new one starts when `build` is set, and is compared at `check`.

    Attributes:
        failed: errors that end the run.
        number, listed: the newest list of engines.
        gave_up: errors after which no list follows.
    """

    def __init__(self, engines: int, *, fewest: int = 1, allowed: int = 2, failure: Exception | None = None) -> None:
        self.engines = FakeEngines(engines)
        self.build, self.check, self.failed = asyncio.Event(), asyncio.Event(), list[Exception]()
        self.number, self.listed, self.gave_up = 0, list[str](), list[str]()
        group: Any = self.engines
        self.recovery = EngineRecovery(
            group, start=self._start, join=self._join, fail=self.failed.append, background=asyncio.ensure_future,
            min_engines=fewest,
        )  # fmt: skip
        self.recovery.begin(allowed)
        self.recovery.subscribe(self)
        self._failure = failure

    def update(self, number: int, engines: ListedEngines, failure: str | None = None) -> None:
        assert number > self.number
        self.number, self.listed = number, [actor for actor, _ in engines.values()]
        self.gave_up += [failure] if failure else []

    async def _start(self, rank: int) -> Any:
        await self.build.wait()
        await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure
        return f"new {rank}"

    async def _join(self, rank: int, new: Any) -> None:
        self.engines.replace(rank, new)
        await self.check.wait()


@pytest.fixture(autouse=True)
def nothing_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(self: ActorGroup) -> None:
        pass

    monkeypatch.setattr(ActorGroup, "end", end)


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def a_while() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_others_sample_while_a_lost_engine_is_replaced_and_the_new_one_only_after_it_was_compared() -> None:
    async def scenario() -> None:
        world = World(2)
        recovery, engines = world.recovery, world.engines
        assert (world.number, world.listed) == (1, ["old 0", "old 1"])
        assert recovery.recover(0, LOST)
        assert recovery.recover(0, LOST)  # a second call on it fails too: the same loss
        assert (world.number, world.listed) == (2, ["old 1"])
        assert engines.present == ["old 1"]
        world.build.set()
        await until(lambda: len(engines.present) == 2)
        assert engines.present == ["new 0", "old 1"]  # it takes part in the transfer
        await a_while()
        assert world.number == 2
        world.check.set()
        await until(lambda: world.number > 2)
        assert (world.number, world.listed) == (3, ["new 0", "old 1"])

    play(scenario)


def test_a_new_engine_that_dies_while_it_is_compared_is_not_listed_but_replaced() -> None:
    async def scenario() -> None:
        world = World(2)
        assert world.recovery.recover(0, LOST)
        world.build.set()
        await until(lambda: len(world.engines.present) == 2)
        world.build.clear()
        assert world.recovery.recover(0, LOST)
        world.check.set()
        await a_while()
        assert world.listed == ["old 1"]
        world.build.set()
        await until(lambda: world.listed == ["new 0", "old 1"])

    play(scenario)


@pytest.mark.parametrize(("engines", "fewest"), [(1, 1), (2, 2)])
def test_no_engine_is_listed_while_too_few_are_left(engines: int, fewest: int) -> None:
    async def scenario() -> None:
        world = World(engines, fewest=fewest)
        assert world.recovery.recover(0, LOST)
        assert not world.recovery.has_enough()
        assert world.listed == []
        world.build.set()
        await until(world.recovery.has_enough)
        assert world.listed == []
        world.check.set()
        await until(lambda: len(world.listed) == engines)

    play(scenario)


def test_a_listener_hears_the_present_list_and_the_later_ones_until_it_leaves() -> None:
    async def scenario() -> None:
        world, heard = World(3), list[tuple[int, list[int]]]()
        assert world.recovery.recover(0, LOST)
        listener: Any = SimpleNamespace(update=lambda number, engines, _: heard.append((number, list(engines))))
        world.recovery.subscribe(listener)
        assert world.recovery.recover(2, LOST)
        world.recovery.unsubscribe(listener)
        world.build.set()
        world.check.set()
        await until(lambda: len(world.listed) == 3)
        assert heard == [(2, [1, 2]), (3, [1])]

    play(scenario)


# --- reports of failed requests ---


def test_a_request_that_failed_at_a_healthy_engine_is_made_again_once_between_two_transfers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scenario() -> None:
        world = World(2)
        world.engines.health[0].set_result(None)
        world.recovery.report(0, 1, "engine 0, sampling p failed.", False)
        await a_while()
        assert (world.number, world.listed) == (2, ["old 0", "old 1"])
        world.recovery.report(0, 1, "another request made before that", False)
        await a_while()
        assert world.number == 2
        world.recovery.begin_transfer()
        world.recovery.report(0, 2, "once after the transfer", False)
        await a_while()
        assert (world.number, world.listed) == (3, ["old 0", "old 1"])
        world.recovery.report(0, 3, "engine 0, sampling q failed.", False)
        await a_while()
        assert (world.number, world.listed) == (4, ["old 1"])

    play(scenario)
    output = " ".join(capsys.readouterr().out.split())
    assert "warning: engine 0, sampling p failed. The engine is healthy, so the request is made again." in output
    assert "made before" not in output
    assert "warning: engine 0, sampling q failed. It is replaced, and its prompts are sampled by" in output


def test_an_engine_that_is_dead_or_silent_is_replaced_at_the_first_report() -> None:
    async def scenario() -> None:
        world = World(3)
        world.engines.health[0].set_exception(LOST)
        world.engines.health[1].set_result(None)  # it answers this call, but no request
        for silent, engine in enumerate((0, 1)):
            for _ in range(3):
                world.recovery.report(engine, 1, "failed", bool(silent))
        await a_while()
        assert (world.number, world.listed) == (3, ["old 2"])

    play(scenario)


def test_an_unexpected_error_of_a_health_check_ends_the_run() -> None:
    async def scenario() -> None:
        world, error = World(2), ValueError("the answer cannot be read")
        world.engines.health[0].set_exception(error)
        world.recovery.report(0, 1, "failed", False)
        await a_while()
        assert world.failed == [error]

    play(scenario)


def test_a_report_about_an_engine_that_has_been_replaced_since_is_ignored() -> None:
    async def scenario() -> None:
        world = World(2)
        world.recovery.report(0, 1, "failed", False)  # its health is not known yet
        await a_while()
        world.build.set()
        world.check.set()
        assert world.recovery.recover(0, LOST)  # the watch is first
        world.recovery.report(0, 1, "failed", False)
        await until(lambda: world.listed == ["new 0", "old 1"])
        world.engines.health[0].set_exception(LOST)
        world.recovery.report(0, 1, "failed", True)
        world.recovery.report(0, 2, "failed", True)
        await a_while()
        assert world.listed == ["new 0", "old 1"]

    play(scenario)


def test_the_listeners_hear_the_error_of_one_engine_too_many() -> None:
    async def scenario() -> None:
        world = World(2, allowed=1)
        for engine in (0, 1):
            world.recovery.report(engine, 1, f"engine {engine} failed", True)
        await a_while()
        assert world.gave_up == ["engine 1 failed"]
        world.number = 0
        world.recovery.subscribe(world)  # a worker that was being built
        assert world.gave_up == ["engine 1 failed"] * 2
        assert world.listed == ["old 1"]

    play(scenario)


def test_engines_lost_between_two_transfers_are_replaced_up_to_a_budget() -> None:
    async def scenario() -> None:
        world = World(4, allowed=2)
        assert [world.recovery.recover(rank, LOST) for rank in (0, 1, 2)] == [True, True, False]
        world.recovery.begin_transfer()
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

    asyncio.run(asyncio.wait_for(scenario(), 60))
