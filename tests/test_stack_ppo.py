"""A learned reward from pairs to policy on the real stack: train the reward model, run PPO with it, resume the run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documented import check_documented
from safetensors.torch import load_file
from test_stack_grpo import CANARY_BOUND, check_account, read_log, read_steps
from waiting import STACK_WAIT_S

from rlhf import export
from rlhf.config.reward_model import RECORD_FILE
from rlhf.learner.tiny_model import BOX_TOKEN
from rlhf.run.folder import RunFolder

pytestmark = pytest.mark.stack

KL_COEF, KL_HORIZON = 0.1, 320
ROLLOUTS = 8 * 4


def run_program(module: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True, text=True, timeout=STACK_WAIT_S, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def write(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


def reward_config(folder: Path, data: Path) -> dict[str, Any]:
    for name, rows in (("train", 64), ("test", 32)):
        lines = (data / f"pairs_{name}.jsonl").read_text().splitlines()[:rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "run": {"dir": str(folder / "reward")},
        "model": {"path": str(data / "model"), "dtype": "float32"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "test.jsonl"),
            "max_tokens": 128,
            "template": "qa",
        },
        "learner": {"pairs_per_update": 32, "max_tokens_per_microbatch": 1024, "optimizer": {"lr": 1e-3}},
        "cluster": {"device": "cpu"},
        "logging": {"wandb": {"mode": "disabled"}},
    }


def train_reward_model(folder: Path, data: Path) -> Path:
    """Two updates on the quickstart's pairs: no good judge, but a whole one, with its normalization."""
    run_program("rlhf.reward_model", "--config", write(folder / "reward.yaml", reward_config(folder, data)))
    rows = read_log(folder / "reward")
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    check_documented(rows, logged={"examples", "pairs"})
    assert all(np.isfinite(row["train/loss"]) and row["learner/grad_norm"] > 0 for row in rows[1:3])
    assert all(0 <= row["eval/accuracy"] <= 1 for row in (rows[0], rows[-1]))
    (record,) = (json.loads(file.read_text()) for file in (folder / "reward" / "model").glob(RECORD_FILE))
    assert record["template"] == "qa"
    assert record["std"] > 0
    export.main([str(folder / "reward"), str(folder / "exported")])
    exported, trained = (load_file(folder / name / "model.safetensors") for name in ("exported", "reward/model"))
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(trained[name]) for name in trained)
    assert json.loads((folder / "exported" / RECORD_FILE).read_text()) == {"template": "qa"}
    return folder / "reward" / "model"


@pytest.mark.faults
def test_a_training_of_a_reward_model_that_diverges_says_so_and_writes_no_model(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = reward_config(tmp_path, tiny_model_dir)
    config["learner"] |= {"max_grad_norm": None, "optimizer": {"lr": 1e30}}
    config["cluster"]["learners"] = 2
    command = [sys.executable, "-m", "rlhf.reward_model", "--config", str(write(tmp_path / "reward.yaml", config))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STACK_WAIT_S, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    last = done.stderr.splitlines()[-1]
    assert re.search(r"RuntimeError: learner\.optimizer\.lr=1e\+30: the training diverged", last)
    assert not (tmp_path / "reward/model").exists()


def ppo_config(run: Path, data: Path, reward_model: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(run), "seed": 1},
        "model": {"path": str(data / "model"), "dtype": "float32"},
        "data": {
            "train": str(data / "train.jsonl"),
            "eval": str(data / "test.jsonl"),
            "max_prompt_tokens": 64,
            "eval_rows": 16,
        },
        "reward": [],
        "reward_model": {"path": str(reward_model), "dtype": "float32", "reference_samples": 16},
        "rollout": {
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "max_response_tokens": 24,
            "truncate_token": "e",
            "truncate_after": 8,
            "truncate": "graded_text",
            "missing_eos_penalty": 1.0,
        },
        "algo": {"kl_coef": KL_COEF, "kl_controller": "adaptive", "kl_target": 1.0, "kl_horizon": KL_HORIZON},
        "learner": {"minibatches_per_epoch": 2, "max_tokens_per_microbatch": 512, "optimizer": {"lr": 1e-3}},
        "critic": {"path": str(reward_model), "warmup_steps": 1, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every": 2},
        "cluster": {"device": "cpu"},
        "logging": {"wandb": {"mode": "disabled"}},
    }


def responses(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_learned_reward_alone_trains_policy_and_critic_and_a_resumed_run_has_critic_and_controller_back(
    tiny_model_dir: Path, tmp_path: Path, parts: int
) -> None:
    reward_model = train_reward_model(tmp_path, tiny_model_dir)
    run = tmp_path / "run"
    config = write(tmp_path / "ppo.yaml", ppo_config(run, tiny_model_dir, reward_model))
    run_program("rlhf.ppo", "--config", config, f"run.steps={4 // parts}")
    state = RunFolder.read_state(run / "checkpoints" / "step-000002")
    assert state.reward_scale["std"] > 0
    assert state.updates_taken == 2  # the critic learned alone in the first step
    # In step 2 the policy had not moved yet: a KL of 0, an error of -0.2, once.
    coef = KL_COEF * (1 - 0.2 * ROLLOUTS / KL_HORIZON)
    assert state.kl_controller["coef"] == pytest.approx(coef, rel=1e-12)

    if parts == 2:
        shared = ("cluster.learners=2", "cluster.sequence_parallel=2", "cluster.cpus_per_learner=0.25")
        run_program("rlhf.ppo", "--config", config, "--resume", "run.steps=4", *shared)
    assert RunFolder.read_state(run / "checkpoints" / "step-000004").reward_scale == state.reward_scale
    steps = read_steps(run)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    check_account(steps)
    check_documented(read_log(run), logged={"", "PPO", "PPO with a reference", "PPO, returns differ"})
    assert [row["policy/kl_coef"] for row in steps[:3]] == pytest.approx([KL_COEF, KL_COEF, coef], rel=1e-12)
    assert [row["policy/kl_response"] for row in steps[:2]] == [0.0, 0.0]
    assert steps[2]["policy/kl_response"] != 0.0
    assert [row["critic/updates_taken"] for row in steps] == [2, 4, 6, 8]
    assert "policy/loss" not in steps[0]
    assert [row["learner/updates_taken"] for row in steps[1:]] == [2, 4, 6]
    for row in steps:
        assert all(np.isfinite(row[name]) for name in ("critic/loss", "critic/explained_variance", "reward/mean"))
        assert row["sync/canary_difference"] < CANARY_BOUND
        assert row["rollout/response_length/min"] == row["rollout/response_length/max"] == 24  # only the text is cut
    assert all(np.isfinite(row["policy/loss"]) for row in steps[1:])

    for response in (row for step in (1, 2, 3, 4) for row in responses(run, step)):
        penalty = 0.0 if response["finish_reason"] == "stop" else 1.0
        assert response["reward"] == pytest.approx(response["reward_parts"]["reward_model"] - penalty)
        text = response["text"].replace(BOX_TOKEN, "")  # one token of seven letters; all others are at most one
        assert "e" not in text[8:-1]  # a truncate token ends what is graded, and stays
    assert "eval/test/avg@1" in json.loads((run / "summary.json").read_text())["evaluation_after"]
