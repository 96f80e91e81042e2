"""The engines as one rollout worker sees them: a numbered list of the ready ones, and its own requests in flight.

The driver sends a newer list whenever an engine is lost or joins (`cluster.engine_recovery`). The worker chooses an
engine for each request by itself, and tells the driver only of a request that failed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray

from rlhf.cluster.actors import LostError, SilentError, record_call, wait_for
from rlhf.sampling.requests import Completion, SamplingSettings

if TYPE_CHECKING:
    from rlhf.sampling.engine import RolloutEngine

# A rollout stays with its former engine if that has at most 2x + 8 requests, x: those of the least busy one.
MAX_PREFERRED_LEAD = 8

# Engine -> its actor, and the actor's id with its name and node, as in `ActorGroup.homes`. Empty while fewer engines
# than cluster.min_engines are ready.
ListedEngines = Mapping[int, tuple[Any, Mapping[str, str]]]


class EngineListener(Protocol):
    """Whoever hears which engines are ready."""

    def update(self, number: int, engines: ListedEngines, failure: str | None = None) -> None:
        """The engines that are ready now; each list has a higher number than the one before.

        `failure`: the error of the last lost engine, if too many were lost to go on.
        """


class EngineChoice:
    """Samples on the engine with the fewest requests of this worker. Fulfils `EngineListener`.

    Args:
        worker: number of the worker. Workers with different numbers begin with different engines.
        deadline_s: of a request (`GRPOConfig.request_deadline_s`).
        report: called after a failed request with the engine, the number of the list that it was chosen from, the
            error, and whether the engine was silent until the deadline. A newer list must follow.
    """

    def __init__(self, worker: int, deadline_s: float, report: Callable[[int, int, str, bool], None]) -> None:
        self._worker, self._deadline_s, self._report = worker, deadline_s, report
        self._number, self._engines = 0, dict[int, tuple[Any, Mapping[str, str]]]()
        self._in_flight = Counter[int]()
        self._failure: str | None = None
        self._changed = asyncio.Event()

    def update(self, number: int, engines: ListedEngines, failure: str | None = None) -> None:
        if number > self._number:
            self._number, self._engines, self._failure = number, dict(engines), failure
            self._changed.set()
            self._changed = asyncio.Event()

    async def generate(
        self,
        token_ids: np.ndarray,
        settings: SamplingSettings,
        *,
        samples: int = 1,
        seed: int | None = None,
        what: str = "a request",
        prefer: int | None = None,
    ) -> list[Completion]:
        """Sample `samples` continuations of these ids [P] in one request.

        If its engine fails, the request is made again with the next list. If the caller is cancelled, the engine aborts
        the request.

        Args:
            prefer: the engine of the rollout's earlier turns (`Completion.engine`), whose prefix cache holds them. It
                samples unless others are far less busy; another one has to compute the whole context.
            seed: seed of the first sample's noise; sample i uses seed + i. None: the engine's own generator.

        Raises:
            LostError: engines were lost, and cannot be replaced.
        """
        ask: Callable[[RolloutEngine], Awaitable[list[Completion]]]
        ask = lambda engine: engine.generate(token_ids, settings, samples, seed)  # noqa: E731
        number = 0
        while True:
            number = await self._newer_list(number)
            engine = self._choose(prefer)
            actor, home = self._engines[engine]
            answer = actor.call.remote(*record_call(ask))
            self._in_flight[engine] += 1
            try:
                return await wait_for(
                    answer, what=f"engine {engine}, sampling {what}", deadline_s=self._deadline_s, homes=home
                )
            except LostError as error:
                self._report(engine, number, str(error), isinstance(error, SilentError))
            except asyncio.CancelledError:
                if ray.is_initialized():
                    ray.cancel(answer)
                raise
            finally:
                self._in_flight[engine] -= 1

    async def _newer_list(self, number: int) -> int:
        """Wait for a list of engines that is newer than this one. Returns its number."""
        while self._failure is None and (self._number <= number or not self._engines):
            await self._changed.wait()
        if self._failure is not None:
            raise LostError(self._failure)
        return self._number

    def _choose(self, prefer: int | None) -> int:
        """The listed engine with the fewest requests; ties go round, beginning at the worker's number.

        `prefer`: chosen unless it has over twice as many requests; its cache then saves less than the queue costs.
        """
        listed, in_flight = sorted(self._engines), self._in_flight
        begin = self._worker % len(listed)
        fewest = min(listed[begin:] + listed[:begin], key=in_flight.__getitem__)
        if prefer in self._engines and in_flight[prefer] <= 2 * in_flight[fewest] + MAX_PREFERRED_LEAD:
            return prefer
        return fewest
