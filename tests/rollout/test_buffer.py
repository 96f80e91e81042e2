"""The buffer between engines and learners: the oldest groups first, none too old, and an account that adds up."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import WAIT_S
from worlds import make_config, rollout_of

from rlhf.rollout.buffer import RolloutBuffer, Staleness, Ticket, groups_at_engines
from rlhf.step.batch import make_batch
from rlhf.types import Prompt, RolloutGroup, ScoredRollout, VersionSpan

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


def group(prompt: Prompt, version: int, rewards: tuple[float, ...] = (1.0, 1.0)) -> RolloutGroup:
    rollouts = [
        rollout_of([1, 2], [0, 1], None, (VersionSpan(1, 2, version),), prompt_id=prompt.id, sample=i)
        for i in range(SAMPLES)
    ]
    graded = zip(rollouts, rewards, strict=True)
    return RolloutGroup(prompt, tuple(ScoredRollout(r, "", "", reward, {}, "ok") for r, reward in graded))


def tickets() -> Iterator[Ticket]:
    position = 0
    while True:
        yield Ticket(position, Prompt(f"p{position}", 0, np.array([1]), (), "", "s"))
        position += 1


def make(
    engines: Engines | Clockwork, *, lag: int, groups: int = 2, steps: int = 100, drop: bool = False, **options: Any
) -> RolloutBuffer:
    stream, staleness = tickets(), Staleness(lag, "drop" if drop else "wait")
    return RolloutBuffer(
        engines.sample, lambda: next(stream), groups_per_step=groups, total_steps=steps, staleness=staleness, **options
    )


def consume(buffer: RolloutBuffer, groups: list[RolloutGroup]) -> None:
    buffer.count(groups, make_batch(groups, mask_truncated=False))


class Clockwork:
    """Engines whose groups end at their times; time goes on only where nothing else can."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.version, self.now, self.seconds = 0, 0.0, seconds
        self._ends: list[tuple[float, int, asyncio.Event]] = []

    async def sample(self, prompt: Prompt) -> RolloutGroup:
        position, version = int(prompt.id.removeprefix("p")), self.version
        ended = asyncio.Event()
        heapq.heappush(self._ends, (self.now + self.seconds(position), position, ended))
        await ended.wait()
        return group(prompt, version, rewards=(0.0, float(position % 3 > 0)))

    async def until(self, time: float) -> None:
        """Let groups end up to this time."""
        while self._ends and self._ends[0][0] <= time:
            self.now, _, ended = heapq.heappop(self._ends)
            ended.set()
            await settle()
        self.now = max(self.now, time)

    def stand_still(self, seconds: float) -> None:
        """Nothing goes on, as in engines that sleep."""
        self.now += seconds
        self._ends = [(end + seconds, position, ended) for end, position, ended in self._ends]

    async def done(self, awaitable: Awaitable[list[RolloutGroup]]) -> list[RolloutGroup]:
        task = asyncio.ensure_future(awaitable)
        await settle()
        while not task.done():
            assert self._ends, "the buffer waits, and nothing is running"
            await self.until(self._ends[0][0])
        return task.result()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def train(engines: Clockwork, buffer: RolloutBuffer, steps: int, *, in_turns: bool = False) -> list[list[int]]:
    """Train these steps, each of 1 second; positions of the prompts of each. `in_turns`: engines sleep meanwhile."""
    taken = []
    for step in range(steps):
        groups = await engines.done(buffer.take())
        taken.append([int(g.prompt.id.removeprefix("p")) for g in groups])
        consume(buffer, groups)
        if in_turns:
            engines.stand_still(1.0)
        else:
            await engines.until(engines.now + 1.0)
        engines.version = step + 1
        buffer.begin_next_step()
        buffer.account_metrics()  # raises if it does not add up
    return taken


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
        assert buffer.account_metrics()["account/trained"] == 3 * 2 * SAMPLES

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
            await settle()
            metrics = buffer.account_metrics()
            assert (metrics["account/trained"], metrics["account/waiting"]) == (
                2 * SAMPLES * (step + 1),
                2 * SAMPLES * (lag + 1),
            )

    asyncio.run(run())


@pytest.mark.parametrize("slow_s", [3, 6])
@pytest.mark.parametrize("lag", [1, 2, 4])
@pytest.mark.parametrize("in_turns", [False, True])
def test_every_prompt_is_trained_in_time_however_slow_it_is(lag: int, slow_s: int, in_turns: bool) -> None:
    """A quarter of the prompts takes 3 or 6 steps: their share among the trained is their share among the drawn."""

    async def run() -> None:
        engines = Clockwork(lambda position: slow_s if position % 4 == 0 else 1)
        buffer = make(engines, lag=lag, groups=8, steps=20)
        taken = await train(engines, buffer, 20, in_turns=in_turns)
        assert sorted(chain(*taken)) == list(range(8 * 20))
        assert all(len(positions) == 8 for positions in taken)
        for step in range(lag, 20):  # a prompt is drawn at most `lag` steps before it is trained
            assert set(range(8 * (step + 1 - lag))) <= set(chain(*taken[: step + 1]))
        assert (buffer.account.stale, buffer.waiting) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(8))
def test_with_times_of_any_length_and_groups_that_are_replaced_no_group_is_ever_too_old(seed: int) -> None:
    async def run() -> None:
        rng = np.random.default_rng(seed)
        lag, groups = int(rng.integers(0, 5)), int(rng.integers(1, 6))
        times = rng.lognormal(0.0, 1.5, 2000)
        engines = Clockwork(lambda position: float(times[position]))
        buffer = make(engines, lag=lag, groups=groups, steps=30, max_replacements=int(rng.integers(0, 4)))
        taken = await train(engines, buffer, 30)  # `take` itself asserts that no group is too old
        assert len(set(chain(*taken))) == 30 * groups
        assert (buffer.account.stale, buffer.waiting) == (0, 0)

    asyncio.run(run())


