"""Callbacks of the user: what they are given, what they may return, how they end a run, and how they are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documented import check_documented
from fake_run import drive
from test_supervised_loop import drive as drive_examples
from test_supervised_loop import prepared
from worlds import make_config

from rlhf.check.callbacks import callback_problems
from rlhf.check.start_checks import plan_problems
from rlhf.config import cli
from rlhf.config.grpo import GRPOConfig
from rlhf.config.supervised import SFTConfig
from rlhf.log.sinks import TensorBoardSink
from rlhf.report.run_files import read_run
from rlhf.run.callbacks import Callbacks, Called
from rlhf.types import RolloutGroup

STEPS, PROMPTS, SAMPLES = 4, 3, 4
WATCH = """
class Watch:
    made = []

    def __init__(self):
        self.steps, self.evaluations = [], []
        Watch.made.append(self)

    def on_step(self, step, metrics, groups):
        self.steps.append((step, metrics, groups))
        metrics["reward/mean"] = -1.0   # a copy
        return {"mine/groups": len(groups), "mine/step": step}

    def on_evaluation(self, step, metrics):
        self.evaluations.append((step, metrics))
        return {"eval/mine/step": step}

class Early:
    def on_step(self, step, metrics, groups):
        return {"stop": step == 2}

class AtOnce:
    def on_evaluation(self, step, metrics):
        return {"stop": True}

class Broken:
    def on_step(self, step, metrics, groups):
        if step == 3:
            raise KeyError("lost")

class Last:
    def on_step(self, step, metrics, groups):
        return {"stop": step == 4}
