"""The canary: what a stale or half-updated engine looks like, and that the message names it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rlhf.cluster.actors import ClusterError
from rlhf.types import Prompt
from rlhf.weights.canary import SEQUENCES, Canary

PROMPTS = [Prompt(f"p/{i}", 0, np.arange(i + 3, dtype=np.int32), (), "", "p") for i in range(20)]


class Weights:
    """Two tensors; log-probs are a fixed function of both and of the token."""

    def __init__(self) -> None:
        self.body, self.head = 1.0, 1.0

    def logprobs(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return [np.where(np.arange(len(s)) > 0, -self.body - 0.01 * self.head * s, 0.0) for s in sequences]


class FakeCluster:
    """Learners and engines that hold weights; `transfer` says what a transfer carries over."""

    def __init__(self, transfer: Any) -> None:
        self.trained, self.served = Weights(), Weights()
        self.saved = (1.0, 1.0)
        self.transfer = transfer
        self.sent: list[int] = []
        self.learners = self.engines = self

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        match method:
            case "canary":
                raise AssertionError("told apart below")
            case "perturb_weights":
                self.saved = (self.trained.body, self.trained.head)
                self.trained.body += 0.3
                self.trained.head += 0.3
            case "restore_weights":
                self.trained.body, self.trained.head = self.saved
        return [None]

    async def send_weights(self, version: int) -> None:
        self.sent.append(version)
        self.transfer(self.trained, self.served)


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


def make(transfer: Any) -> tuple[FakeCluster, Canary]:
    cluster = FakeCluster(transfer)
    cluster.learners, cluster.engines = Side(cluster, cluster.trained), Side(cluster, cluster.served)  # type: ignore[assignment]
    return cluster, Canary(PROMPTS, vocabulary=50, dtype="float32", max_tokens=40, seed=0)


def test_an_engine_that_follows_passes_and_ends_with_the_true_weights() -> None:
    cluster, canary = make(everything)
    metrics = asyncio.run(canary.check_start(cluster, 0))  # type: ignore[arg-type]
    assert metrics == {"sync/canary_difference": 0.0}
    assert (cluster.served.body, cluster.served.head) == (1.0, 1.0)
    assert cluster.sent == [0, 0]


def test_an_engine_that_keeps_its_old_head_stops_the_run_at_start_up_although_the_true_weights_agree() -> None:
    cluster, canary = make(all_but_the_head)
    with pytest.raises(
        ClusterError, match=r"engine 0 does not hold the perturbed weights.*worst at token \d+"
    ) as caught:
        asyncio.run(canary.check_start(cluster, 0))  # type: ignore[arg-type]
    assert "tolerance 0.001" in str(caught.value)
    assert (cluster.trained.body, cluster.trained.head) == (1.0, 1.0)  # restored all the same


def test_a_stale_engine_is_named_with_its_worst_token_and_both_values() -> None:
    cluster, canary = make(everything)
    cluster.trained.head = 2.0
    with pytest.raises(ClusterError) as caught:
        asyncio.run(canary.check(cluster, 7))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "weights of version 7" in message
    assert "learner -1.98" in message  # the largest token id, 49, at head 2
    assert "engine -1.49" in message


def test_what_engine_and_learner_differ_by_on_the_same_weights_widens_the_tolerance() -> None:
    cluster, canary = make(everything)
    cluster.served.body += 0.01
    asyncio.run(canary.measure_noise(cluster))  # type: ignore[arg-type]
    assert canary.tolerance == pytest.approx(0.03)


def test_a_difference_on_untouched_weights_that_is_no_rounding_stops_the_run() -> None:
    cluster, canary = make(everything)
    cluster.served.head = 3.0
    with pytest.raises(ClusterError, match=r"disagree on the untouched weights.*worst at token"):
        asyncio.run(canary.measure_noise(cluster))  # type: ignore[arg-type]


def test_nan_never_passes() -> None:
    cluster, canary = make(everything)
    cluster.trained.head = float("nan")
    with pytest.raises(ClusterError, match="nan"):
        asyncio.run(canary.check(cluster, 1))  # type: ignore[arg-type]


def test_the_sequences_begin_like_prompts_and_go_on_over_the_whole_vocabulary() -> None:
    _, canary = make(everything)
    assert len(canary.sequences) == SEQUENCES
    assert all(len(s) == 39 for s in canary.sequences)
    assert canary.sequences[3][:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert len({int(t) for s in canary.sequences for t in s}) > 40
