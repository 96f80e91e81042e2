"""A response ends at its truncate token: later tokens are removed, and its finish reason is stop."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rlhf import quickstart
from rlhf.config.sections import RolloutConfig
from rlhf.data.model_files import truncate_token_id
from rlhf.rollout.requests import Completion, SamplingSettings
from rlhf.types import VersionSpan

SAMPLED = Completion(
    token_ids=np.array([5, 9, 5, 9, 7], np.int32),
    logprobs=np.array([-0.1, -0.2, -0.3, -0.4, -0.5], np.float32),
    finish_reason="length",
    version_spans=(VersionSpan(0, 3, 7), VersionSpan(3, 5, 8)),
)


@pytest.mark.parametrize(
    ("after", "ids", "spans"),
    [
        (0, [5, 9], (VersionSpan(0, 2, 7),)),
        (1, [5, 9], (VersionSpan(0, 2, 7),)),
        (2, [5, 9, 5, 9], (VersionSpan(0, 3, 7), VersionSpan(3, 4, 8))),
    ],
)
def test_a_response_is_cut_after_its_first_truncate_token_from_the_position_on(
    after: int, ids: list[int], spans: tuple[VersionSpan, ...]
) -> None:
    cut = SamplingSettings(1.0, 5, truncate_token=9, truncate_after=after).truncated(SAMPLED)
    assert cut.token_ids.tolist() == ids
    np.testing.assert_array_equal(cut.logprobs, SAMPLED.logprobs[: len(ids)])
    assert cut.version_spans == spans
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(("token", "after"), [(4, 0), (9, 4)])
def test_a_response_without_a_truncate_token_is_unchanged(token: int, after: int) -> None:
    assert SamplingSettings(1.0, 5, truncate_token=token, truncate_after=after).truncated(SAMPLED) is SAMPLED


@pytest.mark.parametrize(
    ("after", "graded", "reason"), [(0, [5, 9], "stop"), (2, [5, 9, 5, 9], "stop"), (4, [5, 9, 5, 9, 7], "length")]
)
def test_where_only_the_graded_text_is_cut_all_tokens_are_trained_and_the_token_says_whether_it_stopped(
    after: int, graded: list[int], reason: str
) -> None:
    settings = SamplingSettings(1.0, 5, truncate_token=9, truncate_after=after, whole=True)
    trained = settings.truncated(SAMPLED)
    assert trained == dataclasses.replace(SAMPLED, finish_reason=reason)
    assert settings.graded(trained.token_ids).tolist() == graded


def test_where_responses_are_cut_what_is_trained_is_what_is_graded() -> None:
    cutting = SamplingSettings(1.0, 5, truncate_token=9)
    assert cutting.truncated(SAMPLED).token_ids.tolist() == [5, 9]
    for settings in (cutting, SamplingSettings(1.0, 5)):
        assert settings.graded(SAMPLED.token_ids) is SAMPLED.token_ids
    assert SamplingSettings(1.0, 5).truncated(SAMPLED) is SAMPLED


def rollout(token: str | None) -> RolloutConfig:
    sizes: Any = {"prompts_per_step": 1, "samples_per_prompt": 1, "max_response_tokens": 8}
    return RolloutConfig(**sizes, truncate_token=token)


def test_the_truncate_token_is_one_token_of_the_model() -> None:
    tokenizer = quickstart.make_tokenizer()
    token_id = truncate_token_id(rollout("."), tokenizer)
    assert token_id is not None
    assert tokenizer.decode([token_id]) == "."
    assert truncate_token_id(rollout(None), tokenizer) is None
    with pytest.raises(ValueError, match=r"rollout\.truncate_token='ab'.*\b2 tokens\b"):
        truncate_token_id(rollout("ab"), tokenizer)
