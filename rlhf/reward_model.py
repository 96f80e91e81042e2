"""Program: trains a reward model from preference pairs.

    python -m rlhf.reward_model --config configs/reward_model_quickstart.yaml [section.key=value ...]

Pairs are a file (JSON lines, Parquet) or a data set of the hub with columns `chosen` and `rejected`: whole
conversations as lists of role/content messages, or texts that answer a `prompt`. The program writes the model and, for
the runs that use it, its template and the mean and std of its scores on training pairs. arXiv:1909.08593, sec. 2.1,
normalizes on responses of the start policy instead: that is `reward_model.reference_samples` of a run.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rlhf.config import cli
from rlhf.config.data import SourceConfig, TemplateName
from rlhf.config.printing import say
from rlhf.config.program import warmup_problems
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.data.read import read_rows
from rlhf.data.templates import conversation_ids, no_chat_template
from rlhf.learner.rank_place import Place, free_port
from rlhf.plan import visible_gpus

if TYPE_CHECKING:
    from rlhf.learner.reward_trainer import Pair

DESCRIPTION = "Train a reward model from preference pairs (Bradley-Terry)."
LOG_EVERY = 10  # updates
NORMALIZATION_PAIRS = 2048  # evenly spaced; their scores give the mean to about 0.02 of the std


def conversation(row: dict[str, Any], column: str) -> list[dict[str, str]]:
    """The messages of `chosen` or `rejected`; if the column is a text, the messages of the prompt come first."""
    answer = row[column]
    if isinstance(answer, list):
        return answer
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*messages, {"role": "assistant", "content": answer}]


def read_pairs(
    path: str, tokenizer: Any, which: str, *, max_tokens: int, template: TemplateName = "model"
) -> tuple[list[Pair], int]:
    """Tokenized pairs of `data.train` or `data.eval`, and the number of pairs left out as too long.

    Raises:
        ValueError: no such data, a row that is not a pair, or no pair at all.
    """
    from rlhf.learner.reward_trainer import Pair

    key = f"data.{which}"
    if template == "model" and not tokenizer.chat_template:
        raise ValueError(no_chat_template("data.template"))
    token_ids = partial(conversation_ids, template=template, key="data.template")
    pairs, too_long = [], 0
    for row in read_rows(SourceConfig(path=path), which, key):
        try:
            sides = [conversation(row.columns, column) for column in ("chosen", "rejected")]
            chosen, rejected = (token_ids(side, tokenizer) for side in sides)
            if not (len(chosen) and len(rejected)):
                raise ValueError("one of its sides has no token")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{key}: row {row.number} of {path}: {type(error).__name__}: {error}. Give chosen and rejected, "
                "as messages or as texts with a prompt."
            ) from None
        if max(len(chosen), len(rejected)) > max_tokens:
            too_long += 1
        else:
            pairs.append(Pair(chosen, rejected))
    if not pairs:
        raise ValueError(
            f"{key}={path}: no pair has at most data.max_tokens={max_tokens} tokens. Raise it, or name other data."
        )
    return pairs, too_long


def train_rank(rank: int, port: int, config: RewardTrainingConfig, train: list[Pair], held_out: list[Pair]) -> None:
    """The whole training on one rank; rank 0 logs and writes.

    Raises:
        RuntimeError: the trained model's scores are not finite.
    """
    cluster = config.cluster
    if cluster.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus()[rank]
    folder = Path(config.run.dir)
    terminal = _output_to(folder / "logs" / f"learner-{rank}.log")
    from rlhf.learner.reward_trainer import RewardTrainer, count_updates
    from rlhf.log.patient_files import PatientFiles
    from rlhf.log.reductions import to_values
    from rlhf.log.sinks import JsonlSink

    threads = cluster.threads_per_learner or max(1, (os.cpu_count() or 1) // cluster.learners)
    local_rank = 0 if cluster.device == "cuda" else rank
    trainer = RewardTrainer(config, Place(rank, cluster.learners, local_rank, "127.0.0.1", port, threads), train)
    total = count_updates(config, len(train))
    files = PatientFiles(partial(say, file=terminal))
    sink = JsonlSink(folder / "metrics.jsonl", files) if rank == 0 else None
    for update, metrics in enumerate(trainer.train(), start=1):
        if sink is None:
            continue
        sink.log(update, to_values(metrics))
        if update % LOG_EVERY == 0 or update == total:
            loss, accuracy = (metrics[name].value() for name in ("train/loss", "train/accuracy"))
            say(f"update {update}/{total}  loss {loss:.4f}  accuracy {accuracy:.3f}", file=terminal)
    if held_out:
        values = to_values(trainer.measure(held_out)[0])
        if sink is not None:
            sink.log(total, values)
            shown = "  ".join(f"{name.removeprefix('eval/')} {v:.4f}" for name, v in values.items())
            say(f"held out: {shown}", file=terminal)
    _, mean, std = trainer.measure(train[:: math.ceil(len(train) / NORMALIZATION_PAIRS)])
    if not math.isfinite(std):
        lr = config.learner.optimizer.lr
        raise RuntimeError(
            f"learner.optimizer.lr={lr}: the training diverged. The scores are not finite, and no model is written. "
            "Lower lr, or set learner.max_grad_norm."
        )
    trainer.write(str(folder / "model"), config.model.path, mean, std)
    files.check()
    if sink is not None:
        say(f"model: {folder / 'model'}, scores of mean {mean:.3f} and std {std:.3f}", file=terminal)
    trainer.close()


def _output_to(log: Path) -> TextIO:
    """Send all later output of libraries to a file; the returned stream still writes to the terminal."""
    log.parent.mkdir(exist_ok=True)
    terminal = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    return terminal


def run_ranks(config: RewardTrainingConfig, *pairs: list[Pair]) -> None:
    """Run every rank in a separate process; if one fails, all are ended.

    Raises:
        RuntimeError: with the error of the first rank that failed.
    """
    from torch.multiprocessing.spawn import ProcessException, spawn

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it would log each process that it ends
    try:
        spawn(train_rank, (free_port(), config, *pairs), config.cluster.learners, daemon=True)
    except ProcessException as error:
        # `error` holds the traceback of the rank, or the signal that killed it
        *_, reason = re.split(r"^  File .*\n(?:    .*\n)*", str(error), flags=re.MULTILINE)
        raise RuntimeError(f"learner {error.error_index}: {reason.strip()}") from None


def _cancel_on_signals() -> None:
    """Let a signal raise an exception, so that the ranks end with this process; by default they would go on."""

    def cancel(number: int, _: object) -> None:
        raise asyncio.CancelledError(number)

    for number in set(cli.end_signals()) - {signal.SIGINT}:  # which raises KeyboardInterrupt
        signal.signal(number, cancel)


def main(argv: Sequence[str] | None = None) -> None:
    config, _ = cli.parse("rlhf.reward_model", DESCRIPTION, RewardTrainingConfig, argv, add_flags=lambda parser: None)
    cluster = config.cluster
    if cluster.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed looks for another one, and prints that there is none
    if cluster.device == "cuda" and len(visible_gpus()) < cluster.learners:
        raise ValueError(
            f"cluster.learners={cluster.learners} with cluster.device=cuda: this machine shows {len(visible_gpus())} "
            "GPUs (CUDA_VISIBLE_DEVICES). Use fewer learners, or cluster.device=cpu."
        )
    folder = Path(config.run.dir)
    cli.check_new_folder(folder, "run.dir=")
    from rlhf.config.load import resolved_yaml
    from rlhf.data.model_checks import check_model_files
    from rlhf.data.model_files import load_tokenizer
    from rlhf.learner.reward_trainer import count_updates

    check_model_files(config.model.path, generates=False)
    tokenizer = load_tokenizer(config.model)
    longest, template = config.data.max_tokens, config.data.template
    train, too_long = read_pairs(config.data.train, tokenizer, "train", max_tokens=longest, template=template)
    total = count_updates(config, len(train))
    for problem in warmup_problems("learner", config.learner, total, "run.epochs x pairs / learner.pairs_per_update"):
        raise ValueError(problem)
    held_out: list[Pair] = []
    if config.data.eval is not None:
        held_out, more = read_pairs(config.data.eval, tokenizer, "eval", max_tokens=longest, template=template)
        too_long += more
    say(f"{len(train)} pairs to train on, {len(held_out)} held out, {too_long} left out as too long")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    _cancel_on_signals()
    run_ranks(config, train, held_out)


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
