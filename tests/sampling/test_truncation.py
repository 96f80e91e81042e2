"""The truncate token says whether a response stopped, and up to where it is graded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rlhf.config.sections import RolloutConfig
from rlhf.data.model_files import truncate_token_id
from rlhf.learner import tiny_model
from rlhf.sampling.requests import Completion, SamplingSettings
from rlhf.types import VersionSpan

SAMPLED = Completion(
    token_ids=np.array([5, 9, 5, 9, 7], np.int32),
    logprobs=np.array([-0.1, -0.2, -0.3, -0.4, -0.5], np.float32),
    finish_reason="length",
    version_spans=(VersionSpan(0, 3, 7), VersionSpan(3, 5, 8)),
)


@pytest.mark.parametrize(
    ("token", "after", "graded", "reason"),
    [
        (9, 0, [5, 9], "stop"),
        (9, 2, [5, 9, 5, 9], "stop"),
        (9, 4, [5, 9, 5, 9, 7], "length"),
        (None, 0, [5, 9, 5, 9, 7], "length"),
    ],
)
def test_all_tokens_are_trained_and_graded_up_to_the_first_truncate_token_from_the_position_on(
    token: int | None, after: int, graded: list[int], reason: str
) -> None:
    settings = SamplingSettings(1.0, 5, truncate_token=token, truncate_after=after, whole=True)
    trained = settings.stopped_at_token(SAMPLED)
    assert trained == dataclasses.replace(SAMPLED, finish_reason=reason)
    assert settings.graded(trained.token_ids).tolist() == graded


def rollout(token: str | None) -> RolloutConfig:
    sizes: Any = {"prompts_per_step": 1, "samples_per_prompt": 1, "max_response_tokens": 8}
    return RolloutConfig(**sizes, truncate_token=token)


def test_the_truncate_token_is_one_token_of_the_model() -> None:
    tokenizer = tiny_model.make_tokenizer()
    token_id = truncate_token_id(rollout("."), tokenizer)
    assert token_id is not None
    assert tokenizer.decode([token_id]) == "."
    assert truncate_token_id(rollout(None), tokenizer) is None
    with pytest.raises(ValueError, match=r"rollout\.truncate_token='ab'.*\b2 tokens\b"):
        truncate_token_id(rollout("ab"), tokenizer)
