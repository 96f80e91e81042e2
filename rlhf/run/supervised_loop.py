"""The loop of runs that learn from fixed examples (rlhf.sft, rlhf.reward_model): start, metrics, evaluations."""

from __future__ import annotations

import contextlib
from typing import Any

from rlhf.config.supervised import SupervisedConfig
from rlhf.data.conversations import TrainEval
from rlhf.data.read import left_out_text
from rlhf.log.reductions import StepMetrics, merge_metrics, to_values
from rlhf.run.run import Run
from rlhf.run.useless_steps import skipped_updates_warnings

COLUMNS = (
    ("loss", "train/loss", "{:.4f}"),
    ("accuracy", "train/accuracy", "{:.3f}"),
    ("tok/s", "learner/tokens_per_second", "{:.0f}"),
    ("s", "time/step", "{:.3g}"),
    ("lr", "learner/lr", "{:.2e}"),
    ("grad", "learner/grad_norm", "{:.2f}"),
)
MAX_SKIPPED = 20  # updates in a row, after which a training that diverged ends


async def train_on_examples(run: Run[Any], data: TrainEval) -> None:
    """The run of a supervised program: start, evaluate, take the steps, evaluate, export.

    The learners hold all examples. Each step they draw its minibatch by seed and step, and take one optimizer step on
    it. ValueError if the run began with other examples.
    """
    async with contextlib.AsyncExitStack() as exit_stack:
        with run.clock.phase("start"):
            exit_stack.enter_context(run.live_output(COLUMNS))
            loop = SupervisedLoop(run, data)
            await exit_stack.enter_async_context(run.open_cluster())
            with run.log.terminal.stage("examples"):
                await run.cluster.learners.hold(data.train.tokens, data.held_out.tokens if data.held_out else None)
                if run.restored is not None:
                    await run.cluster.load(run.restored)
        run.end_start_up()
        await loop.evaluate_if_due(run.first_step)
        if run.ends:  # as that evaluation asked
            await run.checkpoint_if_due(run.first_step, loop.progress)
        for step in range(run.first_step, run.config.steps):
            await loop.train(step)
            await loop.evaluate_if_due(step + 1)
            await run.checkpoint_if_due(step + 1, loop.progress)  # SIGTERM ends the run here, saved
        await run.finish({}, loop.progress)


class SupervisedLoop:
    """The parts of a run that trains on examples: its data, steps and evaluation."""

    def __init__(self, run: Run[SupervisedConfig], data: TrainEval) -> None:
        self._run, self._data = run, data
        self._skipped = 0  # updates in a row
        for name, examples in {"train": data.train, "eval": data.held_out}.items():
            if examples is not None:
                left_out = left_out_text(examples.too_long, run.config.data.max_tokens, examples.bad_rows)
                count = len(examples.tokens.token_ids)
                run.log.print(f"data {name}: {examples.rows} examples, {count:,} tokens{left_out}")
        if data.held_out is not None:
            run.check_held_out(data.train.row_keys, {"eval": [*data.held_out.row_keys]})
        sources = {"train": {"rows": data.train.rows, "fingerprint": data.train.fingerprint}}
        self._stream = {"sources": sources}
        if run.state.stream not in ({}, self._stream):
            raise ValueError(
                f"data.train: the run began with {run.state.stream['sources']} and would go on with {sources}. "
                "Resume with the same rows, tokenizer and template, or start another run.dir."
            )
        tokens = data.train.tokens
        self._example = run.tokenizer.decode(tokens.token_ids[: int(tokens.response_mask.argmax())].tolist())

    def progress(self) -> dict[str, Any]:
        """The fields of the state in a checkpoint that say what the examples are."""
        return {"stream": self._stream, "example": self._example}

    async def train(self, step: int) -> None:
        """Take the optimizer step with this number, from 0, and log its metrics; the learners draw the minibatch.

        RuntimeError if too many updates in a row were skipped.
        """
        run = self._run
        run.clock.start_step()
        async with run.profiled(step + 1):
            with run.clock.phase("update"):
                outcome = await run.cluster.learners.train(step)
        step, values = step + 1, to_values(outcome.metrics)
        values["time/step"] = run.clock.step_seconds()
        phases, _ = run.clock.take()
        values |= {f"time/{phase}": spent for phase, spent in phases.items()}
        values["learner/tokens_per_second"] = values["train/tokens"] / max(phases["update"], 1e-9)
        values["data/epoch"] = step / run.config.updates_per_epoch(self._data.train.rows)
        trained = values.get("train/trained_tokens", 0)
        run.state.tokens["prompt"] += values["train/tokens"] - trained
        run.state.tokens["response"] += trained
        run.log_step(step, values)
        run.log.warn(*skipped_updates_warnings(step, [outcome], {}))
        self._skipped = 0 if outcome.taken else self._skipped + 1
        if self._skipped >= MAX_SKIPPED:
            raise RuntimeError(
                f"learner.optimizer.lr={run.config.learner.optimizer.lr:g}: the training diverged: the gradients of "
                f"{MAX_SKIPPED} steps in a row were not finite. Lower lr, or set learner.max_grad_norm."
            )

    async def evaluate_if_due(self, step: int) -> None:
        """Evaluate on data.eval if it is due. If a stop was requested, skip it; the resumed run evaluates."""
        run = self._run
        if self._data.held_out is None or not run.evaluation_is_due(step):
            return
        parts: list[StepMetrics] = []
        with run.clock.phase("evaluation"):
            while not run.stop.requested and (metrics := await run.cluster.learners.evaluate(len(parts))) is not None:
                parts.append(metrics)
        if not run.stop.requested:  # else a resumed run does this evaluation
            run.log_evaluation(step, to_values(merge_metrics(parts)))
