"""Qwen 3.5 to 3.8 as they are released, cut down: three GRPO steps with the canary, what comes out, and vLLM with that.

vLLM's class imports torchvision; tests/stand_ins has the names where no build for CPU is installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from model_families import NOT_LOADED, write_family
from safetensors.torch import load_file
from test_stack_families import LENGTHS, Engine, prepare_for_vllm
from worlds import run_world

from rlhf.algo.packing import pack
from rlhf.check.model_shape import NOT_LOADED as NOT_TRAINED
from rlhf.config.sections import ModelConfig
from rlhf.learner.policy_model import DeviceTokens, load_policy
from rlhf.types import World
from tools.model_table import stack_result

pytestmark = [pytest.mark.stack, pytest.mark.faults]

AGREEMENT = 0.03  # mean |log-prob difference|; measured: 0.006, and 0.09 from the start model


def learner_logprobs(folder: Path, sequences: list[np.ndarray]) -> np.ndarray:
    """float32 log-probs of all tokens but the first of each sequence, from one packed row."""
    policy = load_policy(ModelConfig(path=str(folder), dtype="float32"), temperature=1.0)
    row = pack(sequences)
    with torch.no_grad():
        logprobs = policy(DeviceTokens.of(row, torch.device("cpu"))).logprobs.numpy()
    return np.concatenate([part[1:] for part in np.split(logprobs, row.cu_seqlens[1:-1])])


def differences(_: World, export: Path, start: Path) -> list[float]:
    """Mean |log-prob difference| of vLLM, which has the export in bfloat16, from the learner, in float32, with the
    export, and with the start model."""
    prepare_for_vllm()
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 256, length).astype(np.int32) for length in LENGTHS]
    engine = np.concatenate([logprobs[1:] for logprobs in Engine(export, dtype="bfloat16").logprobs(sequences)])
    return [float(np.abs(engine - learner_logprobs(folder, sequences)).mean()) for folder in (export, start)]


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
    ((difference, moved),) = run_world(differences, 1, tmp_path / "run" / "model", start)
    assert difference < AGREEMENT < moved
