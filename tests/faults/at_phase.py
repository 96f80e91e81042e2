"""Runs rlhf.grpo, and sends this process a signal when a phase of the run begins.

    python at_phase.py PHASE NTH SIGNAL [SIGNAL ...] -- ARGUMENTS OF rlhf.grpo

Phases are those of the run's clock. The first signal comes when the phase begins for the NTH time, each further one
when the run's own code has had its turn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

BETWEEN_S = 1.0

phase, nth, *rest = sys.argv[1:]
signals = [signal.Signals[name] for name in rest[: rest.index("--")]]


def send() -> None:
    for later, number in enumerate(signals):
        threading.Timer(later * BETWEEN_S, os.kill, (os.getpid(), number)).start()


def main() -> int:
    from rlhf import grpo
    from rlhf.config import cli
    from rlhf.log.measure import Clock

    original, begun = Clock.phase, 0

    @contextlib.contextmanager
    def with_signal(self: Clock, name: str) -> Iterator[None]:
        nonlocal begun
        begun += name == phase
        if name == phase and begun == int(nth):
            send()
        with original(self, name):
            yield

    Clock.phase = with_signal  # type: ignore[method-assign]
    return cli.run_program(lambda: grpo.main(rest[rest.index("--") + 1 :]))


if __name__ == "__main__":
    sys.exit(main())
