"""The buffer between engines and learners: one staleness rule, whole groups, and an account that always adds up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from waiting import WAIT_S

from rlhf.rollout.buffer import RolloutBuffer, Staleness, Ticket
from rlhf.types import Prompt, Rollout, RolloutGroup, ScoredRollout, VersionSpan

SAMPLES = 2


class Engines:
    """Samples with the current version, at once or when a test says so."""

    def __init__(self) -> None:
        self.version = 0
        self.gates: dict[str, asyncio.Event] = {}
        self.order: list[str] = []

    async def sample(self, prompt: Prompt) -> RolloutGroup:
        version = self.version
        self.order.append(prompt.id)
        if prompt.id in self.gates:
            await self.gates[prompt.id].wait()
        return group(prompt, version)


def group(prompt: Prompt, version: int) -> RolloutGroup:
    rollouts = [
        Rollout(prompt.id, 0, i, np.array([1, 2]), np.array([False, True]), np.zeros(2, np.float32),
                (VersionSpan(1, 2, version),), "stop")
        for i in range(SAMPLES)
    ]  # fmt: skip
    return RolloutGroup(prompt, tuple(ScoredRollout(r, "", "", 1.0, {}, "ok") for r in rollouts))


def tickets() -> Iterator[Ticket]:
    position = 0
    while True:
        yield Ticket(position, Prompt(f"p{position}", 0, np.array([1]), (), "", "s"))
        position += 1


def make(engines: Engines, *, lag: int, groups: int = 2, steps: int = 100) -> RolloutBuffer:
    stream = tickets()
    return RolloutBuffer(
        engines.sample, lambda: next(stream), groups_per_step=groups, total_steps=steps, staleness=Staleness(lag)
    )


def consume(buffer: RolloutBuffer, groups: list[RolloutGroup]) -> None:
    buffer.account.trained += sum(len(g.samples) for g in groups)


def balanced(buffer: RolloutBuffer) -> bool:
    a = buffer.account
    return a.waiting >= 0 and a.sampled == a.trained + a.filtered + a.stale + a.failed + a.waiting


def test_with_lag_0_only_the_groups_of_the_current_step_are_sampled() -> None:
    async def run() -> None:
        engines = Engines()
        buffer = make(engines, lag=0)
        for step in range(3):
            taken = await buffer.take()
            assert [g.prompt.id for g in taken] == [f"p{2 * step}", f"p{2 * step + 1}"]
            assert len(engines.order) == 2 * (step + 1)
            assert all(g.oldest_version == step for g in taken)
            consume(buffer, taken)
            engines.version = step + 1
            buffer.begin_next_step()
        assert balanced(buffer)

    asyncio.run(run())


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_with_a_lag_engines_run_ahead_by_so_many_steps_and_no_more(lag: int) -> None:
    async def run() -> None:
        engines = Engines()
        buffer = make(engines, lag=lag)
        for step in range(8):
            taken = await buffer.take()
            await asyncio.sleep(0)
            assert len(engines.order) == 2 * (step + 1 + lag)
            assert all(step - g.oldest_version <= lag for g in taken)
            consume(buffer, taken)
            engines.version = step + 1
            buffer.begin_next_step()
            assert balanced(buffer)

    asyncio.run(run())


def test_a_group_that_has_become_too_old_is_dropped_counted_and_replaced() -> None:
    async def run() -> None:
        engines = Engines()
        engines.gates["p1"] = asyncio.Event()  # dispatched at version 0, finished only when version 2 trains
        buffer = make(engines, lag=1)
        for step in range(2):
            taken = await buffer.take()
            assert "p1" not in [g.prompt.id for g in taken]
            consume(buffer, taken)
            engines.version = step + 1
            buffer.begin_next_step()
        engines.gates["p1"].set()
        for _ in range(3):
            await asyncio.sleep(0)
        taken = await buffer.take()
        assert all(2 - g.oldest_version <= 1 for g in taken)
        assert buffer.account.stale == SAMPLES
        consume(buffer, taken)
        assert balanced(buffer)

    asyncio.run(run())


def test_a_stale_group_of_the_last_step_is_replaced_too() -> None:
    async def run() -> None:
        engines = Engines()
        engines.gates["p1"] = asyncio.Event()
        buffer = make(engines, lag=1, steps=3)
        for step in range(2):
            consume(buffer, await buffer.take())
            engines.version = step + 1
            buffer.begin_next_step()
        waiting = asyncio.ensure_future(buffer.take())
        await asyncio.sleep(0.01)
        assert not waiting.done()  # all that is left to come is p1, which is of version 0
        engines.gates["p1"].set()
        taken = await asyncio.wait_for(waiting, WAIT_S)
        assert all(2 - g.oldest_version <= 1 for g in taken)
        assert buffer.account.stale == SAMPLES
        consume(buffer, taken)
        assert balanced(buffer)
        assert buffer.account.waiting == 0

    asyncio.run(run())


def test_no_group_is_sampled_beyond_the_last_step() -> None:
    async def run() -> None:
        engines = Engines()
        buffer = make(engines, lag=4, steps=3)
        for step in range(3):
            consume(buffer, await buffer.take())
            engines.version = step + 1
            buffer.begin_next_step()
        await asyncio.sleep(0)
        assert len(engines.order) == 6
        assert buffer.account.waiting == 0

    asyncio.run(run())


def test_a_dispatched_prompt_is_outstanding_until_its_group_is_taken() -> None:
    async def run() -> None:
        engines = Engines()
        engines.gates["p3"] = asyncio.Event()
        buffer = make(engines, lag=1)
        await buffer.take()
        assert buffer.outstanding() == [2, 3]
        await buffer.close()

    asyncio.run(run())


def test_a_failed_sample_ends_the_wait_with_its_own_error() -> None:
    async def fail(prompt: Prompt) -> RolloutGroup:
        raise RuntimeError(f"engine 0 died while sampling {prompt.id}")

    async def run() -> None:
        stream = tickets()
        buffer = RolloutBuffer(fail, lambda: next(stream), groups_per_step=1, total_steps=1, staleness=Staleness(0))
        with pytest.raises(RuntimeError, match="engine 0 died while sampling p0"):
            await asyncio.wait_for(buffer.take(), WAIT_S)

    asyncio.run(run())
