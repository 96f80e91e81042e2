"""Groups between the engines and the learners: dispatch, staleness, and the account of every rollout.

The staleness rule: training step s (counted from 0, with weights of version s) takes a group only if
s - (version of the group's oldest token) <= max_policy_lag. Dispatch follows the same rule: no more groups are in
progress than the steps up to s + max_policy_lag can take. With a lag of 0 these are exactly the groups of the
current step, and the loop is synchronous.

With on_stale=wait no group is discarded for its age: a step takes the oldest groups first, and waits for running groups
that later steps could not all take in time. Discarding slow groups would remove long and hard prompts from the data.

A loop of one's own dispatches nothing here: it draws prompts, and holds groups until it trains or drops them.

The account, in rollouts: sampled = trained + filtered + stale + failed + waiting, whenever no step is in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Literal

import numpy as np

from rlhf.config.grpo import GRPOConfig
from rlhf.types import Prompt, Rollout, RolloutGroup, StepBatch, rewards_differ

# An engine gets as many groups as fit in so many of its batches. The samples of a group end at different times, so on
# average a group fills less than its size; with 3, log-normal lengths keep the batch full (benchmarks/simulator.py).
BATCHES_AT_ENGINE = 3
SHOWN_PROMPTS = 3  # named in a message about waiting


def groups_at_engines(config: GRPOConfig, cached_sequences: float | None = None) -> int:
    """The number of groups that keeps the batches of all engines full, with some to spare.

    Args:
        cached_sequences: on shared GPUs, how many sequences of the greatest length all KV caches hold. Each sleep of
            the engines empties them, so beyond the groups of one training step none is begun whose sequences might
            have to wait for a place once more.
    """
    samples = config.rollout.samples_per_prompt
    groups = math.ceil(BATCHES_AT_ENGINE * config.cluster.engines * config.rollout.max_concurrent_sequences / samples)
    if cached_sequences is None:
        return groups
    return min(groups, max(config.rollout.prompts_per_step, int(cached_sequences / samples)))


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


@dataclass(eq=False, repr=False)
class RolloutBuffer:
    """Keeps engines busy in the background and gives whole groups to the loop."""

    sample: Callable[[Prompt], Awaitable[RolloutGroup]]  # one prompt -> its graded group
    next_ticket: Callable[[], Ticket]  # draws the next prompt of the stream
    _: KW_ONLY
    groups_per_step: int
    total_steps: int  # training steps of the run; no group is dispatched beyond them. 0 in a loop of one's own
    staleness: Staleness
    # Called with each group as it ends, before any further prompt is drawn.
    ended: Callable[[Ticket, RolloutGroup], None] = lambda *_: None
    step: int = 0
    account: Account = field(default_factory=Account)
    replacements: int = 0  # groups that were already replaced for the current step before the run was resumed
    # Maximum number of groups with equal rewards that are filtered and replaced by groups of other prompts before each
    # training step; further ones are trained. (DAPO, arXiv:2503.14476, sec. 3.2.)
    max_replacements: int = 0
    deciding_part: str | None = None  # the part of the reward that must differ within a group; None: the whole reward
    # Replace groups only when all have arrived, in the order of their prompts. Otherwise the groups that arrive first
    # would use up `max_replacements`.
    in_order: bool = False
    # Maximum number of groups at the engines; None: no limit. A group that waits in an engine's queue already has its
    # version of dispatch, so steps would wait for it too early.
    max_running: int | None = None
    deadline_s: float | None = None  # `take` waits so long for the next group to end

    def __post_init__(self) -> None:
        self.slow_wait_s = 0.0  # since last reset to 0: `take` had enough groups and waited for older ones
        self._total_groups = self.total_steps * self.groups_per_step
        self._dispatched = self.step * self.groups_per_step
        self._running: dict[asyncio.Task[None], tuple[Ticket, int]] = {}  # and the version at dispatch
        self._ready: list[tuple[Ticket, RolloutGroup]] = []  # in the order of their positions
        self._rollouts_taken = 0  # by the current training step
        self._held: dict[tuple[int, ...], RolloutGroup] = {}  # by the loop, until they are trained or dropped
        self._drawn: dict[tuple[str, int], Ticket] = {}  # by `draw`: prompts that are neither trained nor dropped
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def dispatch(self) -> None:
        """Start as many groups as the staleness rule and `max_running` allow."""
        ahead = self.staleness.groups_ahead(step=self.step, groups_per_step=self.groups_per_step)
        allowed, running = min(ahead, self._total_groups), self.max_running or self._total_groups
        while self._dispatched < allowed and len(self._running) < running and self._failure is None:
            self._dispatched += 1
            ticket = self.next_ticket()
            self._running[asyncio.ensure_future(self._run(ticket))] = ticket, self.step

    async def _run(self, ticket: Ticket) -> None:
        task = asyncio.current_task()
        assert task is not None
        group: RolloutGroup | None = None
        try:
            group = await self.sample(ticket.prompt)
        except Exception as error:
            self._failure = self._failure or error  # the first one; `take` raises it
        except asyncio.CancelledError:  # by `close`, or because a task that the group waited for was cancelled
            cancelled = RuntimeError(f"the sampling of prompt {ticket.prompt.id} was cancelled.")
            self._failure = self._failure or cancelled
        del self._running[task]  # before waiters wake up, so that no group counts as both running and ready
        if group is not None:
            self.account.sampled += len(group.samples)
            self.ended(ticket, group)
            self._ready.append((ticket, group))
            self._ready.sort(key=lambda pair: pair[0].position)
            self.dispatch()
            if not self.in_order:
                self._replace_equal({ticket.position})
            elif not self._running:
                self._replace_equal({ticket.position for ticket, _ in self._ready})
        self._changed.set()

    def _replace_equal(self, positions: Set[int]) -> None:
        """Filter groups at these positions whose rewards are all equal, up to the limit, and dispatch others."""

        def is_replaced(ticket: Ticket, group: RolloutGroup) -> bool:
            if self.replacements >= self.max_replacements or ticket.position not in positions:
                return False
            equal = not rewards_differ(group.rewards(self.deciding_part))
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
            if self.staleness.on_stale == "drop":
                self.account.stale += self._discard(lambda _, group: not self._admits(group))
            self.dispatch()
            enough = len(self._ready) >= self.groups_per_step  # first, since `_must_wait` reads every token span
            if enough and not self._must_wait():
                oldest_first = sorted(self._ready, key=lambda pair: pair[1].oldest_version)
                taken, left = oldest_first[: self.groups_per_step], oldest_first[self.groups_per_step :]
                self._ready = sorted(left, key=lambda pair: pair[0].position)
                groups = [group for _, group in sorted(taken, key=lambda pair: pair[0].position)]
                assert all(map(self._admits, groups))
                self._rollouts_taken += _rollouts(groups)
                self._held |= {_identity(group): group for group in groups}
                return groups
            await self._next_group()

    def _admits(self, group: RolloutGroup) -> bool:
        return self.staleness.admits(group.oldest_version, step=self.step)

    def _must_wait(self) -> bool:
        return self.staleness.must_wait(
            Counter(group.oldest_version for _, group in self._ready),
            Counter(version for _, version in self._running.values()),
            step=self.step,
            groups_per_step=self.groups_per_step,
        )

    async def _next_group(self) -> None:
        """Wait until a running group ends."""
        enough, began = len(self._ready) >= self.groups_per_step, time.monotonic()
        try:
            async with asyncio.timeout(self.deadline_s):
                await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"no group ended within {self.deadline_s:g} s. {self.waits_for()}. Shorten the responses, or raise "
                "cluster.step_deadline_s."
            ) from None
        finally:
            if enough:
                self.slow_wait_s += time.monotonic() - began

    def waits_for(self) -> str:
        """A sentence about the groups that the training step still needs."""
        missing = max(1, self.groups_per_step - len(self._ready))
        running = sorted(
            (version, ticket.position, ticket.prompt.id) for ticket, version in list(self._running.values())
        )  # a copy: another thread may ask
        oldest = ", ".join(prompt for _, _, prompt in running[:SHOWN_PROMPTS])
        return f"Step {self.step + 1} waits for groups: {missing} of {len(running)} running (oldest prompts: {oldest})"

    def count(self, groups: Iterable[RolloutGroup], batch: StepBatch) -> None:
        """Add the groups of the training step to the account; `batch` has their rollouts."""
        trained = [self._held.pop(_identity(group)) for group in groups]
        expected = self._rollouts_taken or _rollouts(trained)
        assert len(batch.rewards) == expected, "the batch of a step holds what `take` gave"
        self.account.add_step(batch)
        self._rollouts_taken = 0
        for group in trained:
            self.drop_prompt(group.prompt)

    def begin_next_step(self) -> None:
        """Dispatch groups for the next training step; its weights are in the engines."""
        self.step += 1
        self.replacements = 0
        self.dispatch()

    # --- a loop of one's own ---

    def draw(self) -> Prompt:
        """The next prompt of the stream. A resumed run draws it again unless it was trained or dropped."""
        ticket = self.next_ticket()
        self._drawn[_key(ticket.prompt)] = ticket
        return ticket.prompt

    def hold(self, group: RolloutGroup) -> None:
        """Count a group as sampled, and keep it until it is trained or dropped."""
        self.account.sampled += len(group.samples)
        self._held[_identity(group)] = group
        if (ticket := self._drawn.get(_key(group.prompt))) is not None:
            self.ended(ticket, group)

    def holds(self, group: RolloutGroup) -> bool:
        """Whether the group, or one of the same rollouts with other rewards, is held."""
        return _identity(group) in self._held

    def holds_rollout(self, rollout: Rollout) -> bool:
        """Whether a group with this rollout is held."""
        return any(id(rollout.sequences) in identity for identity in self._held)

    def drop(self, group: RolloutGroup) -> None:
        """Discard a held group, as stale if no step may train it any more."""
        rollouts = len(self._held.pop(_identity(group)).samples)
        self.account.filtered += rollouts * self._admits(group)
        self.account.stale += rollouts * (not self._admits(group))
        self.drop_prompt(group.prompt)

    def drop_prompt(self, prompt: Prompt) -> None:
        """A resumed run does not draw this prompt again."""
        self._drawn.pop(_key(prompt), None)

    # --- the account ---

    @property
    def waiting(self) -> int:
        """The number of sampled rollouts that are not used yet."""
        return _rollouts([*(group for _, group in self._ready), *self._held.values()])

    def account_metrics(self) -> dict[str, int]:
        """Numbers of rollouts by use. Raises AssertionError if a rollout was lost or counted twice."""
        account, waiting = self.account, self.waiting
        used = account.trained + account.filtered + account.stale + account.failed
        assert account.sampled == used + waiting, f"{account} with {waiting} waiting does not add up"
        return {f"account/{use}": count for use, count in (asdict(account) | {"waiting": waiting}).items()}

    def outstanding(self) -> list[Ticket]:
        """Dispatched prompts that are not trained yet; a resumed run samples them again."""
        running, ready = self._running.values(), self._ready
        return [*(ticket for ticket, _ in running), *(ticket for ticket, _ in ready), *self._drawn.values()]

    async def close(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _key(prompt: Prompt) -> tuple[str, int]:
    return prompt.id, prompt.epoch  # an epoch holds no prompt twice


def _identity(group: RolloutGroup) -> tuple[int, ...]:
    return tuple(id(sample.rollout.sequences) for sample in group.samples)


def _rollouts(groups: Iterable[RolloutGroup]) -> int:
    return sum(len(group.samples) for group in groups)
