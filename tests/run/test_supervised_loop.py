"""Runs of rlhf.sft and rlhf.reward_model without Ray: what they log, when they evaluate and save, how they go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from documented import check_documented
from fake_run import FakeCluster, FakeLearners

from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.supervised import SFTConfig, SupervisedConfig
from rlhf.data.conversations import SFTEncoder, TrainEval, pair_encoder, read_examples
from rlhf.log.reductions import Last, Mean, StepMetrics, Sum, UpdateOutcome
from rlhf.run.run import Run
from rlhf.run.supervised_loop import MAX_SKIPPED, train_on_examples

ROWS, STEPS = 10, 6  # two epochs of ceil(10 / 4) steps
TOKENS, TRAINED = 40, 30


class Learners(FakeLearners):
    """The learning rate that they report is the number of the step."""

    diverges = False

    async def hold(self, *data: Any) -> None:
        self.held = data

    async def train(self, step: int) -> UpdateOutcome:
        self.calls.append(("train", step))
        metrics: StepMetrics = {
            "train/loss": Sum(0.5), "train/tokens": Sum(TOKENS), "train/trained_tokens": Sum(TRAINED),
            "learner/lr": Last(float(step)),
        }  # fmt: skip
        return UpdateOutcome("learner", not self.diverges, metrics)

    async def evaluate(self, part: int) -> StepMetrics | None:
        self.calls.append(("evaluate", part))
        return {"eval/loss": Sum(0.125), "eval/accuracy": Mean(1.5, 2.0)} if part < 2 else None

    def trained(self) -> list[int]:
        return [arguments[0] for method, *arguments in self.calls if method == "train"]


class Cluster(FakeCluster):
    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.learners = Learners()


def prepared(schema: type[SupervisedConfig], model: Path, folder: Path, **sections: Any) -> tuple[Any, TrainEval]:
    """The config of a run on ROWS rows, with its number of steps, and its data."""
    row = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}
    for name, count in (("train", ROWS), ("eval", 4)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({**row, "prompt": str(i)}) + "\n" for i in range(count))
        )
    key = "sequences_per_update" if schema is SFTConfig else "pairs_per_update"
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "epochs": 2},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_tokens": 64},
        "learner": {key: 4},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2},
        "logging": {"wandb": {"mode": "disabled"}},
        "cluster": {"device": "cpu"},
    }
    values |= {name: {**values[name], **keys} for name, keys in sections.items()}
    config = schema.model_validate_json(json.dumps(values))
    tokenizer = byte_tokenizer()
    data = read_examples(
        config.data, SFTEncoder(tokenizer, None) if schema is SFTConfig else pair_encoder(tokenizer, "model")
    )
    return config.with_steps(data.train.rows), data


def drive(config: Any, data: TrainEval, *, resume: bool = False, until: int | None = None) -> Run[Any]:
    """The whole of a run; a signal comes in training step `until`."""
    run = Run(config, resume=resume, make_cluster=Cluster)
    learners: Any = run.cluster.learners
    train_step = learners.train

    async def step_until(step: int) -> UpdateOutcome:
        if step + 1 == until:
            run.stop.on_signal("SIGTERM", lambda: None)
        return await train_step(step)

    learners.train = step_until
    try:
        asyncio.run(train_on_examples(run, data))
    except asyncio.CancelledError:
        assert until is not None
    run.folder.unlock()
    return run


def logged(config: SupervisedConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("schema", [SFTConfig, RewardTrainingConfig])
def test_a_run_takes_every_step_evaluates_saves_and_exports(
    tiny_model_dir: Path, tmp_path: Path, schema: type[SupervisedConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config, data = prepared(schema, tiny_model_dir / "model", tmp_path)
    run = drive(config, data)
    assert "data.eval: all 4 rows are in data.train too" in " ".join(capsys.readouterr().out.split())
    assert run.cluster.learners.trained() == list(range(STEPS))
    assert run.cluster.learners.held == (data.train.tokens, data.held_out and data.held_out.tokens)
    rows = logged(config)
    steps = [row for row in rows if "time/step" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert [row["data/epoch"] for row in steps] == pytest.approx([i / 3 for i in range(1, STEPS + 1)])
    assert all(row["learner/tokens_per_second"] > 0 for row in steps)
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4, 6]
    assert run.state.tokens == {"prompt": STEPS * (TOKENS - TRAINED), "response": STEPS * TRAINED}
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} >= {"step-000004", "step-000006"}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["steps"], summary["updates_planned"]) == (STEPS, STEPS)
    check_documented(rows, logged={"shared examples"})
    card = (tmp_path / "run/model/README.md").read_text()
    assert f"optimizer steps on {ROWS} rows." in card
    assert f"# run, step {STEPS}, evaluated on its training data\n" in card
    assert ("reward_model: {path: FOLDER}" in card) == (schema is RewardTrainingConfig)


def test_a_run_that_a_signal_has_ended_goes_on_with_the_step_after_its_checkpoint(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config, data = prepared(SFTConfig, tiny_model_dir / "model", tmp_path)
    assert drive(config, data, until=3).cluster.learners.trained() == [0, 1, 2]
    run = drive(config, data, resume=True)
    assert [path.name for path in run.cluster.loaded] == ["step-000003"]
    assert run.cluster.learners.trained() == [3, 4, 5]
    rows = [row for row in logged(config) if "time/step" in row]
    assert [(row["step"], row["learner/lr"]) for row in rows] == [(i + 1, float(i)) for i in range(STEPS)]
    assert [row["step"] for row in logged(config) if "eval/loss" in row] == [0, 2, 4, 6]


def test_a_signal_ends_an_evaluation_between_two_of_its_parts_and_the_resumed_run_does_it(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config, data = prepared(SFTConfig, tiny_model_dir / "model", tmp_path)
    run = Run(config, resume=False, make_cluster=Cluster)
    learners: Any = run.cluster.learners
    evaluate = learners.evaluate

    async def evaluate_until_the_signal(part: int) -> StepMetrics | None:
        if learners.trained() == [0, 1]:
            run.stop.on_signal("SIGTERM", lambda: None)
        metrics: StepMetrics | None = await evaluate(part)
        return metrics

    learners.evaluate = evaluate_until_the_signal
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(train_on_examples(run, data))
    run.folder.unlock()
    parts = [arguments[0] for method, *arguments in learners.calls if method == "evaluate"]
    assert parts == [0, 1, 2, 0]  # of the evaluation at the start, and of that of step 2
    assert [path.name for path in drive(config, data, resume=True).cluster.loaded] == ["step-000002"]
    assert [row["step"] for row in logged(config) if "eval/loss" in row] == [0, 2, 4, 6]


def test_a_resumed_run_must_have_the_same_rows(tiny_model_dir: Path, tmp_path: Path) -> None:
    config, data = prepared(SFTConfig, tiny_model_dir / "model", tmp_path)
    drive(config, data, until=3)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * ROWS)
    other = read_examples(config.data, SFTEncoder(byte_tokenizer(), None))
    with pytest.raises(ValueError, match=r"^data\.train: .*'rows': 10"):
        drive(config, other, resume=True)


def test_a_training_that_diverges_ends(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, data = prepared(SFTConfig, tiny_model_dir / "model", tmp_path, run={"steps": 2 * MAX_SKIPPED})
    monkeypatch.setattr(Learners, "diverges", True)
    with pytest.raises(RuntimeError, match=r"^learner\.optimizer\.lr=1e-06: .*\b20 steps"):
        drive(config, data)
    assert len([row for row in logged(config) if "time/step" in row]) == MAX_SKIPPED
    assert "warning: step 1: 1 of 1 optimizer steps were skipped: NaN or inf in a gradient\n" in capsys.readouterr().out


def test_steps_are_passes_over_the_rows_unless_they_are_given(tiny_model_dir: Path, tmp_path: Path) -> None:
    config, _ = prepared(SFTConfig, tiny_model_dir / "model", tmp_path, run={"epochs": 3})
    assert (config.steps, config.checkpoint_every) == (9, 2)
    assert prepared(SFTConfig, tiny_model_dir / "model", tmp_path, run={"steps": 5})[0].steps == 5
    with pytest.raises(ValueError, match=r"learner\.schedule\.warmup_steps=6: .*\b6 optimizer steps"):
        prepared(SFTConfig, tiny_model_dir / "model", tmp_path, learner={"schedule": {"warmup_steps": 6}})
    with pytest.raises(ValueError, match=r"logging\.profile_steps=\[7\]: .*\b6\b.*run\.epochs\b.*\b10\b"):
        prepared(SFTConfig, tiny_model_dir / "model", tmp_path, logging={"profile_steps": [6, 7]})


@pytest.mark.parametrize(
    ("schema", "best", "every", "use"),
    [
        (SFTConfig, "eval/loss", 2, r"\bnull\b"),
        (RewardTrainingConfig, "eval/loss", 2, r"eval/accuracy or eval/margin\b"),
        (RewardTrainingConfig, "eval/accuracy", None, r"data\.eval\b.*evaluation\.every\b.*null"),
    ],
)
def test_the_best_checkpoint_is_that_of_a_metric_that_is_measured_and_should_be_high(
    tiny_model_dir: Path, tmp_path: Path, schema: type[SupervisedConfig], best: str, every: int | None, use: str
) -> None:
    with pytest.raises(ValueError, match=rf"checkpoint\.best={best}: .*{use}"):
        prepared(schema, tiny_model_dir / "model", tmp_path, checkpoint={"best": best}, evaluation={"every": every})
    prepared(RewardTrainingConfig, tiny_model_dir / "model", tmp_path, checkpoint={"best": "eval/accuracy"})
