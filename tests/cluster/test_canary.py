"""The canary: what a stale or half-updated engine looks like, and that the message names it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rlhf.cluster.actors import ClusterError
from rlhf.cluster.canary import SEQUENCES, Canary
from rlhf.rollout.sampling import SamplingSettings
from rlhf.types import Prompt, Rollout
from rlhf.weights.transfer import ParameterMeta

PROMPTS = [Prompt(f"p/{i}", 0, np.arange(i + 3, dtype=np.int32), (), "", "p") for i in range(20)]


class Weights:
    """Two tensors; log-probs are a fixed function of both and of the token, each off by `rounding`."""

    def __init__(self, rounding: float = 0.0) -> None:
        self.body, self.head = 1.0, 1.0
        self.rounding = rounding

    def logprobs(self, sequences: list[np.ndarray], in_float32: bool = False) -> list[np.ndarray]:
        rounding = 0.0 if in_float32 else self.rounding
        exact = (-self.body - 0.01 * self.head * ids for ids in sequences)
        return [np.where(np.arange(len(x)) > 0, x + rounding * (-1.0) ** np.arange(len(x)), 0.0) for x in exact]


class FakeCluster:
    """Learners and engines that hold weights; `transfer` says what a transfer carries over."""

    def __init__(self, transfer: Any, *, rounding: float = 0.0) -> None:
        self.trained, self.served = Weights(rounding), Weights(-rounding)
        self.saved = (1.0, 1.0)
        self.transfer = transfer
        self.sent: list[int] = []
        self.learners = self.engines = self

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        match method:
            case "canary":
                raise AssertionError("told apart below")
            case "metadata":
                return [[ParameterMeta("body", "float32", ()), ParameterMeta("head", "float32", ())]]
            case "perturb_weights":
                self.saved = (self.trained.body, self.trained.head)
                body, head = (float(arguments[0] <= i < arguments[1]) for i in range(2))
                self.trained.body += body
                self.trained.head += 3 * head
            case "restore_weights":
                self.trained.body, self.trained.head = self.saved
        return [None]

    async def send_weights(self, version: int) -> None:
        self.sent.append(version)
        self.transfer(self.trained, self.served)

    async def yield_gpus(self) -> None:
        pass

    async def sample_group(
        self, engine: int, prompt: Prompt, samples: int, settings: SamplingSettings
    ) -> list[Rollout]:
        assert (engine, samples, settings.temperature) == (0, 1, 1.0)
        ids = np.concatenate([prompt.token_ids, np.arange(49, 49 - settings.max_tokens, -1, dtype=np.int32)])
        return [Rollout(prompt.id, 0, 0, ids, np.ones(len(ids), bool), np.zeros(len(ids)), (), "length")]


class Side:
    """One side of the cluster, so that `canary` is asked of the right weights."""

    def __init__(self, cluster: FakeCluster, weights: Weights) -> None:
        self.cluster, self.weights = cluster, weights

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        if method == "canary":
            return [self.weights.logprobs(*arguments)]
        return await self.cluster.call(method, *arguments)


def everything(trained: Weights, served: Weights) -> None:
    served.body, served.head = trained.body, trained.head


def all_but_the_head(trained: Weights, served: Weights) -> None:
    served.body = trained.body


def make(transfer: Any, *, rounding: float = 0.0) -> tuple[FakeCluster, Canary]:
    """With the rounding of a bfloat16 model, the learner's and the engine's opposite; a float32 run without."""
    cluster = FakeCluster(transfer, rounding=rounding)
    cluster.learners, cluster.engines = Side(cluster, cluster.trained), Side(cluster, cluster.served)  # type: ignore[assignment]
    return cluster, Canary(PROMPTS, dtype="bfloat16" if rounding else "float32", max_tokens=40)


def start(cluster: Any, canary: Canary) -> dict[str, float]:
    async def measured() -> dict[str, float]:
        await canary.measure_noise(cluster)
        return await canary.check_start(cluster, 0)

    return asyncio.run(measured())


def test_an_engine_that_follows_passes_and_ends_with_the_true_weights() -> None:
    cluster, canary = make(everything)
    metrics = start(cluster, canary)
    assert metrics == {"sync/canary_difference": 0.0}
    assert (cluster.served.body, cluster.served.head) == (1.0, 1.0)
    assert cluster.sent == [0, 0]


def test_an_engine_that_keeps_its_old_head_stops_the_run_at_start_up_although_the_true_weights_agree() -> None:
    cluster, canary = make(all_but_the_head)
    with pytest.raises(
        ClusterError, match=r"engine 0 does not hold the perturbed weights.*worst at token \d+"
    ) as caught:
        start(cluster, canary)
    assert "tolerance 0.001" in str(caught.value)
    assert (cluster.trained.body, cluster.trained.head) == (1.0, 1.0)  # restored all the same


def test_tensors_are_perturbed_a_run_at_a_time_and_the_message_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.cluster.canary.RUN_TENSORS", 1)
    cluster, canary = make(all_but_the_head)
    with pytest.raises(ClusterError, match="perturbed weights at start-up, head to head:"):
        start(cluster, canary)
    assert cluster.sent == [0, 0]
    cluster, canary = make(everything)
    start(cluster, canary)
    assert cluster.sent == [0, 0, 0]


def test_a_stale_engine_is_named_with_its_worst_token_and_both_values() -> None:
    cluster, canary = make(everything)
    start(cluster, canary)
    cluster.trained.head = 2.0
    with pytest.raises(ClusterError) as caught:
        asyncio.run(canary.check(cluster, 7))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "weights of version 7" in message
    assert "learner -1.98" in message  # the largest token id, 49, at head 2
    assert "engine -1.49" in message


def test_what_the_learners_own_type_costs_is_no_disagreement() -> None:
    cluster, canary = make(everything, rounding=0.07)  # engine and learner differ by 0.14
    assert start(cluster, canary) == {"sync/canary_difference": pytest.approx(0.14)}
    assert canary.tolerance == pytest.approx(0.21)


@pytest.mark.parametrize(("rounding", "wrong"), [(0.0, 0.002), (0.07, 0.2)])
def test_a_difference_that_this_models_rounding_does_not_explain_stops_the_run(rounding: float, wrong: float) -> None:
    cluster, canary = make(everything, rounding=rounding)
    cluster.served.body += wrong
    with pytest.raises(ClusterError, match=r"engine 0 disagree on the untouched weights.*worst at token"):
        asyncio.run(canary.measure_noise(cluster))  # type: ignore[arg-type]


def test_nan_never_passes() -> None:
    cluster, canary = make(everything)
    start(cluster, canary)
    cluster.trained.head = float("nan")
    with pytest.raises(ClusterError, match="nan"):
        asyncio.run(canary.check(cluster, 1))  # type: ignore[arg-type]


def test_the_sequences_are_the_shortest_prompts_each_with_a_response_that_the_engine_samples() -> None:
    cluster, _ = make(everything)
    canary = Canary(PROMPTS[::-1], dtype="float32", max_tokens=40)
    asyncio.run(canary.measure_noise(cluster))  # type: ignore[arg-type]
    assert len(canary.sequences) == SEQUENCES
    assert all(len(s) == 39 for s in canary.sequences)
    assert canary.sequences[3].tolist() == [0, 1, 2, 3, 4, 5, *range(49, 16, -1)]