"""


@pytest.fixture
def run_with(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., GRPOConfig]:
    file = tmp_path / "watching.py"
    file.write_text(WATCH)

    def config(*names: str, **sections: Any) -> GRPOConfig:
        held_out = tmp_path / "eval.jsonl"
        held_out.write_text('{"question": "not trained", "answer": "1"}\n')
        callbacks = [f"{file}:{name}" for name in names]
        return make_config(
            tiny_model_dir / "model",
            run={"dir": str(tmp_path / "run"), "steps": STEPS, "callbacks": callbacks},
            data={"train": str(tiny_model_dir / "train.jsonl"), "eval": str(held_out), "max_prompt_tokens": 64},
            rollout={"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
            **{"checkpoint": {"every": 3}, **sections},
        )

    return config


def logged(config: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]


def made(config: GRPOConfig) -> list[Any]:
    """The objects of the class Watch that runs have made."""
    from rlhf.processes.code import load_module

    objects: list[Any] = load_module(config.run.callbacks[0]).Watch.made
    return objects


def test_a_callback_is_given_each_step_and_evaluation_and_its_metrics_stand_in_the_same_row(
    run_with: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_with("Watch", evaluation={"every": 2})
    run, _ = asyncio.run(drive(config, monkeypatch))
    (watch,) = made(config)
    rows = [row for row in logged(config) if "time/step" in row]
    assert [step for step, _, _ in watch.steps] == [1, 2, 3, 4]
    for (step, metrics, groups), row in zip(watch.steps, rows, strict=True):
        assert all(isinstance(group, RolloutGroup) for group in groups)
        assert (len(groups), {len(group.samples) for group in groups}) == (PROMPTS, {SAMPLES})
        further = {name: row.pop(name) for name in ("mine/groups", "mine/step")}
        assert further == {"mine/groups": PROMPTS, "mine/step": step}
        assert row.pop("reward/mean") == pytest.approx(1.5)
        assert metrics.keys() == {"reward/mean", *row.keys() - {"step", "time"}}
        assert {type(value) for value in metrics.values()} == {float}
        assert row["reward/max"] == metrics["reward/max"] == SAMPLES - 1
    assert [step for step, _ in watch.evaluations] == [0, 2, 4]
    evaluated = {row["step"]: row["eval/mine/step"] for row in logged(config) if "eval/mine/step" in row}
    assert evaluated == {0: 0, 2: 2, 4: 4}
    assert run.state.evaluations[2]["eval/mine/step"] == 2
    assert "mine/groups" in read_run(config.run.dir).metrics
    assert rows[1]["time/callbacks"] >= 0
    others = [{name: value for name, value in row.items() if "mine" not in name} for row in logged(config)]
    check_documented(others, logged={"callbacks"})


def test_a_callback_stops_the_run_saved_and_without_a_failure_and_it_goes_on_with_resume(
    run_with: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_with("Watch", "Early", logging={"tensorboard": True, "wandb": {"mode": "disabled"}})
    closed: list[bool] = []
    monkeypatch.setattr(TensorBoardSink, "close", lambda self, *, failed: closed.append(failed))
    assert cli.run_program(lambda: print(asyncio.run(drive(config, monkeypatch)))) == 0
    name = config.run.callbacks[1]
    said = f"the run ends after step 2, as the callback {name} asked. Go on from step 2 with --resume."
    assert said in " ".join(capsys.readouterr().out.split())
    assert closed == [False]
    folder = Path(config.run.dir)
    assert (folder / "checkpoints/step-000002").is_dir()
    assert not (folder / "summary.json").exists()

    asyncio.run(drive(run_with("Watch"), monkeypatch, resume=True))
    assert [row["step"] for row in logged(config) if "time/step" in row] == [1, 2, 3, 4]
    before, after = made(config)
    assert [[step for step, _, _ in watch.steps] for watch in (before, after)] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("name", "sections", "step"), [("AtOnce", {}, 0), ("Early", {"checkpoint": {"every": None}}, 2)]
)
def test_a_stop_before_the_first_step_or_without_checkpoints_says_that_nothing_was_saved(
    run_with: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch, name: str, sections: Any, step: int
) -> None:
    with pytest.raises(cli.StoppedError, match=rf"after step {step}, as the callback .*:{name} .*Nothing was saved\.$"):
        asyncio.run(drive(run_with(name, **sections), monkeypatch))


def test_a_stop_at_the_last_step_changes_nothing(
    run_with: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(drive(config := run_with("Last"), monkeypatch))
    assert (Path(config.run.dir) / "summary.json").exists()


def test_an_error_in_a_callback_ends_the_run_saved_and_names_its_line(
    run_with: Callable[..., GRPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_with("Broken")
    name, line = config.run.callbacks[0], WATCH.splitlines().index('            raise KeyError("lost")') + 1
    with pytest.raises(RuntimeError) as raised:
        asyncio.run(drive(config, monkeypatch))
    assert str(raised.value) == (
        f"run.callbacks={name}: on_step failed: {name.rpartition(':')[0]}:{line}: KeyError: 'lost'. Correct it. "
        "The run ends after step 3. Go on from step 3 with --resume."
    )
    assert [row["step"] for row in logged(config) if "time/step" in row] == [1, 2, 3]


class Returns:
    """An object that returns what it was made with."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def on_step(self, step: int, metrics: dict[str, float], groups: list[RolloutGroup]) -> Any:
        return self._value


