"""The reward section: both spellings, and the messages for invalid values."""

from __future__ import annotations

import json
from typing import Any

from rlhf.config.reward import OPTIONS_OF_REWARD, RewardConfig
from rlhf.rewards.registry import REWARDS


def load(value: Any) -> RewardConfig:
    return RewardConfig.model_validate_json(json.dumps(value))


def test_a_list_and_a_mapping_mean_the_same() -> None:
    parts = [{"name": "math", "mode": "lenient"}, {"name": "format", "weight": 0.1, "style": "think"}]
    assert load(parts) == load({"parts": parts})


def test_a_dumped_config_loads_to_the_same_config() -> None:
    config = load({"parts": ["math", "a.b:c"], "by_source": {"gsm8k": [{"name": "gsm8k", "weight": 2}]}, "workers": 3})
    assert load(config.model_dump(mode="json")) == config


def test_sources_without_their_own_parts_use_the_common_parts() -> None:
    config = load({"parts": ["math"], "by_source": {"gsm8k": ["gsm8k"]}})
    assert [part.name for part in config.parts_of("gsm8k")] == ["gsm8k"]
    assert [part.name for part in config.parts_of("other")] == ["math"]


def test_the_config_knows_exactly_the_rewards_that_exist() -> None:
    assert set(OPTIONS_OF_REWARD) == {*REWARDS, "rubric"}  # a client of the trainer asks the endpoint