def test_a_step_waits_for_more_slow_groups_than_one_later_step_could_train() -> None:
    """Lag 2, one group per step: p0, p1 and p2 begin at version 0, so step 1 must train one of the slow p1 and p2."""

    async def run() -> None:
        engines = Clockwork(lambda position: 10.0 if position in (1, 2) else 0.5)
        buffer = make(engines, lag=2, groups=1, steps=9)
        assert (await train(engines, buffer, 3)) == [[0], [1], [2]]
        assert buffer.slow_wait_s > 0  # p3 was ready long before
        await buffer.close()

    asyncio.run(run())


def test_a_wait_names_what_it_waits_for_and_ends_at_its_deadline() -> None:
    async def run() -> None:
        engines = Engines()
        engines.gates["p1"] = asyncio.Event()
        buffer = make(engines, lag=1, deadline_s=0.05)
        consume(buffer, await buffer.take())
        buffer.begin_next_step()
        with pytest.raises(TimeoutError, match=r"\b0\.05 s\b.*Step 2 .*1 of 1 .*\bp1\b"):
            await buffer.take()
        await buffer.close()

    asyncio.run(run())


def test_a_group_whose_sampling_is_cancelled_from_elsewhere_ends_the_wait() -> None:
    async def run() -> None:
        async def cancelled(prompt: Prompt) -> RolloutGroup:
            raise asyncio.CancelledError

        engines = Engines()
        engines.sample = cancelled  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"\bp0\b"):
            await asyncio.wait_for(make(engines, lag=0).take(), WAIT_S)

    asyncio.run(run())


def test_the_account_counts_unscorable_masked_and_trained_rollouts_of_a_step_each_by_itself() -> None:
    async def run() -> None:
        buffer = make(Engines(), lag=1)
        first, second = await buffer.take()
        cut = replace(first.samples[0], rollout=replace(first.samples[0].rollout, finish_reason="length"))
        unscorable = replace(second.samples[0], reward=None)
        changed = [
            replace(first, samples=(cut, first.samples[1])),
            replace(second, samples=(unscorable, second.samples[1])),
        ]
        buffer.count(changed, make_batch(changed, mask_truncated=True))
        account = buffer.account
        assert (account.trained, account.filtered, account.failed, account.stale) == (2, 1, 1, 0)
        assert buffer.account_metrics()["account/waiting"] == 2 * SAMPLES
        await buffer.close()

    asyncio.run(run())


def test_a_rollout_that_is_lost_is_noticed() -> None:
    async def run() -> None:
        buffer = make(Engines(), lag=1)
        taken = await buffer.take()
        buffer.account.sampled += SAMPLES  # of a group that neither waits nor is taken
        with pytest.raises(AssertionError, match="does not add up"):
            buffer.account_metrics()
        with pytest.raises(AssertionError, match="holds what `take` gave"):
            consume(buffer, taken[:1])
        await buffer.close()

    asyncio.run(run())


# --- on_stale=drop ---


def test_a_group_that_has_become_too_old_is_dropped_counted_and_replaced() -> None:
    async def run() -> None:
        engines = Engines()
        engines.gates["p1"] = asyncio.Event()  # dispatched at version 0, finished only when version 2 trains
        buffer = make(engines, lag=1, drop=True)
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
        assert buffer.account_metrics()["account/stale"] == SAMPLES

    asyncio.run(run())


def test_a_stale_group_of_the_last_step_is_replaced_too() -> None:
    async def run() -> None:
        engines = Engines()
        engines.gates["p1"] = asyncio.Event()
        buffer = make(engines, lag=1, steps=3, drop=True)
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
        assert buffer.account_metrics()["account/waiting"] == 0

    asyncio.run(run())


# --- the rest ---


@pytest.mark.parametrize("max_running", [1, 2, 5])
def test_never_more_groups_are_with_the_engines_than_given_and_every_step_gets_its_groups(max_running: int) -> None:
    async def run() -> None:
        engines = Clockwork(lambda position: 1 + position % 3)
        buffer = make(engines, lag=2, groups=4, steps=6, max_running=max_running)
        most = 0

        async def sample(prompt: Prompt) -> RolloutGroup:
            nonlocal most
            most = max(most, len(buffer.outstanding()) - buffer.waiting // SAMPLES)
            return await Clockwork.sample(engines, prompt)

        buffer.sample = sample
        assert sorted(chain(*await train(engines, buffer, 6))) == list(range(24))
        assert most == max_running

    asyncio.run(run())


@pytest.mark.parametrize(("cached", "groups"), [(None, 24), (1000.0, 24), (70.0, 17), (9.0, 4)])
def test_on_shared_gpus_no_more_groups_begin_than_the_caches_hold_and_at_least_those_of_a_step(
    cached: float | None, groups: int, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "model", rollout={"max_concurrent_sequences": 32, "prompts_per_step": 4})
    assert groups_at_engines(config, cached) == groups


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
        assert buffer.waiting == 0

    asyncio.run(run())


def test_a_dispatched_prompt_is_outstanding_until_its_group_is_taken() -> None:
    async def run() -> None:
        engines = Engines()
        engines.gates["p3"] = asyncio.Event()
        buffer = make(engines, lag=1)
        await buffer.take()
        assert sorted(ticket.position for ticket in buffer.outstanding()) == [2, 3]
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
