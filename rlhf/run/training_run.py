"""One training run around its loop: data, scorer, cluster, buffer, metrics, evaluation, checkpoints.

The loop itself stands in the program (`grpo.py`); this is what it reaches for, and what start-up and resuming mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from rich.console import Console
from rich.markup import escape

from rlhf.cluster.canary import Canary
from rlhf.cluster.cluster import Cluster
from rlhf.config.run import GRPOConfig
from rlhf.data.load import LoadedPrompts, first_prompt, leave_out, load_prompts, show_prompt
from rlhf.data.model_checks import check_models
from rlhf.data.model_files import load_tokenizer, truncate_token_id
from rlhf.data.order import PromptStream
from rlhf.data.read import check_sources
from rlhf.log.measure import Clock, LearnerSpeed, SignalWatch, rollout_metrics, waiting_seconds
from rlhf.log.metrics import StepMetrics, mean_over_updates, to_values
from rlhf.log.sinks import JsonlSink, Sink, TerminalSink, WandbSink, summary_table
from rlhf.rewards.answers.extract import gold_answer
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.buffer import Account, RolloutBuffer, Staleness, Ticket
from rlhf.run.evaluation import evaluate
from rlhf.run.folder import RunFolder
from rlhf.run.sampler import Sampler
from rlhf.types import Minibatch, RolloutGroup, StepBatch

C = TypeVar("C", bound=GRPOConfig)


class TrainingRun(Generic[C]):
    """Everything of a run but its loop; an async context from start-up to the last process gone.

    The constructor checks what can be checked before anything is started and raises ValueError.
    """

    def __init__(self, config: C, *, resume: bool) -> None:
        self.config = config
        self.console = Console(soft_wrap=True)
        check_sources(config.data)
        check_models(config)
        self.folder = RunFolder(config.run.dir, resume=resume)
        self.state: dict[str, Any] = {}
        self.restored = self.folder.restored
        if self.restored is not None:
            self.state = RunFolder.read_state(self.restored)
        self.first_step: int = self.state.get("step", 0)
        self.clock = Clock(self.state.get("seconds", {}))
        self.signal_watch = SignalWatch(config, steps=config.run.steps - self.first_step)
        self._check_resumed_state()
        self.tokenizer = load_tokenizer(config.model)
        truncate_token_id(config.rollout, self.tokenizer)  # refuses what is not one token, before anything is started
        longest = config.data.max_prompt_tokens
        self.prompts = load_prompts(config.data, "train", self.tokenizer, gold_answer, max_prompt_tokens=longest)
        self.eval_prompts = load_prompts(config.data, "eval", self.tokenizer, gold_answer, max_prompt_tokens=longest)
        self.evaluations: dict[int, dict[str, float]] = {
            int(step): values for step, values in self.state.get("evaluations", {}).items()
        }
        self.updates_taken: int = self.state.get("updates_taken", 0)
        self.updates_skipped: int = self.state.get("updates_skipped", 0)
        self.tokens: dict[str, int] = defaultdict(int, self.state.get("tokens", {}))
        self.sinks: list[Sink] = []
        self._exit_stack = contextlib.AsyncExitStack()

    def _check_resumed_state(self) -> None:
        """Refuse to go on with what would not be the same run, or with nothing left to do."""
        steps = self.config.run.steps
        finished = self.first_step == steps and self.folder.summary.exists()
        if self.first_step > steps or finished:
            raise ValueError(
                f"run.steps={steps}: the newest checkpoint is of step {self.first_step}, nothing is left to do. Raise "
                "run.steps, or start another run.dir."
            )
        planned = self.state.get("updates", self.config.update_plan)
        if planned.keys() != self.config.update_plan.keys():
            ours, theirs = ("ppo", "grpo") if len(planned) < len(self.config.update_plan) else ("grpo", "ppo")
            raise ValueError(
                f"run.dir={self.folder.path}: its checkpoints are of rlhf.{theirs}, this is rlhf.{ours}. Resume with "
                f"python -m rlhf.{theirs}, or start another run.dir from its model."
            )
        for key, before in planned.items():
            now = self.config.update_plan[key]
            if now != before:
                raise ValueError(
                    f"{key}={now}: the run began with {before}, and its schedule counts optimizer steps. "
                    f"Resume with {key}={before}, or start another run.dir from this one's model."
                )

    # --- start and end ---

    async def __aenter__(self) -> TrainingRun[C]:
        try:
            with self.clock.phase("start-up"):
                await self._start()
            self.clock.start_window()
        except BaseException:
            await self._exit_stack.__aexit__(*sys.exc_info())
            raise
        return self

    async def _start(self) -> None:
        config = self.config
        self._announce()
        self.scorer = Scorer(config.reward)
        self._exit_stack.callback(self.scorer.close)
        self.scorer.restore(self.state.get("reward_status", {}))
        await asyncio.to_thread(self._check_gold)  # minutes for a large data set, in which SIGTERM is to be heard
        self._open_stream()
        self.folder.create(config)
        self._open_sinks()
        self.console.print(
            f"starting {config.cluster.engines} engine(s) and {config.cluster.learners} learner(s) on "
            f"{config.cluster.device} ...",
            highlight=False,
        )
        self.cluster = await self._exit_stack.enter_async_context(Cluster(config, first_step=self.first_step))
        self.sampler = Sampler(config, self.cluster, self.scorer, self.tokenizer)
        self.canary = Canary(
            next(iter(self.prompts.prompts.values())),
            dtype=config.model.dtype,
            max_tokens=config.max_sequence_tokens,
        )
        self.speed = LearnerSpeed(config, (await self.cluster.learners.call("device_name"))[0])
        await self.canary.measure_noise(self.cluster)  # before a checkpoint: both sides hold model.path now
        if self.restored is not None:
            await self.cluster.load(self.restored, self.first_step)
        await self.canary.check_start(self.cluster, self.first_step)
        self.terminal.start()
        self.buffer = RolloutBuffer(
            self.sampler.for_training,
            self._next_ticket,
            groups_per_step=config.rollout.prompts_per_step,
            total_steps=config.run.steps,
            staleness=Staleness(config.rollout.max_policy_lag),
            step=self.first_step,
            account=Account(**self.state.get("account", {})),
            max_replacements=config.rollout.max_replacements if config.rollout.dynamic_sampling else 0,
            deciding_part=config.rollout.dynamic_sampling_part,
        )
        self._exit_stack.push_async_callback(self.buffer.close)

    def _announce(self) -> None:
        console = self.console
        for warning in (*self.config.warnings, *self.folder.warnings):
            self._warn(warning)
        for source, rows in self.prompts.prompts.items():
            dropped = self.prompts.dropped_too_long[source]
            left_out = (
                f", {dropped} left out as longer than {self.config.data.max_prompt_tokens} tokens" if dropped else ""
            )
            console.print(f"data {source}: {len(rows)} prompts{left_out}", highlight=False)
        console.print("first prompt, as the model is given it:")
        console.print(show_prompt(first_prompt(self.prompts), self.tokenizer), markup=False, highlight=False)
        if self.restored is not None:
            console.print(f"resuming from {self.restored}", highlight=False)

    def _warn(self, text: str) -> None:
        self.console.print(f"[yellow]warning:[/yellow] {escape(text)}", highlight=False)

    def _check_gold(self) -> None:
        """Grade every gold answer against itself; what cannot be graded fails the run or leaves the data."""
        self.prompts = self._with_good_gold("train", self.prompts)
        self.eval_prompts = self._with_good_gold("eval", self.eval_prompts)

    def _with_good_gold(self, which: Literal["train", "eval"], loaded: LoadedPrompts) -> LoadedPrompts:
        bad = self.scorer.check_gold(prompt for rows in loaded.prompts.values() for prompt in rows)
        if not bad:
            return loaded
        named = "\n".join(f"  {row.row}: {row.answer!r} ({row.reason})" for row in bad[:5])
        more = f"\n  and {len(bad) - 5} more" if len(bad) > 5 else ""
        if self.config.reward.bad_gold == "fail":
            raise ValueError(
                f"{len(bad)} gold answers cannot be graded:\n{named}{more}\n"
                "Repair these rows, or set reward.bad_gold=skip to leave them out."
            )
        self.console.print(f"left out {len(bad)} rows whose gold answer cannot be graded:\n{named}{more}")
        return leave_out(self.config.data, which, loaded, {row.row for row in bad})

    def _open_sinks(self) -> None:
        config = self.config
        self.sinks.append(JsonlSink(self.folder.metrics, resume_step=self.first_step if self.restored else None))
        self.wandb_id: str | None = self.state.get("wandb_run_id")
        if config.logging.wandb.mode != "disabled":
            settings, resolved = config.logging.wandb, config.model_dump(mode="json")
            wandb = WandbSink(settings, self.folder.path, resolved, run_id=self.wandb_id, warn=self._warn)
            self.wandb_id = wandb.run_id
            self.sinks.append(wandb)
        self.terminal = TerminalSink(self.console, total_steps=config.run.steps, first_step=self.first_step)
        self.sinks.append(self.terminal)
        for sink in self.sinks:
            self._exit_stack.push(_closing(sink))

    async def __aexit__(self, *failure: Any) -> None:
        await self._exit_stack.__aexit__(*failure)

    # --- prompts ---

    def _open_stream(self) -> None:
        """The seeded order of the prompts; a resumed run goes on in it, first with what was under way."""
        loaded = self.prompts
        self.stream = PromptStream(loaded.prompts, rows_per_epoch=loaded.rows_per_epoch, seed=self.config.run.seed)
        self._outstanding: list[Ticket] = []
        if self.restored is not None:
            self._restore_stream()

    def _next_ticket(self) -> Ticket:
        if self._outstanding:
            return self._outstanding.pop(0)
        position = self.stream.drawn
        return Ticket(position, self.stream.take(1)[0])

    def _restore_stream(self) -> None:
        """Go on where the checkpoint stood: first the prompts that were under way, then the rest of the stream."""
        state = self.state["stream"]
        tickets = []
        for position in self.state["outstanding"]:
            self.stream.restore({**state, "drawn": position})
            tickets.append(Ticket(position, self.stream.take(1)[0]))
        self.stream.restore(state)
        self._outstanding = tickets

    # --- around a step ---

    async def evaluate(self, step: int, *, due: bool) -> None:
        """Evaluate the current policy on all of `data.eval`, log it under this step."""
        if not due or not self.eval_prompts.prompts:
            return
        with self.clock.phase("evaluation"):
            values = await evaluate(
                self.eval_prompts.prompts, self.sampler.for_evaluation, at_once=self.config.evaluation_groups_at_once
            )
        self.evaluations[step] = values
        for sink in self.sinks:
            sink.log(step, values)
        self.terminal.evaluation(step, values)

    def account(self, batch: StepBatch) -> None:
        """Book what became of the step's rollouts: unscorable ones failed, cut-off ones were filtered."""
        unscorable = int(np.isnan(batch.rewards).sum())
        trained = int(batch.trained.sum())
        self.buffer.account.trained += trained
        self.buffer.account.failed += unscorable
        self.buffer.account.filtered += len(batch.rewards) - trained - unscorable

    def log_step(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        batch: StepBatch,
        advantages: np.ndarray,
        epochs: Sequence[Sequence[Minibatch]],
        updates: Sequence[StepMetrics],
        measured: dict[str, float],
    ) -> None:
        """Reduce and write everything that is known about a finished step.

        Args:
            advantages: [B], one per response.
            epochs: minibatches of the policy; empty while a critic warms up.
            measured: metrics that are logged as they are.
        """
        learned = mean_over_updates(updates)
        if "learner/updates_taken" in learned:  # the policy waits while a critic warms up
            self.updates_taken = int(learned["learner/updates_taken"].value())
            self.updates_skipped = int(learned["learner/updates_skipped"].value())
        response_tokens = int(batch.response_lengths.sum())
        self.tokens["prompt"] += len(batch.tokens.token_ids) - response_tokens
        self.tokens["response"] += response_tokens
        metrics = rollout_metrics(groups, advantages, step=step - 1) | learned
        values = to_values(metrics) | measured | self.buffer.account.metrics()
        values["time/step"] = self.clock.step_seconds()
        phases, window_s = self.clock.take()
        rate, engines_busy_s = self.sampler.meter.take()
        values |= waiting_seconds(phases, window_s, engines_busy_s)
        values |= self.speed.of_step(batch, epochs, self.cluster.learners.shared, phases.get("update", 0.0))
        values |= {
            "rollout/tokens_per_second": rate,
            "data/epoch": self.stream.epochs,
            "sync/seconds": phases["transfer"],
        }
        values |= {f"time/{phase}": spent for phase, spent in phases.items()}
        values |= {f"reward/status/{name}": count for name, count in self.scorer.counters.items()}
        for sink in self.sinks:
            sink.log(step, values)
        self.terminal.warn(self.scorer.new_errors())
        if self.config.logging.rollouts:
            self.folder.write_rollouts(step, groups, advantages.tolist())
        if (warning := self.signal_watch.after_step(groups, advantages)) is not None:
            self._warn(warning)

    async def move_reference(self, done: int) -> None:
        """After `done` training steps: replace the reference by the policy when that is due, or average it in."""
        algo = self.config.algo
        if algo.ref_update == "average":
            await self.cluster.learners.call("blend_reference", algo.ref_decay)
        elif algo.ref_update == "replace" and done % algo.ref_every == 0:
            await self.cluster.learners.call("blend_reference", 0.0)

    async def checkpoint(self, step: int, *, last: bool, more_state: dict[str, Any] | None = None) -> None:
        """Write a checkpoint every `checkpoint_every` steps, and after the last step where checkpoints are on.

        Args:
            more_state: what the program itself has to remember, JSON; it finds it in `state` when it resumes.
        """
        every = self.config.checkpoint_every
        if every is None or (step % every and not last):
            return
        with self.clock.phase("checkpoint"):
            folder = self.folder.begin_checkpoint(step)
            await self.cluster.save(folder)
            account = self.buffer.account
            state = {
                "step": step,
                "updates": self.config.update_plan,
                "stream": self.stream.state(),
                "outstanding": self.buffer.outstanding(),
                # what is waiting will be sampled again by a resumed run
                "account": {**vars(account), "sampled": account.sampled - account.waiting},
                "updates_taken": self.updates_taken,
                "updates_skipped": self.updates_skipped,
                "tokens": dict(self.tokens),
                "reward_status": dict(self.scorer.counters),
                "evaluations": self.evaluations,
                "wandb_run_id": self.wandb_id,
                "seconds": dict(self.clock.total),
                **(more_state or {}),
            }
            # Every byte is read again for its checksum: minutes for a large model, in which engines are to be served.
            await asyncio.to_thread(self.folder.finish_checkpoint, folder, state, keep=self.config.checkpoint.keep)

    async def finish(self) -> None:
        """Export the model and write the summary."""
        config = self.config
        if config.run.export:
            with self.clock.phase("export"):
                await self.cluster.learners.call("export", str(self.folder.model.resolve()), config.model.path)
        before, after = self.evaluations.get(0, {}), self.evaluations.get(config.run.steps, {})
        summary = {
            "evaluation_before": before,
            "evaluation_after": after,
            "steps": config.run.steps,
            "updates_planned": config.total_updates,
            "updates_taken": self.updates_taken,
            "updates_skipped": self.updates_skipped,
            "seconds": {name: round(s, 3) for name, s in self.clock.total.items()},
            "tokens": dict(self.tokens),
            **self.buffer.account.metrics(),
        }
        self.folder.write_summary(summary)
        training = sum(s for name, s in self.clock.total.items() if name not in ("start-up", "evaluation"))
        if after:
            self.console.print(summary_table(before, after, training))
        self.console.print(f"run folder: {self.folder.path}", highlight=False)


def _closing(sink: Sink) -> Callable[..., None]:
    """Close a sink at the end of the run, and tell it whether the run failed."""

    def close(kind: type[BaseException] | None, *_: object) -> None:
        sink.close(failed=kind is not None)

    return close
