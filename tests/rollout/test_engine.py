"""An engine's answers: each token has its own log-prob, and a failed update of the weights is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds import ALONE, make_config

from rlhf.rollout.requests import SamplingSettings

pytestmark = pytest.mark.slow

PROMPT = np.arange(5, dtype=np.int32)
SETTINGS = SamplingSettings(1.0, 8)


class FakeVLLM:
    """Answers every request with `outputs`; its workers cannot load weights."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        )

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=self.outputs)

    async def update_weights(self, _: Any) -> None:
        raise RuntimeError("no memory is left for the weights")

    async def check_health(self) -> None:
        pass


@pytest.fixture
def engine_with(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], Any]:
    from rlhf.rollout import engine

    def make(outputs: list[Any]) -> Any:
        monkeypatch.setattr(engine.AsyncLLM, "from_engine_args", lambda *_, **__: FakeVLLM(outputs))
        return engine.RolloutEngine(make_config(tiny_model_dir / "model"), ALONE)

    return make


def answer(token_ids: list[int], logprobs_of: list[int | None]) -> Any:
    """A sampled response, whose log-probs are -1, -2, ... and belong to these tokens; None: a place without any."""
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.outputs import CompletionOutput

    logprobs = FlatLogprobs()
    for place, token in enumerate(logprobs_of, 1):
        logprobs.append(None if token is None else {token: Logprob(-float(place))})
    return CompletionOutput(0, "", token_ids, None, logprobs, finish_reason="stop")


def test_each_token_gets_its_own_logprob(engine_with: Callable[[list[Any]], Any]) -> None:
    (completion,) = asyncio.run(engine_with([answer([7, 8, 9], [7, 8, 9])]).generate(PROMPT, SETTINGS, 1, None))
    assert completion.token_ids.tolist() == [7, 8, 9]
    assert completion.logprobs.tolist() == [-1, -2, -3]


@pytest.mark.parametrize(
    ("logprobs_of", "count"),
    [([7, 8], 2), ([7, 8, 9, 9], 4), ([7, None, 9], 2), ([8, 9, 7], 3), ([], 0)],
    ids=["one too few", "one too many", "a gap", "shifted", "none"],
)
def test_tokens_without_their_own_logprobs_are_refused(
    engine_with: Callable[[list[Any]], Any], logprobs_of: list[int | None], count: int
) -> None:
    engine = engine_with([answer([7, 8, 9], logprobs_of)])
    with pytest.raises(RuntimeError, match=rf"\b3 tokens and log-probs of {count}\b"):
        asyncio.run(engine.generate(PROMPT, SETTINGS, 1, None))


def test_an_engine_that_has_failed_to_load_weights_is_not_healthy(engine_with: Callable[[list[Any]], Any]) -> None:
    async def fail() -> None:
        engine = engine_with([])
        await engine.check_health()
        with pytest.raises(RuntimeError, match=r"^no memory is left for the weights"):
            await engine.update_weights({})
        with pytest.raises(RuntimeError, match=r"update of its weights failed: no memory"):
            await engine.check_health()

    asyncio.run(fail())
