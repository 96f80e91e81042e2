"""--plan of rlhf.sft and rlhf.reward_model: the same memory and rates as for GRPO, from rows and bytes of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf import reward_model, sft
from rlhf.check import speed
from rlhf.check.hours import update_time
from rlhf.check.layouts import first_problem
from rlhf.check.memory import learner_memory, memory_of_roles, total
from rlhf.check.model_shape import ModelShape, read_shape
from rlhf.check.report import Examples
from rlhf.check.speed import Lengths
from rlhf.check.verdict import Verdict, fit_verdict
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.supervised import SFTConfig

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """1,000 rows of 400 bytes, two learners."""
    row = json.dumps({"prompt": "?", "completion": "a", "chosen": "a", "rejected": ""})
    (tmp_path / "rows.jsonl").write_text((row[:-2] + "x" * (399 - len(row)) + row[-2:] + "\n") * 1000)
    base = {
        "run": {"dir": str(tmp_path / "run"), "epochs": 2},
        "model": {"path": MODEL},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_tokens": 1024},
        "cluster": {"learners": 2},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))

    def build(schema: Any, *overrides: str) -> Any:
        return load_config(schema, [str(tmp_path / "base.yaml")], overrides)

    return build


def test_the_mean_length_is_that_of_the_bytes_of_a_row(make: Any, tmp_path: Path) -> None:
    assert Examples.of(make(SFTConfig))[:2] == (1000, 100)  # 400 bytes / 4
    assert Examples.of(make(RewardTrainingConfig))[:2] == (1000, 50)  # of each of two sides
    assert Examples.of(make(SFTConfig, "data.max_tokens=64"))[:2] == (1000, 64)
    assert Examples.of(make(SFTConfig, "data.train=some/set"))[:2] == (None, 1024)
    with pytest.raises(ValueError, match=r"^data\.train=.*no\.jsonl: there is no such file"):
        Examples.of(make(SFTConfig, f"data.train={tmp_path / 'no.jsonl'}"))


def test_a_learner_takes_the_memory_of_one_of_grpo_and_a_reward_model_has_no_logits(make: Any, tmp_path: Path) -> None:
    shape, supervised, pairs = read_shape(MODEL), make(SFTConfig), make(RewardTrainingConfig)
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump({
        "run": {"dir": "x", "steps": 1}, "model": {"path": MODEL}, "learner": {"max_tokens_per_microbatch": 16384},
        "data": {"train": "x.jsonl", "max_prompt_tokens": 960}, "cluster": {"learners": 2},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_response_tokens": 64},
    }))  # fmt: skip
    grpo = load_config(GRPOConfig, [str(tmp_path / "grpo.yaml")], [])
    assert learner_memory(shape, supervised) == learner_memory(shape, grpo)
    assert not [part for part in learner_memory(shape, pairs) if "logits" in part.name]
    adapted = make(SFTConfig, "model.lora.rank=8")
    assert total(learner_memory(shape, adapted)) < total(learner_memory(shape, supervised))


def test_an_update_takes_the_seconds_of_its_tokens(make: Any) -> None:
    shape, config = read_shape(MODEL), make(SFTConfig, "learner.zero_stage=1")
    time = update_time(config, shape, 100)
    assert time is not None
    assert time.update == pytest.approx(64 * 100 / 2 * speed.compute_s(shape, config, Lengths(0, 100)))
    gradients, weights = 2 * 4 * shape.parameters / 2, 2 * shape.parameters / 2  # float32 twice, bfloat16 once
    assert time.sending == pytest.approx((gradients + weights) / 300e9, rel=0.6)
    pairs = update_time(make(RewardTrainingConfig, "learner.zero_stage=1"), shape, 100)
    assert pairs is not None
    assert time.update < pairs.update < 2 * time.update  # two sides, without logits
    assert update_time(make(SFTConfig, "cluster.device=cpu", "model.dtype=float32"), shape, 100) is None


def test_what_does_not_fit_names_keys_that_do(make: Any) -> None:
    def supervised_verdict(config: SFTConfig, shape: ModelShape, tokens: int) -> Verdict:
        return fit_verdict(config, shape, memory_of_roles(config, shape), lambda c: update_time(c, shape, tokens))

    shape, config = read_shape("Qwen/Qwen3-8B"), make(SFTConfig, "model.path=Qwen/Qwen3-8B", "run.steps=32")
    ((says, keys),) = supervised_verdict(config, shape, 100).sentences
    assert says.startswith("does not fit: a learner needs ")
    assert "learner.offload_optimizer=true" in keys.split()
    assert first_problem(make(SFTConfig, "model.path=Qwen/Qwen3-8B", *keys.split()), shape) is None
    alone = make(SFTConfig, "model.path=Qwen/Qwen3-8B", "cluster.learners=1", "cluster.gpu_memory_gib=24")
    ((_, keys),) = supervised_verdict(alone, shape, 9).sentences
    assert "model.lora.rank=32" in keys
    huge = supervised_verdict(make(SFTConfig, "cluster.gpu_memory_gib=1"), shape, 9)
    assert huge.config is None
    assert "Use a smaller model" in huge.text


@pytest.mark.parametrize(("program", "kind"), [(sft, "sequences"), (reward_model, "pairs")])
def test_the_plan_of_the_program_is_a_gate(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], program: Any, kind: str
) -> None:
    flags = ["--config", str(tmp_path / "base.yaml"), "--plan", "model.gradient_checkpointing=true"]
    program.main(flags)
    text = capsys.readouterr().out
    assert text.startswith("fits: a learner ")
    assert "1,000 rows / 64 = 16 optimizer steps per pass" in text
    assert "32 = 2.00 passes" in text
    assert f"learner.{kind}_per_update=64" in text
    (tmp_path / "other.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"^data\.train: row 1 of .*other\.jsonl: it has no `(prompt|chosen)`, only"):
        program.main([*flags, f"data.train={tmp_path / 'other.jsonl'}"])
    assert capsys.readouterr().out.startswith("would not start: data.train: row 1 of")
    with pytest.raises(ValueError, match=r"^data\.train=no\.jsonl: there is no such file"):
        program.main([*flags, "data.train=no.jsonl"])
    assert capsys.readouterr().out.startswith("would not start: data.train=no.jsonl")
