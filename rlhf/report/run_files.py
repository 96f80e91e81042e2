"""Reads the files of a run folder, during the run or after it: config, metrics and rollouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.answers.thoughts import split_thoughts
from rlhf.config.load import flat_keys, stored_values
from rlhf.config.non_defaults import config_of_any_program, non_default_values
from rlhf.config.program import TrainingProgramConfig
from rlhf.log.sinks import Row, read_rows, read_summary
from rlhf.rewards.grade import NO_ANSWER

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunFiles:
    """One run folder."""

    path: Path
    config_file: Path  # the config that the run was last started with; `values` is its content
    values: dict[str, Any]
    rows: list[Row]  # metrics, one row per training step with the evaluation at that step; step 0: before training

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key of the run's config, with dots (`learner.optimizer.lr`), and its value."""
        return flat_keys(self.values)

    @cached_property
    def program_config(self) -> TrainingProgramConfig | None:
        """The config as its program reads it; None if another version wrote it."""
        return config_of_any_program(self.values)

    @cached_property
    def changed(self) -> dict[str, Any]:
        """The values of the config that differ from the defaults, in sections."""
        return non_default_values(self.values)

    @property
    def finished(self) -> bool:
        try:
            return bool(read_summary(self.path))
        except ValueError:
            return False

    @cached_property
    def metrics(self) -> list[str]:
        """Names of all metrics, in the order in which they first appear."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.rows))
        return [name for name in names if name not in ("step", "time")]

    def rollout_files(self) -> dict[int, Path]:
        """The rollout files by training step."""
        files = sorted(file for file in self.path.glob("rollouts/step-*.jsonl") if file.is_file())
        return {int(file.stem[5:]): file for file in files if file.stem[5:].isdecimal()}


def read_run(folder: str | Path) -> RunFiles:
    """Read a run folder, without an incomplete last line of a running program; ValueError for another folder."""
    path = Path(folder)
    config_file = config_file_of(path)
    if not (path / METRICS).is_file() or not config_file.is_file():
        raise ValueError(
            f"{path}: not a run folder: config.yaml or metrics.jsonl is missing. Name the run.dir of a run."
        )
    rows: dict[int, Row] = {}
    add_rows(rows, read_rows(path / METRICS))
    return RunFiles(path, config_file, stored_values(config_file), [rows[step] for step in sorted(rows)])


def config_file_of(run: Path) -> Path:
    """The config that the run was last started with. The file may be missing."""
    resumed = run / "config.resumed.yaml"
    return resumed if resumed.is_file() else run / "config.yaml"


def add_rows(by_step: dict[int, Row], rows: Iterable[Row]) -> None:
    """Add lines of metrics.jsonl to the rows by step: a step may have a line for its training and for evaluations."""
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)


def read_groups(file: Path, max_bytes: int | None = None) -> Iterator[list[Row]]:
    """The groups of a rollout file, or of its first `max_bytes`, each a list of the rows of one prompt."""
    for _, group in itertools.groupby(read_rows(file, max_bytes), key=lambda row: (row["prompt_id"], row["epoch"])):
        yield list(group)


def conversation(row: Row) -> str:
    """The prompt of a rollout; if it has several messages, each of them after its role."""
    if not row["context"]:
        return str(row["prompt"])
    messages = [*row["context"], {"role": "user", "content": row["prompt"]}]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def response_blocks(row: Row) -> list[tuple[str, str]]:
    """(kind, text) of each part of a rollout after the prompt, in order.

    The kinds are `text`, `thought` and `call` for parts that the model wrote, and the role for parts that the
    environment wrote. The thought of a rollout of one turn keeps its marks.
    """
    if not row.get("turns"):
        text = str(row["text"])
        answer = split_thoughts(text, in_thought=row.get("in_thought", False))[1] or ""
        parts = [("thought", text.removesuffix(answer)), ("text", answer)]
        return [(kind, part) for kind, part in parts if part]
    blocks = []
    for turn in row["turns"]:
        if turn["role"] != "assistant":
            name = f"{turn['name']}: " if turn.get("name") else ""
            blocks.append((str(turn["role"]), f"{name}{turn['content']}"))
            continue
        blocks += [("thought", turn["reasoning_content"])] if turn.get("reasoning_content") else []
        blocks += [("text", turn["content"])] if turn.get("content") else []
        for call in turn.get("tool_calls") or ():
            blocks.append(("call", f"{call['function']['name']}({call['function']['arguments']})"))
    return blocks


def states_no_answer(row: Row) -> bool:
    """Whether the reward looked for an answer and found none. Some rewards do not look for one."""
    return bool(row["extracted"] == "" and row["status"] == NO_ANSWER)


def sample_groups(run: RunFiles, max_bytes: int) -> tuple[list[list[Row]], int]:
    """(groups, k): the groups of every k-th step with rollouts; k is 1 if all rollout files fit in `max_bytes`."""
    files = list(run.rollout_files().values())
    every = max(1, -(-sum(file.stat().st_size for file in files) // max_bytes))
    return [group for file in files[::every] for group in read_groups(file)], every
