"""Groups between the engines and the learners: dispatch, staleness, and the account of every rollout.

The staleness rule: training step s (counted from 0, at weights of version s) takes a group only if
s - (version of the group's oldest token) <= max_policy_lag. Dispatch follows the same rule: it never has more groups
in progress than the steps up to s + max_policy_lag can take. With a lag of 0 these are exactly the groups of the
current step, and the loop is synchronous.

The account, in rollouts: sampled = trained + filtered + stale + failed + waiting, at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, fields

from rlhf.types import Prompt, RolloutGroup


@dataclass
class Account:
    """Rollouts since the run began, by their use; `waiting` are sampled and not used yet."""

    sampled: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0

    @property
    def waiting(self) -> int:
        return self.sampled - self.trained - self.filtered - self.stale - self.failed

    def metrics(self) -> dict[str, int]:
        counts = {f"account/{f.name}": getattr(self, f.name) for f in fields(self)}
        return counts | {"account/waiting": self.waiting}


@dataclass(frozen=True)
class Staleness:
    """Train a group at step s only if s - version <= max_policy_lag."""

    max_policy_lag: int

    def admits(self, oldest_version: int, *, step: int) -> bool:
        return step - oldest_version <= self.max_policy_lag

    def groups_ahead(self, *, step: int, groups_per_step: int) -> int:
        """Groups that may be dispatched in total before training step `step` begins."""
        return (step + 1 + self.max_policy_lag) * groups_per_step


@dataclass(frozen=True)
class Ticket:
    """A dispatched prompt; `position` is its index in the prompt stream, from which a resumed run draws it again."""

    position: int
    prompt: Prompt


class RolloutBuffer:
    """Keeps engines busy in the background and gives whole groups to the loop.

    Args:
        sample: one prompt -> its graded group, on the engine with the fewest groups in progress.
        next_ticket: draws the next prompt of the stream.
        groups_per_step: groups that one training step takes.
        replacements: groups that an earlier start of the run has replaced for the current step.
        total_steps: training steps of the run; no group is dispatched beyond them.
        max_replacements: before each training step, at most this many groups of equal rewards are filtered and replaced
            by groups of other prompts; further ones are trained on. 0 replaces none. (Dynamic sampling, DAPO,
            arXiv:2503.14476, sec. 3.2.)
        deciding_part: the part of the reward that must differ within a group; None: the whole reward.
        in_order: replace groups only when all have arrived, in the order of their prompts. Otherwise the groups that
            arrive first would use up `max_replacements`.
    """

    def __init__(
        self,
        sample: Callable[[Prompt], Awaitable[RolloutGroup]],
        next_ticket: Callable[[], Ticket],
        *,
        groups_per_step: int,
        total_steps: int,
        staleness: Staleness,
        step: int = 0,
        account: Account | None = None,
        replacements: int = 0,
        max_replacements: int = 0,
        deciding_part: str | None = None,
        in_order: bool = False,
    ) -> None:
        self.account = account or Account()
        self._sample = sample
        self._next_ticket = next_ticket
        self._groups_per_step = groups_per_step
        self._total_groups = total_steps * groups_per_step
        self._staleness = staleness
        self._step = step
        self._dispatched = step * groups_per_step
        self._running: dict[asyncio.Task[None], Ticket] = {}
        self._ready: list[tuple[Ticket, RolloutGroup]] = []
        self._failure: BaseException | None = None
        self._max_replacements = max_replacements
        self.replacements = replacements
        self._deciding_part = deciding_part
        self._in_order = in_order
        self._changed = asyncio.Condition()

    def dispatch(self) -> None:
        """Start as many groups as the staleness rule allows."""
        allowed = self._staleness.groups_ahead(step=self._step, groups_per_step=self._groups_per_step)
        while self._dispatched < min(allowed, self._total_groups) and self._failure is None:
            self._dispatched += 1
            ticket = self._next_ticket()
            self._running[asyncio.ensure_future(self._run(ticket))] = ticket

    async def _run(self, ticket: Ticket) -> None:
        try:
            group = await self._sample(ticket.prompt)
        except Exception as error:  # raised again in `take`
            self._failure = self._failure or error
            self._remove_task()
        else:
            self._remove_task()
            self.account.sampled += len(group.samples)
            self._ready.append((ticket, group))
            self._ready.sort(key=lambda pair: pair[0].position)
            if not self._in_order:
                self._replace_equal({ticket.position})
            elif not self._running:
                self._replace_equal({ticket.position for ticket, _ in self._ready})
        async with self._changed:
            self._changed.notify_all()

    def _replace_equal(self, positions: Set[int]) -> None:
        """Filter the groups at these positions whose rewards are all equal, and dispatch others, as far as allowed."""
        kept = []
        for ticket, group in self._ready:
            can_replace = self.replacements < self._max_replacements and ticket.position in positions
            if can_replace and len(group.distinct_rewards(self._deciding_part)) < 2:
                self.replacements += 1
                self.account.filtered += len(group.samples)
                self._dispatched -= 1
            else:
                kept.append((ticket, group))
        self._ready = kept
        self.dispatch()

    def _remove_task(self) -> None:
        """Remove the running task before anyone is woken, so that no group is counted both as running and as ready."""
        task = asyncio.current_task()
        assert task is not None
        del self._running[task]

    async def take(self) -> list[RolloutGroup]:
        """The groups of the next training step, in the order in which their prompts were drawn.

        Groups that have become too old are dropped, counted as stale and replaced.
        """
        while True:
            self.dispatch()
            if self._failure is not None:
                raise self._failure
            self._drop_stale()
            if len(self._ready) >= self._groups_per_step:
                taken, self._ready = self._ready[: self._groups_per_step], self._ready[self._groups_per_step :]
                return [group for _, group in taken]
            if len(self._running) + len(self._ready) < self._groups_per_step:
                continue  # stale groups were dropped: dispatch their replacements
            async with self._changed:
                if len(self._ready) < self._groups_per_step and self._failure is None:
                    await self._changed.wait()

    def _drop_stale(self) -> None:
        fresh = []
        for ticket, group in self._ready:
            if self._staleness.admits(group.oldest_version, step=self._step):
                fresh.append((ticket, group))
            else:
                self.account.stale += len(group.samples)
                self._dispatched -= 1
        self._ready = fresh

    def begin_next_step(self) -> None:
        """Let the groups of the next training step be dispatched; its weights are in the engines."""
        self._step += 1
        self.replacements = 0
        self.dispatch()

    def outstanding(self) -> list[int]:
        """Stream positions of prompts that were dispatched and not trained on; a resumed run samples them again."""
        return sorted(ticket.position for ticket in self._waiting_tickets())

    def outstanding_prompts(self) -> list[Prompt]:
        """The prompts at these positions."""
        return [ticket.prompt for ticket in self._waiting_tickets()]

    def _waiting_tickets(self) -> list[Ticket]:
        return [*self._running.values(), *(ticket for ticket, _ in self._ready)]

    async def close(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
