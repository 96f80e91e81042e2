"""Fakes for the canary: learner and engines that compute from a few weights, and what a transfer does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rlhf.cluster.actors import record_call
from rlhf.sampling.requests import Completion, SamplingSettings
from rlhf.types import Prompt

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


class FakeEngines:
    """Learners and engines that hold weights; `transfer` says what a transfer carries over."""

    sleeps = False

    def __init__(self, transfer: Any, *, rounding: float = 0.0) -> None:
        self.trained, self.served = Weights(rounding), Weights(-rounding)
        self.saved = (1.0, 1.0)
        self.transfer = transfer
        self.sent: list[int] = []
        self.asleep = False
        self.learners, self.group = Side(self, self.trained), Side(self, self.served)

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        match method:
            case "tensor_names":
                return [["body", "head"]]
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
        self.asleep = False
        self.transfer(self.trained, self.served)

    async def sleep_if_colocated(self) -> None:
        self.asleep = self.sleeps

    async def wake_if_asleep(self, version: int) -> bool:
        slept = self.asleep
        if slept:
            await self.send_weights(version)
        return slept

    def sample(self, settings: SamplingSettings) -> Completion:
        """The response of the first engine."""
        ids = np.arange(49, 49 - settings.max_tokens, -1, dtype=np.int32)
        return Completion(ids, np.zeros(len(ids)), "length", ())

    def sample_everywhere(self, beginning: np.ndarray, settings: SamplingSettings) -> list[Completion]:
        """The response of each engine, with its log-probs."""
        completion = self.sample(settings)
        (logprobs,) = self.served.logprobs([np.concatenate([beginning, completion.token_ids])])
        return [replace(completion, logprobs=logprobs[len(beginning) :])]


class Side:
    """One side, so that `canary` is asked of the right weights."""

    def __init__(self, both: FakeEngines, weights: Weights) -> None:
        self.both, self.weights = both, weights

    async def call(self, ask: Callable[[Any], Any]) -> list[Any]:
        method, *arguments = record_call(ask)
        if method == "canary":
            return [self.weights.logprobs(*arguments[:2])]
        if method == "generate":
            assert not self.both.asleep
            return [[completion] for completion in self.both.sample_everywhere(*arguments[:2])]
        return await self.both.call(method, *arguments)

    async def call_one(self, rank: int, ask: Callable[[Any], Any], *, what: str) -> list[Completion]:
        method, _, settings, samples, _ = record_call(ask)
        assert (rank, method, settings.temperature, samples) == (0, "generate", 1.0, 1)
        return [self.both.sample(settings)]


def everything(trained: Weights, served: Weights) -> None:
    served.body, served.head = trained.body, trained.head


def all_but_the_head(trained: Weights, served: Weights) -> None:
    served.body = trained.body