def called_with(monkeypatch: pytest.MonkeyPatch, *values: Any) -> Called:
    """A call of callbacks that return these values, in a step that logs reward/mean."""
    for number, value in enumerate(values):
        monkeypatch.setattr(f"{__name__}.returns_{number}", Returns(value), raising=False)
    callbacks = Callbacks([f"{__name__}:returns_{number}" for number in range(len(values))])
    assert callbacks.call("on_evaluation", 0, {"eval/a/avg@1": 0.5}) == Called({})
    return callbacks.call("on_step", 1, {"reward/mean": 0.5}, [])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([0.5], "list. Return a dictionary of metrics, or None."),
        ({"mine": 1.0}, "the metric 'mine'. Name it `group/name`"),
        ({"mine/two words": 1.0}, "the metric 'mine/two words'. Name it"),
        ({1: 1.0}, "the metric 1. Name it"),
        ({"reward/mean": 1.0}, "reward/mean, which is logged already. Name it otherwise."),
        ({"eval/a/avg@1": 1.0}, "eval/a/avg@1, which is logged already."),
        ({"mine/x": "high"}, "mine/x='high'. A metric is a finite number; leave it out if it has none."),
        ({"mine/x": float("nan")}, "mine/x=nan. A metric is a finite number"),
        ({"mine/x": None}, "mine/x=None. A metric is a finite number"),
        ({"stop": "yes"}, "stop='yes'. It is True or False."),
    ],
)
def test_a_callback_that_returns_something_else_ends_the_run(
    value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = called_with(monkeypatch, value).failure
    assert failure.startswith(f"run.callbacks={__name__}:returns_0: on_step returned {reason}")
    assert "logged already" in called_with(monkeypatch, {"mine/x": 1}, {"mine/x": 2}).failure


def test_numbers_of_other_libraries_are_metrics_and_the_first_that_stops_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = called_with(monkeypatch, {"a/x": np.float32(0.5), "stop": np.bool_(True)}, None, {"b/x": 2, "stop": True})
    assert called == Called({"a/x": 0.5, "b/x": 2.0}, stopped_by=f"{__name__}:returns_0")


UNUSABLE = """
class Neither:
    def on_end(self, step): ...

class Argument:
    def __init__(self, path): ...
    def on_step(self, step, metrics, groups): ...

class Fewer:
    def on_step(self, step, metrics): ...

class Waits:
    async def on_evaluation(self, step, metrics): ...

class Fails:
    def __init__(self):
        raise OSError("no disk")
    def on_step(self, step, metrics, groups): ...

class Static:
    @staticmethod
    def on_step(step, metrics, groups): ...

def on_step(step, metrics, groups): ...

static = Static
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Missing", "the module has no Missing. Define it, or correct the name."),
        (
            "Neither",
            "Neither has no method on_step(step, metrics, groups) or on_evaluation(step, metrics). Give it one.",
        ),
        ("on_step", "on_step has no method on_step"),
        ("Argument", "Argument is made without arguments, but: missing a required argument: 'path'. Give it a default"),
        ("Fewer", "on_step does not take (step, metrics, groups): too many positional arguments. Write `def on_step("),
        ("Waits", "on_evaluation is `async def`, and the run does not wait for it. Write `def on_evaluation(self"),
    ],
)
def test_a_callback_that_a_run_cannot_call_is_refused_before_the_start(
    tiny_model_dir: Path, tmp_path: Path, name: str, reason: str
) -> None:
    file = tmp_path / "unusable.py"
    file.write_text(UNUSABLE)
    config, _ = prepared(SFTConfig, tiny_model_dir / "model", tmp_path, run={"callbacks": [f"{file}:{name}"]})
    (problem,) = plan_problems(config)
    assert problem.startswith(f"run.callbacks={file}:{name}: {reason}")


def test_files_and_names_that_are_none_and_constructors_that_fail_are_refused_too(tmp_path: Path) -> None:
    file = tmp_path / "unusable.py"
    (problem,) = callback_problems([f"{file}:Static"])
    assert problem.startswith(f"run.callbacks={file}:Static: {file} cannot be imported: FileNotFoundError: ")
    file.write_text(UNUSABLE)
    assert callback_problems([f"{file}:Static", f"{file}:static", f"{file}:Fails"]) == []
    line = UNUSABLE.splitlines().index('        raise OSError("no disk")') + 1
    with pytest.raises(ValueError, match=rf"^run\.callbacks=.*:Fails: making it failed: .*:{line}: no disk\. Correct"):
        Callbacks([f"{file}:Fails"])
    with pytest.raises(ValueError, match=r"'Watch' is not of the form package\.module:name or path/to/file\.py:name"):
        make_config(tmp_path, run={"dir": "runs/a", "steps": 1, "callbacks": ["Watch"]})


def test_runs_that_learn_from_examples_call_them_without_groups(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "watching.py").write_text(WATCH)
    names = [f"{tmp_path}/watching.py:{name}" for name in ("Watch", "Early")]
    config, data = prepared(SFTConfig, tiny_model_dir / "model", tmp_path, run={"callbacks": names})
    with pytest.raises(cli.StoppedError, match="ends after step 2"):
        drive_examples(config, data)
    (watch,) = made(config)
    assert [(step, groups) for step, _, groups in watch.steps] == [(1, []), (2, [])]
    assert [step for step, _ in watch.evaluations] == [0, 2]
    assert [row["step"] for row in logged(config) if "mine/step" in row] == [1, 2]
