"""The prompts of a run in their order; a resumed run first repeats those that were dispatched and not trained on."""

from __future__ import annotations

from collections import deque

from rlhf.data.load import LoadedPrompts
from rlhf.data.order import PromptStream
from rlhf.rollout.buffer import Ticket
from rlhf.run.state import RunState


class PromptTickets:
    """Draws prompts in their seeded order.

    Args:
        restored: the state of the checkpoint to go on from; None for a new run.
    """

    def __init__(self, loaded: LoadedPrompts, *, seed: int, restored: RunState | None) -> None:
        self.stream = PromptStream(loaded.prompts, rows_per_epoch=loaded.rows_per_epoch, seed=seed)
        self._outstanding: deque[Ticket] = deque()
        if restored is not None:
            for position in restored.outstanding:
                self.stream.restore({**restored.stream, "drawn": position})
                self._outstanding.append(self._draw())
            self.stream.restore(restored.stream)

    def next(self) -> Ticket:
        return self._outstanding.popleft() if self._outstanding else self._draw()

    def waiting(self) -> list[int]:
        """Stream positions of the restored prompts that are not dispatched again yet."""
        return [ticket.position for ticket in self._outstanding]

    def _draw(self) -> Ticket:
        position = self.stream.drawn
        return Ticket(position, self.stream.take(1)[0])
