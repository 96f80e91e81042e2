"""What is free on shared GPUs when the learners have loaded, against what the engines and the updates will need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from worlds import make_config, make_ppo_config

from rlhf.check.memory import GIB, check_shared_gpus
from rlhf.types import GPUMemory

LLAMA31_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def colocated(folder: Path, make: Any = make_config) -> Any:
    (folder / "config.json").write_text(json.dumps(LLAMA31_8B))
    return make(
        folder,
        model={"dtype": "bfloat16", "gradient_checkpointing": True},
        rollout={"gpu_memory_utilization": 0.75},
        cluster={"device": "cuda", "placement": "colocated", "learners": 8, "engines": 4, "tensor_parallel": 2},
    )


def ranks(free: float, *, away: float = 11.3) -> list[GPUMemory]:
    """Eight GPUs of 79 GiB; the last has the least that is free."""
    return [GPUMemory(79 * GIB, int((free + rank) * GIB), int(away * GIB)) for rank in range(7, -1, -1)]


def test_an_engine_starts_beside_learners_that_keep_only_their_weights(tmp_path: Path) -> None:
    assert check_shared_gpus(colocated(tmp_path), {"learner": ranks(62)}) == []


def test_an_engine_that_would_find_too_little_is_refused_with_the_share_that_fits(tmp_path: Path) -> None:
    # 79 - 50 are held and 1 is for the canary: 49 of 79 GiB are left
    with pytest.raises(ValueError, match=r"utilization=0\.75 x 79 GiB .*\b30\.0 GiB\b.*\b0\.62\b"):
        check_shared_gpus(colocated(tmp_path), {"learner": ranks(50)})


def test_policy_and_critic_are_judged_each_for_its_own_turn(tmp_path: Path) -> None:
    config = colocated(tmp_path, make_ppo_config)
    assert check_shared_gpus(config, {"learner": ranks(62), "critic": ranks(61)}) == []
    (warning,) = check_shared_gpus(config, {"learner": ranks(62), "critic": ranks(61, away=60.0)})
    assert warning.startswith("memory: on a shared GPU a critic")
    assert "next to 18.0 GiB" in warning
