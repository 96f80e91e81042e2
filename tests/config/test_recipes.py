"""The recipes of configs/: each loads, is planned in under a second of CPU time, and has its paper's values."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf import grpo, ppo
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOAlgoConfig, PPOConfig
from rlhf.config.reward import RewardConfig
from rlhf.config.run import GRPOConfig
from rlhf.config.sections import AlgoConfig, LearnerConfig, RolloutConfig

ROOT = Path(__file__).parents[2]

# files -> the paper, and the value of each key that the paper gives
RECIPES: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {
    ("dapo.yaml",): (
        "2503.14476",
        {
            "rollout.prompts_per_step": 512, "rollout.samples_per_prompt": 16, "learner.minibatches_per_epoch": 16,
            "learner.optimizer.lr": 1e-6, "learner.schedule.name": "constant",
            "learner.schedule.warmup_steps": 20 * 16, "algo.clip_low": 0.2, "algo.clip_high": 0.28,
            "algo.loss_aggregation": "token_mean", "algo.advantage": "grpo", "algo.kl_coef": 0.0,
            "rollout.dynamic_sampling": True, "rollout.dynamic_sampling_part": "math",
            "rollout.max_response_tokens": 16_384 + 4096, "rollout.temperature": 1.0,
            "evaluation.samples_per_prompt": 32, "model.path": "Qwen/Qwen2.5-32B",
        },
    ),
    ("dapo.yaml", "cispo.yaml"): (
        "2506.13585",
        {
            "algo.policy_loss": "cispo", "algo.clip_low": 1.0, "algo.kl_coef": 0.0, "learner.optimizer.eps": 1e-15,
            "learner.optimizer.betas": (0.9, 0.95), "learner.minibatches_per_epoch": 16,
            "rollout.dynamic_sampling": True, "model.path": "Qwen/Qwen2.5-32B",
        },
    ),
    ("dr_grpo.yaml",): (
        "2503.20783",
        {
            "algo.advantage": "dr_grpo", "algo.loss_aggregation": "constant", "algo.constant_length": 3000,
            "rollout.max_response_tokens": 3000, "rollout.prompts_per_step": 128, "rollout.samples_per_prompt": 8,
            "learner.minibatches_per_epoch": 8, "learner.epochs_per_step": 1, "learner.optimizer.lr": 1e-6,
            "learner.optimizer.betas": (0.9, 0.95), "learner.optimizer.weight_decay": 0.0,
            "learner.max_grad_norm": 1.0, "learner.schedule.name": "constant", "algo.clip_low": 0.2,
            "algo.clip_high": 0.2, "algo.kl_coef": 0.0, "data.template": "qwen-math", "rollout.temperature": 1.0,
            "evaluation.temperature": 0.0, "model.path": "Qwen/Qwen2.5-Math-7B",
        },
    ),
    ("dr_grpo.yaml", "reinforce_pp.yaml"): (
        "2501.03262",
        {
            "algo.advantage": "reinforce_pp_baseline", "algo.kl_estimator": "k2", "algo.kl_place": "loss",
            "algo.clip_low": 0.2, "algo.clip_high": 0.2, "algo.loss_aggregation": "token_mean",
        },
    ),
    ("rloo.yaml",): (
        "2402.14740",
        {
            "algo.advantage": "rloo", "rollout.samples_per_prompt": 4, "algo.loss_aggregation": "constant",
            "algo.constant_length": 1, "algo.kl_estimator": "k1", "algo.kl_place": "reward", "algo.kl_coef": 0.03,
            "learner.optimizer.lr": 1e-6, "learner.schedule.name": "constant",
            "learner.schedule.warmup_fraction": 0.03, "learner.epochs_per_step": 1,
        },
    ),
    ("gspo.yaml",): (
        "2507.18071",
        {
            "algo.policy_loss": "gspo", "algo.clip_low": 3e-4, "algo.clip_high": 4e-4, "algo.advantage": "grpo",
            "algo.loss_aggregation": "sequence_mean", "learner.minibatches_per_epoch": 4, "algo.kl_coef": 0.0,
        },
    ),
    ("ppo_math.yaml",): (
        "2503.24290",
        {
            "algo.gamma": 1.0, "algo.lam": 1.0, "algo.kl_coef": 0.0, "algo.clip_low": 0.2, "algo.clip_high": 0.2,
            "rollout.prompts_per_step": 128, "rollout.samples_per_prompt": 64, "learner.minibatches_per_epoch": 1,
            "learner.epochs_per_step": 1, "learner.optimizer.lr": 1e-6, "critic.optimizer.lr": 5e-6,
            "learner.optimizer.betas": (0.9, 0.95), "critic.optimizer.betas": (0.9, 0.95),
            "learner.optimizer.weight_decay": 0.0, "learner.schedule.warmup_steps": 50,
            "critic.schedule.warmup_steps": 50, "learner.schedule.name": "constant", "algo.whiten_advantages": True,
            "rollout.temperature": 1.0, "critic.minibatches_per_epoch": 12,
        },
    ),
    ("ppo_rlhf.yaml",): (
        "1909.08593",
        {
            "learner.optimizer.variant": "tensorflow", "learner.optimizer.lr": 1e-5, "learner.optimizer.eps": 1e-5,
            "critic.optimizer.variant": "tensorflow", "critic.optimizer.lr": 1e-5, "critic.optimizer.eps": 1e-5,
            "learner.optimizer.betas": (0.9, 0.999), "learner.max_grad_norm": None, "critic.max_grad_norm": None,
            "learner.schedule.name": "linear", "learner.schedule.min_lr": 0.0, "algo.kl_controller": "adaptive",
            "algo.kl_estimator": "k1", "algo.kl_place": "reward", "algo.kl_coef": 0.15, "algo.kl_target": 6.0,
            "algo.kl_horizon": 10_000, "algo.gamma": 1.0, "algo.lam": 0.95, "algo.clip_low": 0.2,
            "algo.clip_high": 0.2, "critic.value_clip": 0.2, "algo.whiten_rewards": "scale",
            "algo.whiten_advantages": True, "rollout.prompts_per_step": 512, "rollout.samples_per_prompt": 1,
            "learner.epochs_per_step": 4, "learner.minibatches_per_epoch": 1, "rollout.temperature": 0.7,
            "data.max_prompt_tokens": 64, "rollout.max_response_tokens": 24, "rollout.non_stop_reward": -1.0,
            "rollout.truncate_token": ".", "rollout.truncate_after": 16, "run.steps": 1_000_000 // 512,
        },
    ),
}  # fmt: skip
IDS = [" ".join(files) for files in RECIPES]


def is_ppo(files: tuple[str, ...]) -> bool:
    return files[0].startswith("ppo")


def load(files: tuple[str, ...]) -> GRPOConfig:
    schema = PPOConfig if is_ppo(files) else GRPOConfig
    return load_config(schema, [str(ROOT / "configs" / file) for file in files])


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(("files", "paper", "values"), [(f, *rest) for f, rest in RECIPES.items()], ids=IDS)
def test_a_recipe_has_the_values_of_its_paper_and_names_it(
    files: tuple[str, ...], paper: str, values: dict[str, Any]
) -> None:
    config = load(files)
    assert {key: value_of(config, key) for key in values} == values
    header = (ROOT / "configs" / files[-1]).read_text()
    assert f"arXiv:{paper}" in header.split("\n\n")[0]
    assert not config.warnings


@pytest.mark.parametrize("files", [*RECIPES, ("tulu3_8b_math.yaml",)], ids=[*IDS, "tulu3_8b_math.yaml"])
def test_a_recipe_corrects_as_its_paper_does_which_is_not_at_all(files: tuple[str, ...]) -> None:
    assert load(files).algo.importance_correction == "none"


@pytest.mark.parametrize("files", RECIPES, ids=IDS)
def test_a_recipe_is_planned_in_under_a_second(files: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [part for file in files for part in ("--config", str(ROOT / "configs" / file))]
    began = time.process_time()
    (ppo if is_ppo(files) else grpo).main([*arguments, "--plan"])
    assert time.process_time() - began < 1.0
    output = capsys.readouterr().out
    assert re.search(r"^  optimizer steps, learner +[\d,]+ steps", output, re.MULTILINE)


def test_the_command_of_each_recipe_names_its_files() -> None:
    for files in RECIPES:
        header = (ROOT / "configs" / files[-1]).read_text()
        program = "rlhf.ppo" if is_ppo(files) else "rlhf.grpo"
        named = " ".join(f"--config configs/{file}" for file in files)
        assert f"python -m {program} {named}" in header


def test_dapos_rewards_are_one_and_minus_one_up_to_a_shift_and_the_published_overlong_penalty() -> None:
    """Section 4.1 and equation 13: right and wrong are 2 apart, and the last 4,096 of 20,480 tokens cost up to 1."""
    from rlhf.config.reward import LengthOptions
    from rlhf.rewards.shaping import length_reward

    math, length = load(("dapo.yaml",)).reward.parts
    assert (math.name, math.weight, math.options["mode"]) == ("math", 2.0, "strict")
    options = LengthOptions(**length.options)
    assert [length_reward(n, options) for n in (16_384, 18_432, 20_480)] == [0.0, -0.5, -1.0]
    assert length.weight == 1.0


# --- docs/algorithms.md ---

PAGE = ROOT / "docs/algorithms.md"
SECTIONS = {"algo": AlgoConfig, "learner": LearnerConfig, "reward": RewardConfig, "rollout": RolloutConfig}
NEEDED = {"rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 9}}


def test_the_keys_that_the_page_gives_for_a_recipe_are_keys() -> None:
    lines = re.findall(r"^    ((?:algo|learner|reward|rollout): [{\[].*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        ((name, values),) = yaml.safe_load(line).items()
        schema = PPOAlgoConfig if "gamma" in values else SECTIONS[name]
        given = values if name == "reward" else {**NEEDED.get(name, {}), **values}
        assert schema.model_validate_json(json.dumps(given))


def test_the_page_links_to_what_is_there_and_shows_its_pictures() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    here = [t for t in targets if not t.startswith("https://")]
    assert [t for t in here if not (PAGE.parent / t).exists()] == []
    pictures = [PAGE.parent / t for t in targets if t.endswith(".png")]
    assert {path.stem for path in pictures} >= {"adam", "kl", "schedule", "algorithms"}
    assert all(path.stat().st_size < 150_000 for path in pictures)
