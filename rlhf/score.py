"""Program: grades a file of responses: python -m rlhf.score FILE.jsonl --output OUT.jsonl

Every row gets `score` (null if it cannot be graded), `extracted` and `status`, in the order of the file. Any stated
answer is accepted; with --strict boxed answers only, as training and evaluation do by default.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rlhf.config.cli import parser_of, run_program
from rlhf.config.data import SourceConfig
from rlhf.config.load import parse_override, resolved, validated
from rlhf.config.printing import say, to_stderr
from rlhf.config.reward import RewardConfig, may_be_accuracy
from rlhf.config.secrets import remember
from rlhf.processes.channel import as_json
from rlhf.rewards.grade import UNGRADED, Grade, part_outcomes
from rlhf.run.reward_outcomes import RewardOutcomes

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rlhf.rewards.scorer import Scorer

ANSWER_KEY = "ground_truth"
ROWS_PER_BATCH, MAX_BATCHES = 1024, 4  # at most: rows of a batch, and batches that wait for grades


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("rlhf.score", __doc__)
    parser.add_argument("file", help="JSONL with a response in every row, and a gold answer if the reward compares")
    parser.add_argument("--response-key", default="response", help="column of the response (default: response)")
    parser.add_argument("--answer-key", help="of the answer (default: ground_truth, if the reward reads answers)")
    parser.add_argument("--output", help="JSONL to write: every row with score, extracted and status")
    parser.add_argument(
        "--reward",
        default="math",
        help="math, gsm8k, multiple_choice, exact, f1, code, rubric, ... or module:function, or a part of a config: "
        "'{name: module:function, network: true}'",
    )
    parser.add_argument("--strict", action="store_true", help="math: boxed answers only, the default of a run")
    parser.add_argument("--workers", type=int, help="grading processes (default: the cores, at most 8)")
    parser.add_argument("--cpu-seconds", type=float, default=2.0, help="CPU seconds for one response (default: 2)")
    parser.add_argument("--bound", type=float, default=1e4, help="as reward.bound of a config (default: 10000)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    config = _reward_config(options)
    if options.answer_key is None and any(part.needs_answer for part in config.parts):
        options.answer_key = ANSWER_KEY
    checked = _rows(options)  # every row, before the first one is graded
    first = next(checked, {})
    rows = bool(first) + sum(1 for _ in checked)
    if options.answer_key is None and rows and ANSWER_KEY not in first and config.parts[0].is_user_function:
        no_answers = f"{options.file}: no column {ANSWER_KEY!r}, so the reward gets answer=''. Set --answer-key."
        say(no_answers, file=sys.stderr)
    from rlhf.rewards.scorer import Scorer

    with Scorer(config) as scorer:
        for warning in scorer.warnings:
            say(warning, file=sys.stderr)
        started, outcomes = time.perf_counter(), RewardOutcomes(config)
        try:
            with _output(options.output) as output:
                totals = _grade(scorer, outcomes, options, rows, output)
        except RuntimeError as error:
            raise RuntimeError("\n".join([str(error), *_failures(outcomes, config)])) from None
        _report(totals, config.parts[0].name, time.perf_counter() - started)
        failures = "\n".join(_failures(outcomes, config))
        if any(map(outcomes.failed_always, config.parts)):
            raise RuntimeError(failures)
        if failures:
            say(failures, file=sys.stderr)
    missing, rows = totals.ungraded.total(), totals.statuses.total()
    why = ", ".join(f"{count} x {status}" for status, count in totals.ungraded.most_common())
    said = f"{options.file}: {missing} of {rows} rows have no grade ({why}), the first is row {totals.first_ungraded}"
    if missing and missing == rows:
        raise RuntimeError(f"{said}. Nothing was measured: repair the reward, or the column that it reads.")
    if missing > UNGRADED * rows:
        to_stderr(f"warning: {said}. They do not count as wrong: the mean is over the others.")


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The checked rows, one after another: a file of JSON lines is never in memory as a whole."""
    from rlhf.data.read import Source

    for number, columns in Source("FILE", validated(SourceConfig, {"path": options.file}), "train").stream():
        for key, option in ((options.response_key, "--response-key"), (options.answer_key, "--answer-key")):
            if key is not None and not (key in columns and _is_text(columns[key], several=key == options.answer_key)):
                names = ", ".join(columns) or "no columns"
                raise ValueError(f"{options.file}:{number}: no text in column {key!r}; it has {names}. Set {option}.")
        yield columns


