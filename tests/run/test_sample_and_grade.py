"""What the sampler asks the engines for, and its measure of their speed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from worlds import make_config

from rlhf.rewards.scorer import Scorer
from rlhf.rollout.requests import SamplingSettings
from rlhf.run.sample_and_grade import BusyMeter, Sampler
from rlhf.types import Prompt, RolloutGroup


def test_tokens_that_arrive_during_an_evaluation_are_in_the_rate_of_the_next_step() -> None:
    meter = BusyMeter()
    meter.begin()
    time.sleep(0.01)
    meter.end()
    meter.tokens += 30
    rate, busy_s = meter.take()
    assert busy_s >= 0.01
    assert rate == pytest.approx(30 / busy_s)
    assert meter.take() == (0.0, 0.0)


def test_an_evaluation_set_is_sampled_as_it_asks(tmp_path: Path) -> None:
    sets = [{"path": "a.jsonl"}, {"path": "b.jsonl", "samples_per_prompt": 4, "max_response_tokens": 9}]
    config = make_config(tmp_path / "model", data={"eval": sets}, evaluation={"temperature": 0.5})
    asked: list[tuple[int, float, int]] = []

    class Recording(Sampler):
        async def sample(self, prompt: Prompt, samples: int, settings: SamplingSettings) -> RolloutGroup:
            asked.append((samples, settings.temperature, settings.max_tokens))
            return RolloutGroup(prompt, ())

    engines: Any = SimpleNamespace(engines=SimpleNamespace(actors=[None]), trains=False)
    sampler = Recording(config, engines, cast(Scorer, None), None)
    for source in ("a", "b"):
        asyncio.run(sampler.for_evaluation(Prompt(f"{source}/1", 0, np.ones(1, np.int32), (), "", source)))
    assert asked == [(1, 0.5, config.rollout.max_response_tokens), (4, 0.5, 9)]
