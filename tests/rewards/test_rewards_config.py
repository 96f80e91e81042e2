"""The reward section: both spellings, and the messages for invalid values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf.config.reward import OPTIONS_OF_REWARD, RewardConfig
from rlhf.rewards.registry import REWARDS


def load(value: Any) -> RewardConfig:
    return RewardConfig.model_validate_json(json.dumps(value))


def test_the_default_reward_is_strict_math() -> None:
    (part,) = RewardConfig().parts
    assert (part.name, part.weight, part.options) == ("math", 1.0, {})


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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"name": "maht"}], r"reward\.parts\.0\.name='maht': .* math\?"),
        (["math", {"name": "a.b"}], r"reward\.parts\.1\.name='a\.b': .*no such reward"),
        ([{"name": "a b:c"}], "package.module:function"),
        (
            [{"name": "math", "mod": "strict"}],
            r"parts\.0\.mod=strict: .*no such key.* reward\.parts\.0\.mode",
        ),
        ([{"name": "math", "mode": "loose"}], r"reward\.parts\.0\.mode=loose: .*'strict' or 'lenient'"),
        ([{"name": "format", "pattern": "("}], r"reward\.parts\.0\.pattern: '\(' .*regular expression"),
        ([{"name": "length", "max_tokens": 5, "min_tokens": 9}], r"reward\.parts\.0: .*exceed max_tokens"),
        ([{"name": "math", "weight": "1"}], r"reward\.parts\.0\.weight=\"1\": .* reward\.parts\.0\.weight=1\."),
        ([{"name": "rubric", "url": "http://h/v1", "model": "m"}], r"reward\.parts\.0: .*exactly one of criteria"),
        (
            {"parts": [{"name": "code", "cpu_seconds": 20}], "wall_seconds": 30},
            r"code: cpu_seconds=20 allows 40 s by the clock, and reward\.wall_seconds=30 ends all tests before",
        ),
        (["math", "math"], r"reward\.parts\.1\.name='math': named twice"),
        ({"parts": "math"}, "reward.parts=.math.: not a list"),
        ({"by_source": {"x": ["maht"]}}, r"reward\.by_source\.x\.0\.name='maht'"),
        ({"by_source": ["math"]}, "not a mapping"),
    ],
)
def test_an_invalid_section_is_refused_with_key_value_reason_and_remedy(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(value)
