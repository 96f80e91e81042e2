"""Groups between the engines and the learners: dispatch, staleness, and the account of every rollout.

The staleness rule: training step s (counted from 0, with weights of version s) takes a group only if
s - (version of the group's oldest token) <= max_policy_lag. Dispatch follows the same rule: no more groups are in
progress than the steps up to s + max_policy_lag can take. With a lag of 0 these are exactly the groups of the
current step, and the loop is synchronous.

With on_stale=wait no group is discarded for its age: a step takes the oldest groups first, and waits for running groups
that later steps could not all take in time. Discarding slow groups would remove long and hard prompts from the data.

The account, in rollouts: sampled = trained + filtered + stale + failed + waiting, whenever no step is in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from rlhf.config.grpo import GRPOConfig
from rlhf.types import Prompt, RolloutGroup, StepBatch, rewards_differ

# An engine gets as many groups as fit in so many of its batches. The samples of a group end at different times, so on
# average a group fills less than its size; with 3, log-normal lengths keep the batch full (benchmarks/simulator.py).
BATCHES_AT_ENGINE = 3
SHOWN_PROMPTS = 3  # named in a message about waiting


def groups_at_engines(config: GRPOConfig) -> int:
    """The number of groups that keeps the batches of all engines full, with some to spare."""
    groups = config.cluster.engines * config.rollout.max_concurrent_sequences / config.rollout.samples_per_prompt
    return math.ceil(BATCHES_AT_ENGINE * groups)


@dataclass
class Account:
    """Numbers of rollouts since the run began, by use."""

    sampled: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0

    def add_step(self, batch: StepBatch) -> None:
        """Count the rollouts of a training step: unscorable as failed, masked as filtered, all others as trained."""
        failed = np.isnan(batch.rewards)
        self.failed += int(failed.sum())
        self.filtered += int((~failed & ~batch.trained).sum())
        self.trained += int(batch.trained.sum())


@dataclass(frozen=True)
class Staleness:
    """Train a group at step s only if s - (version of its oldest token) <= max_policy_lag."""

    max_policy_lag: int
    on_stale: Literal["wait", "drop"] = "wait"  # wait for groups before they become too old, or drop them afterwards

    def admits(self, oldest_version: int, *, step: int) -> bool:
        return step - oldest_version <= self.max_policy_lag

    def groups_ahead(self, *, step: int, groups_per_step: int) -> int:
        """The total number of groups that may be dispatched before training step `step` begins."""
        return (step + 1 + self.max_policy_lag) * groups_per_step

    def must_wait(
        self, ready: Mapping[int, int], running: Mapping[int, int], *, step: int, groups_per_step: int
    ) -> bool:
        """Whether training step `step`, which takes the oldest ready groups, has to wait for running groups.

        It waits while too few groups are ready, and (on_stale=wait) while the groups left over could not all be trained
        in time: of the groups that expire after step t, at most (t - step) x groups_per_step may be left. Dispatch
        keeps to `groups_ahead`, so waiting always ends.

        Args:
            ready: number of groups by the version of their oldest token.
            running: number of groups by the version at which they were dispatched.
        """
        to_take, left = groups_per_step, 0
        for version in sorted({*ready, *running}):
            taken = min(to_take, ready.get(version, 0))
            to_take -= taken
            left += ready.get(version, 0) + running.get(version, 0) - taken
            steps_left = version + self.max_policy_lag - step
            if self.on_stale == "wait" and left > max(0, steps_left) * groups_per_step:
                return True
        return to_take > 0


@dataclass(frozen=True)
class Ticket:
    """A dispatched prompt; `position` is its index in the prompt stream, from which a resumed run draws it again."""

    position: int
    prompt: Prompt


class RolloutBuffer:
    """Keeps engines busy in the background and gives whole groups to the loop.

    Args:
        sample: one prompt -> its graded group.
        next_ticket: draws the next prompt of the stream.
        total_steps: training steps of the run; no group is dispatched beyond them.
        ended: is called with each group as it ends, before any further prompt is drawn.
        replacements: groups that were already replaced for the current step before the run was resumed.
        max_replacements: maximum number of groups with equal rewards that are filtered and replaced by groups of other
            prompts before each training step; further ones are trained. (DAPO, arXiv:2503.14476, sec. 3.2.)
        deciding_part: the part of the reward that must differ within a group; None: the whole reward.
        in_order: replace groups only when all have arrived, in the order of their prompts. Otherwise the groups that
            arrive first would use up `max_replacements`.
        max_running: maximum number of groups at the engines; None: no limit. A group that waits in an engine's queue
            already has its version of dispatch, so steps would wait for it too early.
        deadline_s: seconds that `take` waits for the next group to end.

    Attributes:
        slow_wait_s: seconds, since last reset to 0, in which `take` had enough groups and waited for older ones.
    """

    def __init__(
        self,
        sample: Callable[[Prompt], Awaitable[RolloutGroup]],
        next_ticket: Callable[[], Ticket],
        *,
        groups_per_step: int,
        total_steps: int,
        staleness: Staleness,
        ended: Callable[[Ticket, RolloutGroup], None] = lambda *_: None,
        step: int = 0,
        account: Account | None = None,
        replacements: int = 0,
        max_replacements: int = 0,
        deciding_part: str | None = None,
        in_order: bool = False,
        max_running: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.account = account or Account()
        self.slow_wait_s = 0.0
        self._sample, self._next_ticket, self._ended = sample, next_ticket, ended
        self._groups_per_step = groups_per_step
        self._total_groups = total_steps * groups_per_step
        self._staleness = staleness
        self._step = step
        self._dispatched = step * groups_per_step
        self._running: dict[asyncio.Task[None], tuple[Ticket, int]] = {}  # and the version at dispatch
        self._ready: list[tuple[Ticket, RolloutGroup]] = []  # in the order of their positions
        self._rollouts_taken = 0  # by the current training step
        self._failure: Exception | None = None
        self.replacements, self._max_replacements = replacements, max_replacements
        self._deciding_part, self._in_order = deciding_part, in_order
        self._max_running = max_running or self._total_groups
        self._deadline_s = deadline_s
        self._changed = asyncio.Event()

    def dispatch(self) -> None:
        """Start as many groups as the staleness rule and `max_running` allow."""
        ahead = self._staleness.groups_ahead(step=self._step, groups_per_step=self._groups_per_step)
        allowed = min(ahead, self._total_groups)
        while self._dispatched < allowed and len(self._running) < self._max_running and self._failure is None:
            self._dispatched += 1
            ticket = self._next_ticket()
            self._running[asyncio.ensure_future(self._run(ticket))] = ticket, self._step

    async def _run(self, ticket: Ticket) -> None:
        task = asyncio.current_task()
        assert task is not None
        group: RolloutGroup | None = None
        try:
            group = await self._sample(ticket.prompt)
        except Exception as error:
            self._failure = self._failure or error  # the first one; `take` raises it
        except asyncio.CancelledError:  # by `close`, or because a task that the group waited for was cancelled
            cancelled = RuntimeError(f"the sampling of prompt {ticket.prompt.id} was cancelled.")
            self._failure = self._failure or cancelled
        del self._running[task]  # before waiters wake up, so that no group counts as both running and ready
        if group is not None:
            self.account.sampled += len(group.samples)
            self._ended(ticket, group)
            self._ready.append((ticket, group))
            self._ready.sort(key=lambda pair: pair[0].position)
            self.dispatch()
            if not self._in_order:
                self._replace_equal({ticket.position})
            elif not self._running:
                self._replace_equal({ticket.position for ticket, _ in self._ready})
        self._changed.set()

    def _replace_equal(self, positions: Set[int]) -> None:
        """Filter groups at these positions whose rewards are all equal, up to the limit, and dispatch others."""

        def is_replaced(ticket: Ticket, group: RolloutGroup) -> bool:
            if self.replacements >= self._max_replacements or ticket.position not in positions:
                return False
            equal = not rewards_differ(group.rewards(self._deciding_part))
            self.replacements += equal
            return equal

        self.account.filtered += self._discard(is_replaced)
        self.dispatch()

    def _discard(self, unwanted: Callable[[Ticket, RolloutGroup], bool]) -> int:
        """Discard ready groups, so that others may be dispatched. Returns the number of their rollouts."""
        discarded = {ticket.position: group for ticket, group in self._ready if unwanted(ticket, group)}
        self._ready = [pair for pair in self._ready if pair[0].position not in discarded]
        self._dispatched -= len(discarded)
        return _rollouts(discarded.values())

    # --- a training step ---

    async def take(self) -> list[RolloutGroup]:
        """Wait for the groups of the next training step, the oldest ones; in the order of their prompts.

        Raises TimeoutError, which names the oldest prompts, if no group ended within `deadline_s`.
        """
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            if self._staleness.on_stale == "drop":
                self.account.stale += self._discard(lambda _, group: not self._admits(group))
            self.dispatch()
            enough = len(self._ready) >= self._groups_per_step  # first, since `_must_wait` reads every token span
            if enough and not self._must_wait():
                oldest_first = sorted(self._ready, key=lambda pair: pair[1].oldest_version)
                taken, left = oldest_first[: self._groups_per_step], oldest_first[self._groups_per_step :]
                self._ready = sorted(left, key=lambda pair: pair[0].position)
                groups = [group for _, group in sorted(taken, key=lambda pair: pair[0].position)]
                assert all(map(self._admits, groups))
                self._rollouts_taken += _rollouts(groups)
                return groups
            await self._next_group()

    def _admits(self, group: RolloutGroup) -> bool:
        return self._staleness.admits(group.oldest_version, step=self._step)

    def _must_wait(self) -> bool:
        return self._staleness.must_wait(
            Counter(group.oldest_version for _, group in self._ready),
            Counter(version for _, version in self._running.values()),
            step=self._step,
            groups_per_step=self._groups_per_step,
        )

    async def _next_group(self) -> None:
        """Wait until a running group ends."""
        enough, began = len(self._ready) >= self._groups_per_step, time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"no group ended within {self._deadline_s:g} s. {self.waits_for()}. Shorten the responses, or raise "
                "cluster.step_deadline_s."
            ) from None
        finally:
            if enough:
                self.slow_wait_s += time.monotonic() - began

    def waits_for(self) -> str:
        """A sentence about the groups that the training step still needs."""
        missing = max(1, self._groups_per_step - len(self._ready))
        running = sorted(
            (version, ticket.position, ticket.prompt.id) for ticket, version in list(self._running.values())
        )  # a copy: another thread may ask
        oldest = ", ".join(prompt for _, _, prompt in running[:SHOWN_PROMPTS])
        return f"Step {self._step + 1} waits for groups: {missing} of {len(running)} running (oldest prompts: {oldest})"

    def count(self, batch: StepBatch) -> None:
        """Add the rollouts of the training step to the account."""
        assert len(batch.rewards) == self._rollouts_taken, "the batch of a step holds what `take` gave"
        self.account.add_step(batch)
        self._rollouts_taken = 0

    def begin_next_step(self) -> None:
        """Dispatch groups for the next training step; its weights are in the engines."""
        self._step += 1
        self.replacements = 0
        self.dispatch()

    # --- the account ---

    @property
    def waiting(self) -> int:
        """The number of sampled rollouts that are not used yet."""
        return _rollouts(group for _, group in self._ready) + self._rollouts_taken

    def account_metrics(self) -> dict[str, int]:
        """Numbers of rollouts by use. Raises AssertionError if a rollout was lost or counted twice."""
        account, waiting = self.account, self.waiting
        used = account.trained + account.filtered + account.stale + account.failed
        assert account.sampled == used + waiting, f"{account} with {waiting} waiting does not add up"
        return {f"account/{use}": count for use, count in (asdict(account) | {"waiting": waiting}).items()}

    def outstanding(self) -> list[Ticket]:
        """Dispatched prompts that are not trained yet; a resumed run samples them again."""
        return [*(ticket for ticket, _ in self._running.values()), *(ticket for ticket, _ in self._ready)]

    async def close(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _rollouts(groups: Iterable[RolloutGroup]) -> int:
    return sum(len(group.samples) for group in groups)
