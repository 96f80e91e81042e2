"""Program: grades a file of responses: python -m rlhf.score FILE.jsonl --output OUT.jsonl

Every row gets `score`, `extracted` and `status`, in the order of the file. Any stated answer is accepted; with --strict
boxed answers only, as training and evaluation do by default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TextIO

from rlhf.config.cli import run_program

if TYPE_CHECKING:
    from rlhf.config.reward import RewardConfig
    from rlhf.rewards.scorer import Scorer

MAX_AHEAD = 1024  # rows that wait for their grade, at most


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.score", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help=".jsonl, .json or .parquet with a response and a gold answer in every row")
    parser.add_argument("--response-key", default="response", help="column of the response (default: response)")
    parser.add_argument("--answer-key", default="ground_truth", help="column of the answer (default: ground_truth)")
    parser.add_argument("--output", help="JSONL to write: every row with score, extracted and status")
    parser.add_argument(
        "--reward", default="math", help="math, gsm8k, multiple_choice, exact, f1, format, ... or module:function"
    )
    parser.add_argument("--strict", action="store_true", help="math: boxed answers only, the default of a run")
    parser.add_argument("--workers", type=int, help="grading processes (default: the cores, at most 8)")
    parser.add_argument("--cpu-seconds", type=float, default=2.0, help="CPU seconds for one response (default: 2)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    rows = list(_rows(options))
    config = _reward_config(options)
    from rlhf.rewards.scorer import Scorer

    with _output(options.output) as output, Scorer(config) as scorer:
        began = time.perf_counter()
        try:
            _grade(scorer, rows, options, output)
        except RuntimeError as error:
            raise RuntimeError("\n".join([str(error), *_failures(scorer)])) from None
        _report(rows, time.perf_counter() - began, scorer)
        failures = "\n".join(_failures(scorer))
        if any(scorer.failed_always(part) for part in scorer.config.parts):
            raise RuntimeError(failures)
        if failures:
            print(failures, file=sys.stderr)


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from rlhf.config.data import SourceConfig
    from rlhf.data.read import read_rows

    for number, columns in read_rows(SourceConfig(path=options.file), "train", "FILE"):
        for key, option in ((options.response_key, "--response-key"), (options.answer_key, "--answer-key")):
            if key not in columns or not isinstance(columns[key], str | int | float | None):
                names = ", ".join(columns) or "no columns"
                raise ValueError(f"{options.file}:{number}: no text in column {key!r}; it has {names}. Set {option}.")
        yield columns


def _output(path: str | None) -> contextlib.AbstractContextManager[TextIO | None]:
    try:
        return open(path, "w", encoding="utf-8") if path else contextlib.nullcontext()
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written ({error.strerror}). Give another path.") from None


def _reward_config(options: argparse.Namespace) -> RewardConfig:
    from pydantic import ValidationError

    from rlhf.config.load import explain
    from rlhf.config.reward import RewardConfig

    part = {"name": options.reward}
    if options.reward == "math":
        part["mode"] = "strict" if options.strict else "lenient"
    values = {"parts": [part], "workers": options.workers, "cpu_seconds": options.cpu_seconds}
    try:
        return RewardConfig.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(RewardConfig, error)) from None


def _grade(scorer: Scorer, rows: list[dict[str, Any]], options: argparse.Namespace, output: TextIO | None) -> None:
    """Grade all rows, and write each one as soon as it and all rows before it are graded."""
    waiting: list[list[Future[Any]]] = []
    for index in _with_progress_bar(range(len(rows))):
        for row in rows[len(waiting) : index + MAX_AHEAD]:
            response, gold = (_text(row[key]) for key in (options.response_key, options.answer_key))
            waiting.append(scorer.submit(response, gold, columns=row))
        graded = scorer.graded(waiting[index], row=f"row {index + 1}")
        rows[index] |= {"score": graded.score, "extracted": graded.extracted, "status": graded.status}
        if output:
            output.write(json.dumps(rows[index]) + "\n")


def _with_progress_bar(numbers: range) -> Iterable[int]:
    """A progress bar on a terminal; imported late, since the import takes longer than grading a small file."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(numbers, "grading", console=console) if console.is_terminal else numbers


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _failures(scorer: Scorer) -> list[str]:
    """The errors of user functions. A built-in reward fails only because of a response, which its status shows."""
    return [scorer.failures(part) for part in scorer.config.parts if part.is_user_function and scorer.failures(part)]


def _report(rows: list[dict[str, Any]], seconds: float, scorer: Scorer) -> None:
    statuses = Counter(row["status"] for row in rows)
    print(f"accuracy  {sum(row['score'] for row in rows) / len(rows):.4f} over {len(rows)} rows")
    print("statuses  " + ", ".join(f"{name} {count}" for name, count in statuses.most_common()))
    print(f"speed     {len(rows) / seconds:.0f} answers/s in {seconds:.2f} s")
    print(f"pool      {scorer.pool.wait_full(1.0)} workers ready of {scorer.pool.full_size}")


if __name__ == "__main__":
    sys.exit(run_program(main))
