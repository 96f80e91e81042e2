"""A cluster and engines that start nothing: a run is driven by its own program, in this process, within a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_canary import FakeEngines, everything

from rlhf import grpo
from rlhf.cluster.actors import record_call
from rlhf.config.grpo import GRPOConfig
from rlhf.log.reductions import Mean, UpdateOutcome
from rlhf.rewards.grade import NOT_JUDGED
from rlhf.run import rollout_loop
from rlhf.run.run import Run
from rlhf.sampling.requests import Completion, SamplingSettings
from rlhf.types import ScoredRollout, VersionSpan

CUT_OFF_EVERY = 4  # samples of a group, of which one does not stop


class FakeLearners:
    """Learners that compute nothing; every call is kept, and the targets of the last update."""

    def __init__(self, *, old_logprobs: bool = False) -> None:
        self._old_logprobs = old_logprobs
        self.targets: Any = None
        self.calls: list[tuple[Any, ...]] = []
        self.updates, self._planned, self.shared = 0, 0, np.zeros(0, np.int64)

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

    lost, trains, shares_gpus = "", True, False

    def __init__(self, config: Any, **_: Any) -> None:
        self.learners = FakeLearners(old_logprobs=isinstance(config, GRPOConfig) and config.needs_old_logprobs_pass)
        self.checkpoints = FakeCheckpoints()
        self.loaded: list[Path] = []

    def rollout_worker_nodes(self) -> list[str]:
        return []

    async def load(self, folder: Path) -> None:
        self.loaded.append(folder)

    async def __aenter__(self) -> FakeCluster:
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass


class Sampling(FakeEngines):
    """Engines that sample three tokens, stamped with the weights that they have; every fourth response is cut off."""

    def __init__(self) -> None:
        super().__init__(everything)
        self.version = 0
        self.prompts: list[str] = []
        self.choice = self

    def of_cluster(self, cluster: FakeCluster, _: Any) -> Sampling:
        self.update_learners, self.cluster = cluster.learners.update, cluster
        return self

    async def __aenter__(self) -> Sampling:
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass

    async def send_weights(self, version: int) -> None:
        await super().send_weights(version)
        self.version = version

    async def publish(self, version: int, check: Any, **_: Any) -> dict[str, float]:
        await self.send_weights(version)
        return await check(version)

    async def take_work(self) -> tuple[dict[str, float], float]:
        metrics = ("tokens_per_second", "kv_cache_usage", "kv_cache_wait_fraction")
        return {f"rollout/{name}": 0.0 for name in metrics}, 0.0

    def replace_lost(self, check: Any) -> None:
        pass

    async def stop_replacing(self) -> None:
        pass

    async def generate(
        self, token_ids: np.ndarray, settings: SamplingSettings, *, samples: int = 1, what: str = "", **_: Any
    ) -> list[Completion]:
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

    def close(self) -> None:
        pass

    def check_gold(self, prompts: Any) -> list[Any]:
        return []

    async def score_group(
        self, prompt: Any, rollouts: Any, texts: Any, marks: Any = None, **_: Any
    ) -> tuple[ScoredRollout, ...]:
        pairs = enumerate(zip(rollouts, texts, strict=True))
        if not self.config.parts:
            return tuple(ScoredRollout(*pair, "", None, {}, NOT_JUDGED) for _, pair in pairs)
        ok = {"part_status": {"math": "ok"}}
        return tuple(ScoredRollout(*pair, "", float(i), {"math": float(i)}, "ok", **ok) for i, pair in pairs)


async def drive(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False, until: int | None = None
) -> tuple[Run[GRPOConfig], Sampling]:
    """The whole of rlhf.grpo's `train`; a signal comes in training step `until`."""
    run = Run(config, resume=resume, make_cluster=FakeCluster)
    engines = Sampling()
    with monkeypatch.context() as patch:
        patch.setattr(rollout_loop, "Scorer", FakeScorer)
        started: Any = functools.partial(rollout_loop.rollout_loop, make_engines=engines.of_cluster)
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
