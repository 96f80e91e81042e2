"""The message with which a config is refused."""

from __future__ import annotations

import pytest

from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config


def refusal(file: str, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(GRPOConfig, [file], overrides)
    return str(caught.value)
