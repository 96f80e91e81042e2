"""The side of a run that learns from fixed examples: its data, its evaluations, and what is logged."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Generic, TypeVar

from rlhf.config.supervised import SupervisedConfig
from rlhf.data.conversations import TrainEval
from rlhf.log.reductions import UpdateOutcome, to_values
from rlhf.run.run import Run

COLUMNS = (
    ("loss", "train/loss", "{:.4f}"),
    ("accuracy", "train/accuracy", "{:.3f}"),
    ("tok/s", "learner/tokens_per_second", "{:.0f}"),
    ("s", "time/step", "{:.3g}"),
    ("lr", "learner/lr", "{:.2e}"),
    ("grad", "learner/grad_norm", "{:.2f}"),
)
MAX_SKIPPED = 20  # updates in a row, after which a training that diverged ends

C = TypeVar("C", bound=SupervisedConfig)


@contextlib.asynccontextmanager
async def supervised_loop(run: Run[C], data: TrainEval) -> AsyncIterator[SupervisedLoop[C]]:
    """Start a run and give its learners the examples; `run.config` has the number of steps.

    Raises:
        ValueError: the run began with other examples.
    """
    async with contextlib.AsyncExitStack() as exit_stack:
        with run.clock.phase("start"):
            exit_stack.enter_context(run.shown())
            loop = SupervisedLoop(run, data)
            await exit_stack.enter_async_context(run.started())
            with run.log.terminal.stage("examples"):
                await run.cluster.learners.hold(data.train.tokens, data.held_out.tokens if data.held_out else None)
                if run.restored is not None:
                    await run.cluster.load(run.restored)
        run.begin()
        yield loop


class SupervisedLoop(Generic[C]):
    """What such a run has besides `Run`."""

    def __init__(self, run: Run[C], data: TrainEval) -> None:
        self._run, self._data = run, data
        self._skipped = 0  # updates in a row
        run.log.terminal.columns = COLUMNS
        run.progress = self._progress
        for name, examples in {"train": data.train, "eval": data.held_out}.items():
            if examples is not None:
                longest, bad = run.config.data.max_tokens, examples.bad_rows
                left_out = f", {examples.too_long} left out as longer than {longest} tokens" * bool(examples.too_long)
                left_out += f", {len(bad)} left out as bad rows, the first: {bad[0]}" if bad else ""
                tokens = len(examples.tokens.token_ids)
                run.log.print(f"data {name}: {examples.rows} examples, {tokens:,} tokens{left_out}")
        now = self._progress()["stream"]
        if run.state.stream not in ({}, now):
            raise ValueError(
                f"data.train: the run began with {run.state.stream['sources']} and would go on with {now['sources']}. "
                "Resume with the same rows, tokenizer and template, or start another run.dir."
            )

    def _progress(self) -> Mapping[str, Any]:
        train = self._data.train
        return {"stream": {"sources": {"train": {"rows": train.rows, "fingerprint": train.fingerprint}}}}

    def log_step(self, step: int, outcome: UpdateOutcome) -> None:
        """Write the metrics of a finished step.

        Raises:
            RuntimeError: too many updates in a row were skipped.
        """
        run, values = self._run, to_values(outcome.metrics)
        values |= run.cluster.heartbeat.memory
        values["time/step"] = run.clock.step_seconds()
        phases, _ = run.clock.take()
        values |= {f"time/{phase}": spent for phase, spent in phases.items()}
        values["learner/tokens_per_second"] = values["train/tokens"] / max(phases["update"], 1e-9)
        values["data/epoch"] = step / run.config.updates_per_epoch(self._data.train.rows)
        trained = values.get("train/trained_tokens", 0)
        run.state.tokens["prompt"] += values["train/tokens"] - trained
        run.state.tokens["response"] += trained
        run.log_step(step, values)
        self._skipped = 0 if outcome.taken else self._skipped + 1
        if self._skipped >= MAX_SKIPPED:
            raise RuntimeError(
                f"learner.optimizer.lr={run.config.learner.optimizer.lr:g}: the training diverged: the gradients of "
                f"{MAX_SKIPPED} steps in a row were not finite. Lower lr, or set learner.max_grad_norm."
            )

    async def evaluate_if_due(self, step: int) -> None:
        """Measure the held-out examples, and log that under this step; a run that is to end saves first."""
        run = self._run
        if self._data.held_out is not None and run.evaluation_is_due(step) and not run.stop.requested:
            with run.clock.phase("evaluation"):
                values = to_values(await run.cluster.learners.evaluate())
            run.log_evaluation(step, values)
