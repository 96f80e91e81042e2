"""A cluster and engines that start nothing: a run is driven by its own program, in this process, within a second."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_canary import FakeEngines, everything

from rlhf import grpo
from rlhf.cluster.actors import record_call
from rlhf.config.grpo import GRPOConfig
from rlhf.log.reductions import Mean, UpdateOutcome
from rlhf.rewards.grade import NOT_JUDGED
from rlhf.rollout.requests import Completion, SamplingSettings
from rlhf.run import rollout_loop
from rlhf.run.run import Run
from rlhf.types import ScoredRollout, VersionSpan

CUT_OFF_EVERY = 4  # samples of a group, of which one does not stop


class FakeLearners:
    """Learners that compute nothing; every call is kept, and the targets of the last update."""

    def __init__(self, *, old_logprobs: bool = False) -> None:
        self._old_logprobs = old_logprobs
        self.targets: Any = None
        self.calls: list[tuple[Any, ...]] = []
        self.updates, self.updated_since_send, self.shared = 0, False, np.zeros(0, np.int64)
        self._planned, self.weights_lock = 0, asyncio.Condition()

    async def call(self, ask: Callable[[Any], Any], **_: Any) -> list[Any]:
        method, *arguments = record_call(ask)
        self.calls.append((method, *arguments))
        match method:
            case "update_counts":
                return [(self.updates, 0)]
            case "device_name":
                return ["cpu"]
            case "try_export":
                Path(arguments[0]).mkdir()
                return [("", "")]
        return [None]

    async def start_step(self, batch: Any, epochs: Any) -> None:
        self._batch, self._planned = batch, sum(map(len, epochs))
        rows = sum(len(rows) for epoch in epochs for minibatch in epoch for rows in minibatch.microbatches[0])
        self.shared = np.zeros(rows, np.int64)

    async def compute(self, ask: Callable[[Any], Any]) -> list[Any]:
        zeros = np.zeros(len(self._batch.tokens.token_ids), np.float32)
        if record_call(ask)[0] == "teacher_logprobs":
            return [zeros - 0.5]
        return [zeros if self._old_logprobs else None, zeros]

    async def update(self, targets: Any) -> list[UpdateOutcome]:
        self.targets = targets
        self.updates += self._planned
        return [UpdateOutcome("learner", True, {"learner/grad_norm": Mean(1.0, 1.0)})] * self._planned


class FakeCheckpoints:
    async def bytes(self) -> int:
        return 0

    async def save(self, folder: Path) -> None:
        pass

    async def finish_save(self) -> dict[str, Any]:
        return {}


class FakeCluster:
    """What `Run` asks of its cluster."""

    lost = ""

    def __init__(self, config: Any, **_: Any) -> None:
        self.learners = FakeLearners(old_logprobs=isinstance(config, GRPOConfig) and config.needs_old_logprobs_pass)
        self.checkpoints = FakeCheckpoints()
        self.loaded: list[Path] = []

    async def load(self, folder: Path) -> None:
        self.loaded.append(folder)

    async def host_environments(self, spread: Any) -> None:
        pass

    async def __aenter__(self) -> FakeCluster:
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass


class Sampling(FakeEngines):
    """Engines that sample three tokens, stamped with the weights that they have; every fourth response is cut off."""

    def __init__(self, *_: Any) -> None:
        super().__init__(everything)
        self.version = 0
        self.prompts: list[str] = []
        self.meter = SimpleNamespace(take=lambda: (0.0, 0.0))
        self.transfer_metrics: dict[str, float] = {}

    async def __aenter__(self) -> Sampling:
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass

    async def send_weights(self, version: int) -> None:
        await super().send_weights(version)
        self.version = version

    def replace_lost(self, check: Any) -> None:
        pass

    async def stop_replacing(self) -> None:
        pass

    async def generate(
        self, token_ids: np.ndarray, settings: SamplingSettings, *, samples: int = 1, what: str = "", **how: Any
    ) -> list[Completion]:
        if "engine" in how:
            return await super().generate(token_ids, settings, engine=how["engine"])
        self.prompts.append(what)
        spans, logprobs = (VersionSpan(0, 3, self.version),), np.full(3, -1.0, np.float32)
        ends = ["length" if sample % CUT_OFF_EVERY == 0 else "stop" for sample in range(samples)]
        return [Completion(np.array([40, 41, 42], np.int32), logprobs, end, spans) for end in ends]


class FakeScorer:
    """Gives the samples of a group the rewards 0, 1, 2 and so on; none with `reward: []`."""

    warnings: tuple[str, ...] = ()

    def __init__(self, config: Any, **_: Any) -> None:
        self.config = config
        self.sources: dict[str, Any] = {}
        self.noted: list[str] = []

    def close(self) -> None:
        pass

    def restore(self, counters: Any) -> None:
        pass

    def check_gold(self, prompts: Any) -> list[Any]:
        return []

    def counters_excluding(self, prompts: Any) -> dict[str, int]:
        return {}

    def note(self, name: str, error: str) -> None:
        self.noted.append(f"reward {name}: {error}")

    def new_errors(self) -> list[str]:
        noted, self.noted = self.noted, []
        return noted

    def missing_value_reason(self, part: Any) -> str:
        return "it returned None each time"

    def failed_always(self, part: Any) -> bool:
        return False

    async def score_group(
        self, prompt: Any, rollouts: Any, texts: Any, marks: Any = None, **_: Any
    ) -> tuple[ScoredRollout, ...]:
        pairs = enumerate(zip(rollouts, texts, strict=True))
        if not self.config.parts:
            return tuple(ScoredRollout(*pair, "", None, {}, NOT_JUDGED) for _, pair in pairs)
        return tuple(ScoredRollout(*pair, "", float(i), {"math": float(i)}, "ok") for i, pair in pairs)


async def drive(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False, until: int | None = None
) -> tuple[Run[GRPOConfig], Sampling]:
    """The whole of rlhf.grpo's `train`; a signal comes in training step `until`."""
    run = Run(config, resume=resume, make_cluster=FakeCluster)
    engines = Sampling()
    with monkeypatch.context() as patch:
        patch.setattr(rollout_loop, "Scorer", FakeScorer)
        started: Any = functools.partial(rollout_loop.rollout_loop, make_engines=lambda *_: engines)
        patch.setattr(rollout_loop, "rollout_loop", started)
        step_of = grpo.train_step

        async def step_until(run: Any, loop: Any, step: int) -> None:
            if step + 1 == until:
                run.stop.on_signal("SIGTERM", lambda: None)
            await step_of(run, loop, step)

        patch.setattr(grpo, "train_step", step_until)
        await grpo.train(run)
    run.folder.unlock()
    return run, engines
