"""Seconds of a run by phase, and how long engines and learners waited."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Watch = Callable[[str], contextlib.AbstractContextManager[Any]]  # a context around work that has a name


class Clock:
    """Seconds by phase, of the whole run (a resumed run continues the count) and since the last logged step."""

    def __init__(self, spent: Mapping[str, float], watch: Watch = contextlib.nullcontext) -> None:
        self._watch = watch
        self.total: dict[str, float] = defaultdict(float, spent)
        self.step: dict[str, float] = {}
        self._step_started = self._window_started = time.monotonic()

    def start_window(self) -> None:
        """Count idle seconds from now on; call this when engines and learners have started."""
        self._window_started = time.monotonic()

    def start_step(self) -> None:
        self._step_started = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            with self._watch(name):
                yield
        finally:
            seconds = time.monotonic() - started
            self.step[name] = self.step.get(name, 0.0) + seconds
            self.total[name] += seconds

    def step_seconds(self) -> float:
        return time.monotonic() - self._step_started

    def take(self) -> tuple[dict[str, float], float]:
        """(seconds by phase, total seconds) since the last call, with evaluations and checkpoints."""
        now = time.monotonic()
        phases, window_s = self.step, now - self._window_started
        self.step, self._window_started = {}, now
        return phases, window_s


LEARNER_PHASES = ("logprobs", "update", "transfer", "canary", "checkpoint")


def waiting_seconds(phases: Mapping[str, float], window_s: float, engines_busy_s: float) -> dict[str, float]:
    """The metrics of idle time: seconds in which the busiest engine had no request or slept, and learners no work."""
    learners_busy_s = sum(phases.get(phase, 0.0) for phase in LEARNER_PHASES)
    return {
        "time/engine_idle": max(0.0, window_s - engines_busy_s),
        "time/learner_idle": max(0.0, window_s - learners_busy_s),
    }


class EngineWork(NamedTuple):
    """What an engine did since a moment, evaluations included."""

    tokens: int  # sampled
    busy_s: float  # with a request, and not asleep
    kv_cache_usage: float  # the largest fraction of the blocks in use
    passes: int  # forward passes
    waiting_passes: int  # after which a request waited for blocks of the KV cache


class BusyMeter:
    """Counts the sampled tokens of an engine, and the seconds in which it had a request and did not sleep."""

    def __init__(self) -> None:
        self.tokens = 0
        self._running, self._asleep = 0, False
        self._since, self._busy_s, self._asleep_s = time.monotonic(), 0.0, 0.0

    @contextlib.contextmanager
    def request(self) -> Iterator[Callable[[], float]]:
        """A context around a request; gives a function that says how many seconds of it the engine has slept so far."""
        self._count()
        self._running += 1
        before_s = self._asleep_s

        def asleep_s() -> float:
            self._count()
            return self._asleep_s - before_s

        try:
            yield asleep_s
        finally:
            self._count()
            self._running -= 1

    def sleep(self) -> None:
        self._count()
        self._asleep = True

    def wake_up(self) -> None:
        self._count()
        self._asleep = False

    def _count(self) -> None:
        """Count the seconds since the last call as what the engine did in them."""
        now = time.monotonic()
        if self._asleep:
            self._asleep_s += now - self._since
        elif self._running:
            self._busy_s += now - self._since
        self._since = now

    def take(self) -> tuple[int, float]:
        """(tokens, busy seconds) since the last call, with evaluations."""
        self._count()
        taken = self.tokens, self._busy_s
        self.tokens, self._busy_s = 0, 0.0
        return taken
