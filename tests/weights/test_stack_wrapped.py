"""Qwen 3.5 to 3.8 as they are released, cut down: three GRPO steps with the canary, and what comes out.

vLLM's class imports torchvision; tests/stand_ins has the names where no build for CPU is installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_families import NOT_LOADED, write_family
from safetensors.torch import load_file

from rlhf.plan.model_shape import NOT_LOADED as NOT_TRAINED
from tools.model_table import stack_result

pytestmark = pytest.mark.stack


def test_a_run_trains_the_text_model_of_qwen_3_5_and_exports_the_rest_as_it_was(tmp_path: Path) -> None:
    start = write_family("qwen3_5", tmp_path / "model")
    result = stack_result("qwen3_5", start)
    assert result["stack"] == "ok"
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "run" / "model"))
    assert before.keys() == after.keys()
    frozen = {name for name in before if NOT_TRAINED.search(name)}
    assert all(after[name].dtype == torch.float32 and torch.equal(before[name], after[name]) for name in frozen)
    matrices = {name for name in before if before[name].ndim > 1} - frozen  # a step may be lost in a norm's rounding
    assert not any(torch.equal(before[name].bfloat16(), after[name]) for name in matrices)
    assert frozen > NOT_LOADED["qwen3_5"].keys()
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
