"""`rlhf.train`: a whole run of a training program from Python, with objects in and results out."""

from __future__ import annotations

import argparse
import asyncio
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.api.configs import check_alone, read_config
from rlhf.check.start_checks import start_problems
from rlhf.config import cli
from rlhf.config.printing import say, waiting
from rlhf.config.secrets import hide_in_output
from rlhf.log.sinks import read_rows, read_summary
from rlhf.processes import objects

EVALUATED = "eval/"  # begins the names of an evaluation's metrics


@dataclass(frozen=True)
class Result:
    """What a run left, read from its folder.

    Attributes:
        folder: run.dir.
        metrics: one dict per training step, as in metrics.jsonl, with the evaluation of that step; `step` counts the
            steps from 1, and a row with step 0 holds the evaluation before them.
        evaluations: training steps -> the metrics of the evaluation after them.
        model: the exported model; None if the run ended before its last step, or with run.export=false.
        finished: True if the run took all its steps. False if a callback stopped it; `resume=True` goes on.
    """

    folder: Path
    metrics: list[dict[str, Any]]
    evaluations: dict[int, dict[str, float]]
    model: Path | None
    finished: bool


def train(
    config: Any = (),
    *,
    program: Any = "grpo",
    resume: Any = False,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Any = None,
    tools: Any = None,
    environment: Any = None,
    policy_loss: Any = None,
    advantage: Any = None,
    callbacks: Any = None,
    **keys: Any,
) -> Result:
    """Run a training program to its end, with the processes, checks and messages of the command line.

        result = rlhf.train("mine.yaml", data=rows, reward=score, **{"run.steps": 20})

    Functions and classes may come from a module, a script or a notebook's cell; they run confined, in processes of
    their own, as named ones do. Ctrl-C, or the notebook's interrupt, saves and ends the run with a KeyboardInterrupt.

    Args:
        config: a YAML file, a mapping (`{"run": {"steps": 10}}` or `{"run.steps": 10}`), or several; later ones win,
            and the other arguments win over all.
        program: grpo, ppo, sft or reward-model.
        resume: go on from the newest checkpoint in run.dir, or from the one of this name. Give the same objects again.
        model: a path, a hub name or a transformers model. tokenizer: replaces the model's own.
        data, eval_data: a path, a hub name, a mapping with `path`, or a list of these; or rows: dicts in a list, a
            `datasets.Dataset` or another iterable; or several sets of rows by name.
        reward: a function, a name, or a list of both and of `{"name": function, "weight": 2.0}`.
        tools: functions that the model may call. environment: a class or coroutine (docs/environments.md).
        policy_loss, advantage: functions, see docs/algorithms.md.
        callbacks: objects or classes with `on_step` or `on_evaluation`, see docs/python.md.
        keys: any other keys, `**{"learner.optimizer.lr": 1e-6}`.

    Raises:
        ValueError: the config, the data or the machine is not what the run needs.
        RuntimeError: the run could not go on. It is saved as far as its message says.
    """
    arguments = {
        "model": model, "tokenizer": tokenizer, "data": data, "eval_data": eval_data, "reward": reward, "tools": tools,
        "environment": environment, "policy_loss": policy_loss, "advantage": advantage, "callbacks": callbacks,
    }  # fmt: skip
    given = {name: value for name, value in arguments.items() if value is not None} | keys
    check_alone()
    with hide_in_output():
        with waiting("starting: checking the config, and the data, models and functions that it names"):
            checked = read_config(config, program=program, given=given, resume=bool(resume), check=start_problems)
        start: Callable[..., Any] = importlib.import_module(f"rlhf.{checked.program.replace('-', '_')}").start
        flags = argparse.Namespace(resume=bool(resume), resume_from=resume if isinstance(resume, str) else None)
        try:
            with objects.of_run(checked):
                start(checked, flags)
        except cli.NothingToDoError as done:  # it was finished before, or a callback stopped it
            say(str(done))
        except asyncio.CancelledError as error:
            raise SystemExit(128 + error.args[0] if error.args else cli.TERMINATED) from None
    return result_of(Path(checked.run.dir))


def result_of(folder: Path) -> Result:
    """The result of a run, from its folder."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_rows(folder / "metrics.jsonl"):  # an evaluation has a row of its own
        by_step.setdefault(row["step"], {}).update(row)
    rows, model = [by_step[step] for step in sorted(by_step)], folder / "model"
    evaluations = {row["step"]: _evaluated(row) for row in rows if _evaluated(row)}
    finished = bool(rows) and read_summary(folder).get("steps") == rows[-1]["step"]
    return Result(folder, rows, evaluations, model if finished and model.is_dir() else None, finished)


def _evaluated(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(EVALUATED)}
