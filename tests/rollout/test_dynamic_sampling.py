"""Groups of equal rewards are replaced before a step, up to a bound, and the account still adds up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from waiting import WAIT_S
from worlds import rollout_of

from rlhf.rollout.buffer import RolloutBuffer, Staleness, Ticket
from rlhf.step.batch import make_batch
from rlhf.types import Prompt, RolloutGroup, ScoredRollout, VersionSpan


def group(prompt: Prompt, rewards: tuple[float | None, ...], version: int) -> RolloutGroup:
    samples = []
    for sample, reward in enumerate(rewards):
        rollout = rollout_of([1, 2], [0, 1], None, (VersionSpan(1, 2, version),), prompt_id=prompt.id, sample=sample)
        samples.append(ScoredRollout(rollout, "", "", reward, {}, "ok"))
    return RolloutGroup(prompt, tuple(samples))


class Task:
    """Every prompt whose number is in `differing` gets rewards of 0 and 1, all others twice the same."""

    def __init__(self, differing: set[int], equal: tuple[float | None, ...] = (1.0, 1.0)) -> None:
        self.differing = differing
        self.equal = equal
        self.version = 0
        self.drawn = 0

    async def sample(self, prompt: Prompt) -> RolloutGroup:
        number = int(prompt.id)
        return group(prompt, (0.0, 1.0) if number in self.differing else self.equal, self.version)

    def tickets(self) -> Iterator[Ticket]:
        while True:
            yield Ticket(self.drawn, Prompt(str(self.drawn), 0, np.array([1]), (), "", "s"))
            self.drawn += 1


def make(task: Task, *, max_replacements: int, lag: int = 0) -> RolloutBuffer:
    stream = task.tickets()
    return RolloutBuffer(
        task.sample, lambda: next(stream), groups_per_step=2, total_steps=10, staleness=Staleness(lag),
        max_replacements=max_replacements,
    )  # fmt: skip


def book(buffer: RolloutBuffer, taken: list[RolloutGroup]) -> None:
    """Count a step; raises if the account does not add up."""
    buffer.count(taken, make_batch(taken, mask_truncated=False))
    buffer.account_metrics()


def test_groups_of_equal_rewards_are_replaced_by_the_next_prompts_and_counted_as_filtered() -> None:
    async def run() -> None:
        task = Task(differing={3, 5, 6, 7})
        buffer = make(task, max_replacements=64)
        taken = await asyncio.wait_for(buffer.take(), WAIT_S)
        assert [g.prompt.id for g in taken] == ["3", "5"]
        assert buffer.account.filtered == 2 * 4
        book(buffer, taken)
        buffer.account_metrics()
        task.version = 1
        buffer.begin_next_step()
        assert [g.prompt.id for g in await asyncio.wait_for(buffer.take(), WAIT_S)] == ["6", "7"]
        await buffer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("equal", "max_replacements", "taken"),
    [((0.1 + 0.2, 0.3), 64, ["1", "2"]), ((None, None), 8, ["1", "2"]), ((1.0, 1.0), 0, ["0", "1"])],
    ids=["equal but for rounding", "unscorable", "without replacements"],
)
def test_groups_whose_rewards_do_not_differ_are_replaced_if_replacements_are_left(
    equal: tuple[float | None, ...], max_replacements: int, taken: list[str]
) -> None:
    async def run() -> None:
        buffer = make(Task(differing={1, 2}, equal=equal), max_replacements=max_replacements)
        assert [g.prompt.id for g in await asyncio.wait_for(buffer.take(), WAIT_S)] == taken
        await buffer.close()

    asyncio.run(run())


def test_after_the_last_replacement_equal_groups_train_and_the_next_step_may_replace_again() -> None:
    async def run() -> None:
        task = Task(differing=set())
        buffer = make(task, max_replacements=3)
        for step in range(3):
            taken = await asyncio.wait_for(buffer.take(), WAIT_S)
            assert len(taken) == 2
            assert buffer.account.filtered == 2 * 3 * (step + 1)
            book(buffer, taken)
            buffer.account_metrics()
            task.version = step + 1
            buffer.begin_next_step()
        await buffer.close()

    asyncio.run(run())


def test_one_part_of_the_reward_can_decide_alone() -> None:
    """DAPO: a group that is all wrong is replaced although its length penalties differ."""

    async def run(part: str | None) -> list[str]:
        wrong, mixed = ((0.0, -0.5), (0.0, 0.0)), ((0.0, 1.0), (0.0, 1.0))  # rewards, and their math parts

        async def sample(prompt: Prompt) -> RolloutGroup:
            rewards, right = wrong if int(prompt.id) < 2 else mixed
            graded = group(prompt, rewards, 0).samples
            samples = [replace(s, reward_parts={"math": m}) for s, m in zip(graded, right, strict=True)]
            return RolloutGroup(prompt, tuple(samples))

        tickets = Task(differing=set()).tickets()
        buffer = RolloutBuffer(
            sample, lambda: next(tickets), groups_per_step=2, total_steps=1, staleness=Staleness(0),
            max_replacements=8, deciding_part=part,
        )  # fmt: skip
        taken = await asyncio.wait_for(buffer.take(), WAIT_S)
        await buffer.close()
        return [g.prompt.id for g in taken]

    assert asyncio.run(run(None)) == ["0", "1"]
    assert asyncio.run(run("math")) == ["2", "3"]


def test_with_a_lag_replacements_keep_to_the_staleness_rule() -> None:
    async def run() -> None:
        task = Task(differing=set(range(0, 100, 3)))
        buffer = make(task, max_replacements=64, lag=1)
        for step in range(5):
            taken = await asyncio.wait_for(buffer.take(), WAIT_S)
            assert all(int(g.prompt.id) % 3 == 0 and step - g.oldest_version <= 1 for g in taken)
            book(buffer, taken)
            task.version = step + 1
            buffer.begin_next_step()
            buffer.account_metrics()
        await buffer.close()

    asyncio.run(run())


def test_in_order_the_groups_that_are_replaced_do_not_depend_on_which_arrive_first() -> None:
    class InTurn(Task):
        """Prompts are answered in `order`."""

        def __init__(self, order: tuple[int, ...]) -> None:
            super().__init__(differing={1, 4})
            self.order = order

        async def sample(self, prompt: Prompt) -> RolloutGroup:
            for _ in range(self.order.index(int(prompt.id))):
                await asyncio.sleep(0)
            return await super().sample(prompt)

    async def taken(order: tuple[int, ...], in_order: bool) -> list[str]:
        task = InTurn(order)
        stream = task.tickets()
        buffer = RolloutBuffer(
            task.sample, lambda: next(stream), groups_per_step=4, total_steps=1, staleness=Staleness(0),
            max_replacements=2, in_order=in_order,
        )  # fmt: skip
        groups = await asyncio.wait_for(buffer.take(), WAIT_S)
        assert (buffer.account.filtered, buffer.waiting) == (4, 8)
        return [group.prompt.id for group in groups]

    orders = ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (3, 0, 1, 2, 5, 4))
    assert [asyncio.run(taken(order, True)) for order in orders] == [["1", "3", "4", "5"]] * 3
    assert len({tuple(asyncio.run(taken(order, False))) for order in orders}) > 1  # the first to arrive are replaced
