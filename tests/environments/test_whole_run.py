"""A whole run of rlhf.grpo without Ray whose prompts an environment makes, in processes of its own."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documented import check_documented
from fake_environments import call
from fake_run import Sampling, drive
from transformers import AutoTokenizer
from worlds import make_config

from rlhf.config.grpo import GRPOConfig
from rlhf.quickstart import write_quickstart
from rlhf.sampling.requests import Completion, SamplingSettings

pytestmark = pytest.mark.slow  # they start processes

FILE = Path(__file__).parent / "games.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "quickstart"
    write_quickstart(folder, warmup_steps=0, train_rows=4, test_rows=2, tools=True)
    return folder / "model"


def config_of(model: Path, run: Path, name: str, /, **environment: Any) -> GRPOConfig:
    return make_config(
        model,
        run={"dir": str(run), "steps": 3, "max_useless_steps": None},  # all rewards are 0
        data={
            "train": [{"path": "environment"}],
            "eval": [{"path": "environment", "rows": 2}],
            "max_prompt_tokens": 200,
        },
        environment={"name": f"{FILE}:{name}", "processes": 4, **environment},
        reward={"parts": []},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_rollout_tokens": 200, "max_turns": 2},
        learner={"max_tokens_per_microbatch": 512},
        evaluation={"every": 1, "at_start": False},
        checkpoint={"every": 1},
    )


@pytest.fixture(autouse=True)
def one_call_then_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn of every rollout guesses; whatever is said after it, the second one answers."""
    generate = Sampling.generate

    async def with_message(self: Sampling, token_ids: np.ndarray, settings: SamplingSettings, **how: Any) -> Any:
        completions: list[Completion] = await generate(self, token_ids, settings, **how)
        if settings.parsing is None:
            return completions
        stop = np.array([*completions[0].token_ids[:2], STOP[0]], np.int32)
        is_first = how["what"].endswith("turn 1")
        message = {"role": "assistant", "content": "", "tool_calls": [call("guess", number=3)]}
        message = message if is_first else {"role": "assistant", "content": "done"}
        return [replace(one, token_ids=stop, finish_reason="stop", message=message) for one in completions]

    monkeypatch.setattr(Sampling, "generate", with_message)


STOP: list[int] = []


@pytest.fixture(autouse=True)
def stop_token(model: Path) -> None:
    STOP[:] = [AutoTokenizer.from_pretrained(model).eos_token_id]


def rows_of(config: GRPOConfig, step: int) -> list[dict[str, Any]]:
    lines = (Path(config.run.dir) / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_reset_makes_the_prompts_and_a_resumed_run_goes_on_with_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = config_of(model, tmp_path / "whole", "Guess")
    asyncio.run(drive(whole, monkeypatch))
    resumed = config_of(model, tmp_path / "resumed", "Guess")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(drive(resumed, monkeypatch, until=2))
    run, _ = asyncio.run(drive(resumed, monkeypatch, resume=True))

    rows, again = ([row for step in (1, 2, 3) for row in rows_of(each, step)] for each in (whole, resumed))
    prompts = [row["prompt"] for row in rows]
    assert [row["prompt"] for row in again] == prompts
    assert prompts[0::2] == prompts[1::2]  # the members of a group start in one state
    assert len(set(prompts)) == 6
    first = rows[0]
    assert first["prompt"].startswith(" secret below 1000")
    assert first["prompt_id"].startswith("environment/")
    assert [turn["role"] for turn in first["turns"]] == ["assistant", "tool", "assistant"]
    assert first["facts"]["tool_calls"] == 1
    assert first["reward_parts"]["environment"] == 0.0
    assert run.state.environments
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    (steps, evaluations) = ([row for row in lines if name in row] for name in ("time/step", "eval/environment/avg@1"))
    assert [row["environment/turns/mean"] for row in steps] == [2.0, 2.0, 2.0]
    assert len(evaluations) == 3
    own = [{name: value for name, value in row.items() if name.startswith("environment/")} for row in steps]
    check_documented(own, logged={"environment or tools", "tools"})


def test_a_run_ends_saved_when_too_many_environments_fail(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(model, tmp_path / "run", "NeverScored")
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"at_start": True})})
    with pytest.raises(RuntimeError, match=r"(?s)4 of 4 rollouts of a step failed.*Go on from step 1") as ended:
        asyncio.run(drive(config, monkeypatch))
    assert re.search(rf"4 x finish: {FILE}:\d+: KeyError: 'score'", str(ended.value))
    shown = " ".join(capfd.readouterr().out.split())
    assert "environment: 2 of 2 rollouts failed: finish: " in shown  # of the evaluation at the start
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


PLAYER = """
class Player:
    rows = {"train": 3, "eval": 1}

    async def play(self, row, generate):
        turn = await generate([{"role": "user", "content": f"problem {row['number']} of {row['split']}"}])
        return {"score": 0.5, "epoch": row["epoch"]}
"""


def test_an_epoch_has_each_problem_of_a_class_that_plays_once_and_the_first_prompt_is_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "player.py").write_text(PLAYER)
    config = config_of(model, tmp_path / "run", "Guess")
    player = config.environment.model_copy(update={"name": f"{tmp_path / 'player.py'}:Player"})
    sources = {"eval": tuple(each.model_copy(update={"rows": None}) for each in config.data.eval)}
    config = config.model_copy(
        update={"environment": player, "data": config.data.model_copy(update=sources)}
    )  # fmt: skip
    asyncio.run(drive(config, monkeypatch))
    rows = [row for step in (1, 2, 3) for row in rows_of(config, step)]
    drawn = [row["prompt_id"] for row in rows][::2]
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == [f"environment/{number}" for number in (1, 2, 3)]
    assert [row["reward_parts"]["environment/epoch"] for row in rows] == [0.0] * 6 + [1.0] * 6
    shown = capfd.readouterr().out
    assert "problem 1 of train" in shown
    assert "data.eval environment: 1 prompts" in shown