def _is_text(value: Any, *, several: bool) -> bool:
    if several and isinstance(value, list):
        return bool(value) and all(isinstance(item, str | int | float) for item in value)
    return isinstance(value, str | int | float | None)


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[TextIO | None]:
    """The output file. It is renamed to `path` when all rows are graded, so it may replace the file of responses."""
    if path is None:
        yield None
        return
    partial = Path(f"{path}.partial")
    try:
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written ({error.strerror}). Give another path.") from None
    with file:
        yield file
    partial.replace(path)


def _reward_config(options: argparse.Namespace) -> RewardConfig:
    part: dict[str, Any] = {"name": options.reward}
    if options.reward.startswith("{"):
        part = resolved(parse_override(f"--reward={options.reward}"), "--reward")["--reward"]
    if options.reward == "math":
        part["mode"] = "strict" if options.strict else "lenient"
    part["weight"] = 1.0  # as in evaluations, which report each part before it is weighted
    values = {"parts": [part], "workers": options.workers, "cpu_seconds": options.cpu_seconds, "bound": options.bound}
    remember(values)
    return validated(RewardConfig, values)


@dataclass
class Totals:
    """Totals of the rows that were graded so far."""

    statuses: Counter[str] = field(default_factory=Counter)
    ungraded: Counter[str] = field(default_factory=Counter)  # statuses of the rows without a grade
    first_ungraded: int = 0  # number of the first row without a grade, counted from 1; 0 if there is none
    score: float = 0.0  # sum of the grades
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, grade: Grade) -> None:
        self.statuses[grade.status] += 1
        if grade.value is None:
            self.ungraded[grade.status] += 1
            self.first_ungraded = self.first_ungraded or self.statuses.total()
            return
        self.score += grade.value
        self.lowest, self.highest = min(self.lowest, grade.value), max(self.highest, grade.value)


def _grade(
    scorer: Scorer, outcomes: RewardOutcomes, options: argparse.Namespace, count: int, output: TextIO | None
) -> Totals:
    """Grade the file row by row, and write each row as soon as it and all rows before it are graded."""
    waiting: deque[tuple[list[dict[str, Any]], list[list[Future[Grade]]]]] = deque()
    totals = Totals()

    def finish() -> None:
        rows, batches = waiting.popleft()
        first = totals.statuses.total() + 1
        for row, grade in zip(rows, scorer.graded_batch(batches, first_row=first), strict=True):
            outcomes.check_response(f"row {totals.statuses.total() + 1}", *part_outcomes(scorer.config.parts, grade))
            totals.add(grade)
            if output:
                row |= {"score": grade.value, "extracted": grade.extracted, "status": grade.status}
                output.write(json.dumps(row, default=as_json) + "\n")

    rows = iter(_with_progress(_rows(options), count))
    while batch := list(itertools.islice(rows, ROWS_PER_BATCH)):
        responses = [_text(row[options.response_key]) for row in batch]
        golds = [_gold(row.get(options.answer_key or ANSWER_KEY)) for row in batch]
        waiting.append((batch, scorer.submit_batch(responses, golds, batch)))
        if len(waiting) >= MAX_BATCHES:
            finish()
    while waiting:
        finish()
    return totals


def _with_progress(rows: Iterable[dict[str, Any]], count: int) -> Iterable[dict[str, Any]]:
    """The rows, with a progress bar on a terminal; rich is imported late: that takes longer than a small file."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(rows, "grading", count, console=console) if console.is_terminal else rows


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _gold(value: Any) -> str | list[str]:
    return [str(item) for item in value] if isinstance(value, list) else _text(value)


def _failures(outcomes: RewardOutcomes, config: RewardConfig) -> list[str]:
    """Errors of user functions, and of a built-in reward that graded nothing; statuses show its other failures."""
    shown = [part for part in config.parts if part.is_user_function or outcomes.failed_always(part)]
    return [failures for part in shown if (failures := outcomes.failures(part))]


def _report(totals: Totals, reward: str, seconds: float) -> None:
    rows, missing = totals.statuses.total(), totals.ungraded.total()
    if not rows:
        say("no rows")
        return
    if graded := rows - missing:
        note = f", without {missing} that cannot be graded" if missing else ""
        name = "accuracy" if may_be_accuracy(reward) and totals.lowest >= 0 and totals.highest <= 1 else reward
        say(f"{name:<8}  {totals.score / graded:.4f} over {graded} rows{note}")
    say("statuses  " + ", ".join(f"{name} {count}" for name, count in totals.statuses.most_common()))
    say(f"speed     {rows / seconds:.0f} answers/s in {seconds:.2f} s")


if __name__ == "__main__":
    sys.exit(run_program(main))
