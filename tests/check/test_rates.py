"""Learning rates that are told before a run: those that train nothing, and those that break a pretrained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from worlds import make_config, make_ppo_config

from rlhf.check.start_checks import dtype_warnings, learning_rate_warnings
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.supervised import SFTConfig

HALF_A_BILLION, ONE_AND_A_HALF = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B"


def config_of(program: str, model: str, lr: float, lora: bool = False, **keys: Any) -> TrainingProgramConfig:
    """`keys`: run.steps and learner.schedule; the rate is that of the learner, in ppo that of the critic."""
    learner = {"optimizer": {"lr": lr}, "schedule": keys.get("schedule", {}), "max_tokens_per_microbatch": 4096}
    sections: dict[str, Any] = {
        "run": {"dir": "runs/mine", "steps": keys.get("steps", 10)},
        "model": {"path": model, "dtype": "float32", "lora": {"rank": 8} if lora else None},
        "critic" if program == "ppo" else "learner": learner,
    }
    if program == "ppo":
        del learner["max_tokens_per_microbatch"]
        return make_ppo_config(Path(model), **sections)
    if program == "grpo":
        return make_config(Path(model), **sections)
    schema = {"sft": SFTConfig, "reward_model": RewardTrainingConfig}[program]
    sections |= {"data": {"train": "x.jsonl"}, "cluster": {"device": "cpu"}}
    return schema.model_validate_json(json.dumps(sections))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (("grpo", ONE_AND_A_HALF, 2e-4), ["learner.optimizer.lr=0.0002: above 0.0001", "1,544 M weights", "1e-6, or"]),
        (("grpo", ONE_AND_A_HALF, 1e-4), []),
        (("grpo", ONE_AND_A_HALF, 2e-4, True), []),  # adapters
        (("grpo", "no/model", 1.0), []),  # of a size that is not known
        (("ppo", HALF_A_BILLION, 2e-4, True), ["critic.optimizer.lr=0.0002: above 0.0001", "to about 1e-5."]),
        (("reward_model", HALF_A_BILLION, 2e-4), ["learner.optimizer.lr=0.0002: above 0.0001"]),
        (("sft", HALF_A_BILLION, 1e-3), []),
        (("sft", ONE_AND_A_HALF, 1e-3), ["learner.optimizer.lr=0.001: above 0.0003", "to about 1e-5, or"]),
        (("sft", HALF_A_BILLION, 2e-3), ["learner.optimizer.lr=0.002: above 0.001"]),
        (("sft", HALF_A_BILLION, 0.0), ["learner.optimizer.lr=0: no update changes the model"]),
        (("ppo", "no/model", 0.0, True), ["critic.optimizer.lr=0: no update changes the critic"]),
    ],
)  # fmt: skip
def test_rates_of_0_and_those_that_break_a_pretrained_model_are_told(
    settings: tuple[Any, ...], parts: list[str]
) -> None:
    told = [*learning_rate_warnings(config_of(*settings))]
    assert len(told) == bool(parts)
    for part in parts:
        assert part in told[0]


def test_a_schedule_that_leaves_a_rate_of_0_or_stays_above_the_bound_is_told() -> None:
    (told,) = learning_rate_warnings(config_of("grpo", "no/model", 1e-6, steps=1, schedule={"name": "linear"}))
    assert told.startswith(
        "learner.schedule.name=linear with learner.schedule.min_lr=0: the run has 1 update, all with"
    )
    assert [*learning_rate_warnings(config_of("grpo", "no/model", 1e-6, steps=2, schedule={"name": "linear"}))] == []
    schedule = {"name": "cosine", "min_lr": 1.5e-4}
    (told,) = learning_rate_warnings(config_of("grpo", ONE_AND_A_HALF, 2e-4, schedule=schedule))
    assert told.startswith("learner.optimizer.lr=0.0002 and learner.schedule.min_lr=0.00015: above 0.0001 ")


@pytest.mark.parametrize(
    ("flags", "dtype", "is_told"),
    [
        ("fma avx2", "bfloat16", True),
        ("fma avx2", "float32", False),
        ("avx2 avx512f", "bfloat16", False),
        ("asimd bf16", "bfloat16", False),
    ],
)
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str, is_told: bool
) -> None:
    monkeypatch.setattr("rlhf.check.start_checks.CPU_FLAGS", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    told = [*dtype_warnings(make_config(Path("no/model"), model={"dtype": dtype}))]
    assert [text.partition(":")[0] for text in told] == ["model.dtype=bfloat16"] * is_told
