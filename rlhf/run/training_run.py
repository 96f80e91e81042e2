"""One training run without its loop: what `grpo.py` and `ppo.py` call, from start-up to the last checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from rlhf.cluster.canary import Canary
from rlhf.cluster.cluster import Cluster
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import flat_keys
from rlhf.config.secrets import hidden
from rlhf.data.load import load_prompts
from rlhf.data.model_files import load_tokenizer, truncate_token_id
from rlhf.log.clock import Clock, waiting_seconds
from rlhf.log.diagnosis import Diagnosis
from rlhf.log.reductions import UpdateOutcome, mean_over_updates, to_histograms, to_values
from rlhf.log.sinks import Details, evaluation_table
from rlhf.rewards.answers.extract import gold_answer
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.buffer import RolloutBuffer, Staleness
from rlhf.run.evaluation import evaluate, evaluation_metrics
from rlhf.run.folder import RunFolder, best_step, rollout_rows
from rlhf.run.manifest import PARTIAL
from rlhf.run.mirror import Mirror
from rlhf.run.model_card import model_card
from rlhf.run.outputs import RunLog
from rlhf.run.prompts import PromptTickets
from rlhf.run.resume import (
    check_not_finished,
    check_resumed_state,
    check_reward_code,
    model_fingerprints,
    resume_warnings,
)
from rlhf.run.rollout_metrics import rollout_metrics
from rlhf.run.sample_and_grade import Sampler, groups_at_engines
from rlhf.run.saving import CheckpointSaver
from rlhf.run.skipped import SkippedBatches
from rlhf.run.speed import LearnerSpeed
from rlhf.run.startup import check_prompts_suffice, check_reward_model_reads, show_data, without_bad_gold
from rlhf.run.state import RunState, code_state
from rlhf.run.stop import Stop
from rlhf.run.token_values import token_values
from rlhf.run.useless_steps import UselessSteps, updates_taken
from rlhf.types import Minibatch, PolicyTargets, RolloutGroup, StepBatch

SAVE_S = 60.0  # that a failed run waits for the checkpoint that is being written
SAY_FRACTION = 0.1  # of cluster.step_deadline_s, after which a step says which groups it waits for
LOST_SAVE_S = 15.0  # where Ray has ended: learners that still live may complete it
TABLES, GROUPS_IN_TABLE = 20, 2  # tables of sampled responses in a run, for wandb; groups in each

C = TypeVar("C", bound=GRPOConfig)


class TrainingRun(Generic[C]):
    """Everything of a run except its loop; an async context from start-up to the end of the last process.

    The config has passed `plan.start_problems`. The constructor checks the rest of what can be checked before anything
    is started: the run folder's contents, the tokenizer and every row of the data. It raises ValueError.

    Attributes:
        state: what the run has counted so far; a resumed run begins with the state of its checkpoint.
        restored: the checkpoint that a resumed run goes on from.
        lost_folder: what happened to the run folder, if it was renamed or removed: the run ends at the next boundary.
    """

    def __init__(self, config: C, *, resume: bool, start_at: str | None = None) -> None:
        self.config = config
        if resume and start_at is None:
            check_not_finished(config)
        mirror = config.checkpoint.mirror
        self.mirror = None if mirror is None else Mirror(mirror)
        self.folder = RunFolder(config.run.dir, resume=resume, mirror=self.mirror, start_at=start_at)
        self.restored = self.folder.restored
        self.state = RunState() if self.restored is None else RunFolder.read_state(self.restored)
        check_resumed_state(config, self.folder, self.state)
        self.first_step = self.state.step
        self.log = RunLog(config, first_step=self.first_step, state=self.state)
        self.clock = Clock(self.state.seconds, self.log.terminal.phase)
        self.diagnosis = Diagnosis(flat_keys(hidden(config.model_dump(mode="json"))))
        self.useless_steps = UselessSteps(config.run, self.diagnosis)
        self.skipped = SkippedBatches(lambda: self.folder.path / "skipped", self.log.warn)
        self.stop = Stop(config.run.grace_s, self.log.print)
        with self.log.terminal.stage("data"):
            self.tokenizer = load_tokenizer(config.model)
            truncate_token_id(config.rollout, self.tokenizer)  # raises ValueError unless it is one token
            self.prompts = load_prompts(config.data, "train", self.tokenizer, gold_answer)
            check_prompts_suffice(config, self.prompts)
            check_reward_model_reads(config, self.prompts)
            self.eval_prompts = load_prompts(config.data, "eval", self.tokenizer, gold_answer)
        self.lost_folder = ""
        self._exit_stack = contextlib.AsyncExitStack()

    # --- start and end ---

    async def __aenter__(self) -> TrainingRun[C]:
        try:
            with self.clock.phase("start"):
                await self._start()
            self.clock.start_window()
            self.stop.can_save = True
        except BaseException:
            await self._exit_stack.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._exit_stack.__aexit__(*failure)

    async def _start(self) -> None:
        self._exit_stack.enter_context(self.log.terminal.live())
        self._announce()
        with self.log.terminal.stage("grader"):
            await self._prepare_data()
        self.folder.create(self.config)
        self.log.open(self.folder, self._exit_stack)
        await self._start_cluster()
        self.log.terminal.evaluation_steps = [
            step for step in range(self.first_step, self.config.run.steps + 1) if self.evaluation_is_due(step)
        ]
        self.log.terminal.start()
        self._open_buffer()

    def _announce(self) -> None:
        for warning in (*self.config.warnings(), *self.folder.warnings, *resume_warnings(self.config, self.state)):
            self.log.warn(warning)
        longest = self.config.data.max_prompt_tokens
        show_data(self.log.print, self.prompts, self.tokenizer, max_prompt_tokens=longest)
        if self.restored is not None:
            self.log.print(f"resuming from {self.restored}")

    async def _prepare_data(self) -> None:
        """Start the scorer, check the gold answers with it, and put the prompts in their order."""
        config = self.config
        self.scorer = Scorer(config.reward, say=partial(self.log.print, wrap=False))
        self._exit_stack.callback(self.scorer.close)
        self.scorer.restore(self.state.reward_status)
        code_changes = check_reward_code(config, self.state, self.scorer.sources)
        for warning in (*self.scorer.warnings, *code_changes):
            self.log.warn(warning)

        def check_gold() -> None:
            say = self.log.print
            self.prompts = without_bad_gold("train", self.prompts, config, self.scorer, say)
            self.eval_prompts = without_bad_gold("eval", self.eval_prompts, config, self.scorer, say)

        await asyncio.to_thread(check_gold)  # takes minutes for a large data set; SIGTERM must still be handled
        check_prompts_suffice(config, self.prompts)
        restored = None if self.restored is None else self.state
        self.tickets = PromptTickets(self.prompts, seed=config.run.seed, restored=restored)

    async def _start_cluster(self) -> None:
        """Start engines and learners, load a checkpoint, and check that both hold the same weights."""
        config, stage = self.config, self.log.terminal.stage
        self.log.print(
            f"starting {config.cluster.engines} engine(s) and {config.cluster.learners} learner(s) on "
            f"{config.cluster.device} ..."
        )
        self.cluster = Cluster(config, first_step=self.first_step)
        self.cluster.watch_stage = stage
        self.cluster.heartbeat.others = lambda: self.scorer.processes
        await self._exit_stack.enter_async_context(self.cluster)
        self.saver = CheckpointSaver(
            config.checkpoint, self.folder, self.cluster.checkpoints, self.tokenizer, self.mirror, self.log.warn,
            self.log.files.check,
        )  # fmt: skip
        self._exit_stack.push_async_callback(self._close_saver)
        self.sampler = Sampler(config, self.cluster, self.scorer, self.tokenizer)
        self.canary = Canary(
            next(iter(self.prompts.prompts.values())),
            dtype=config.model.dtype,
            max_tokens=config.max_sequence_tokens,
            noise_seed=config.noise_seed,
        )
        self.speed = LearnerSpeed(config, (await self.cluster.learners.call("device_name"))[0])
        with stage("check"):
            await self.canary.measure_noise(self.cluster)  # before a checkpoint is loaded: both sides hold model.path
            await self.sampler.normalize_scores(self.prompts, self.state)
            if self.restored is not None:
                await self.cluster.load(self.restored)
            await self.canary.check_start(self.cluster, self.first_step)
        self.cluster.replace_lost_engines(partial(self.canary.check_joined, self.cluster))

    async def _close_saver(self) -> None:
        await self.saver.close(within_s=LOST_SAVE_S if self.cluster.lost else SAVE_S)

    def _open_buffer(self) -> None:
        config = self.config
        self.buffer = RolloutBuffer(
            self.sampler.for_training,
            self.tickets.next,
            groups_per_step=config.rollout.prompts_per_step,
            total_steps=config.run.steps,
            staleness=Staleness(config.rollout.max_policy_lag, config.rollout.on_stale),
            step=self.first_step,
            account=self.state.account,
            replacements=self.state.replacements,
            max_replacements=config.rollout.max_replacements if config.rollout.dynamic_sampling else 0,
            deciding_part=config.rollout.dynamic_sampling_part,
            in_order=config.run.deterministic,
            max_running=None if config.run.deterministic else groups_at_engines(config),
            # the call of an engine has step_deadline_s; another engine may then take its place
            deadline_s=2 * config.cluster.step_deadline_s,
        )
        self.log.terminal.sampling_waits_for = self.buffer.waits_for
        self._exit_stack.push_async_callback(self.buffer.close)

    # --- around a step ---

    @contextlib.asynccontextmanager
    async def profiled(self, step: int) -> AsyncIterator[None]:
        """A context around a training step; learner 0 writes a trace of it if `logging.profile_steps` names it."""
        if step not in self.config.logging.profile_steps:
            yield
            return
        from rlhf.learner import profile

        file = str(self.folder.path.resolve() / "profile" / f"step-{step:06d}.json.gz")
        await self.cluster.learners.call_one(0, "apply", profile.start, what="profiling")
        yield
        if why := await self.cluster.learners.call_one(0, "apply", profile.stop, file, what=f"writing {file}"):
            self.log.warn(f"{file} was not written: {why}.")

    async def take_groups(self, step: int) -> Sequence[RolloutGroup]:
        """The graded groups for the step after `step` finished ones; a signal meanwhile saves and ends the run."""
        say_s = self.config.cluster.step_deadline_s * SAY_FRACTION
        say = asyncio.get_running_loop().call_later(say_s, lambda: self.log.print(f"{self.buffer.waits_for()}."))
        try:
            groups = await self.stop.unless_requested(self.buffer.take())
        finally:
            say.cancel()
        if groups is None:
            await self.checkpoint_if_due(step)
        assert groups is not None, "checkpoint_if_due ends the run"
        return groups

    def evaluation_is_due(self, step: int) -> bool:
        """Whether the `evaluation` section asks for an evaluation after this many steps, and it was not done yet."""
        evaluation = self.config.evaluation
        if step in self.state.evaluations:
            return False
        if step == 0:
            return evaluation.at_start and self.first_step == 0
        if step == self.config.run.steps:
            return evaluation.at_end
        return evaluation.every is not None and step % evaluation.every == 0

    async def evaluate_if_due(self, step: int) -> None:
        """Evaluate the current policy on all of `data.eval`, and log it under this step."""
        if not self.evaluation_is_due(step) or not self.eval_prompts.prompts:
            return
        with self.clock.phase("evaluation"):
            at_once = self.config.evaluation_groups_at_once
            count = self.log.terminal.progress("problem", sum(map(len, self.eval_prompts.prompts.values())))
            evaluation = evaluate(self.eval_prompts.prompts, self.sampler.for_evaluation, at_once=at_once, count=count)
            groups = await self.stop.unless_requested(evaluation)
        if groups is None:
            return  # a resumed run does this evaluation
        values = evaluation_metrics(groups)
        self.state.evaluations[step] = values
        self.diagnosis.after_evaluation(values)
        self.log.write(step, values)
        self.log.terminal.evaluation(step, values)

    def count_rollouts(self, batch: StepBatch) -> None:
        """Count the rollouts of the step by their use, and their tokens."""
        self.buffer.count(batch)
        response_tokens = int(batch.response_lengths.sum())
        self.state.tokens["prompt"] += len(batch.tokens.token_ids) - response_tokens
        self.state.tokens["response"] += response_tokens

    def log_step(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        batch: StepBatch,
        advantages: np.ndarray,
        targets: PolicyTargets,
        epochs: Sequence[Sequence[Minibatch]],
        updates: Sequence[UpdateOutcome],
        measured: dict[str, float],
    ) -> None:
        """Write the metrics and the rollouts of a finished step.

        Args:
            advantages: [B], one per response.
            epochs: minibatches of the policy; empty while a critic warms up.
            measured: metrics that are logged as they are.
        """
        self._follow_folder()
        asynchronous = self.config.rollout.max_policy_lag > 0
        sampled = rollout_metrics(groups, advantages, version=step - 1, asynchronous=asynchronous)
        learned = mean_over_updates(updates)
        metrics = sampled | learned
        values = to_values(metrics)
        values |= measured | self.buffer.account_metrics() | self.cluster.heartbeat.memory
        values["time/step"] = self.clock.step_seconds()
        phases, window_s = self.clock.take()
        rate, engines_busy_s = self.sampler.meter.take()
        values |= waiting_seconds(phases, window_s, engines_busy_s)
        values |= self.speed.of_step(batch, epochs, self.cluster.learners.shared, phases.get("update", 0.0))
        values["time/slow_groups"], self.buffer.slow_wait_s = self.buffer.slow_wait_s, 0.0
        values |= {"rollout/tokens_per_second": rate, "data/epoch": self.tickets.stream.epochs}
        rollout = self.config.rollout
        values |= self.canary.check_rollouts(learned, temperature=rollout.temperature, max_lag=rollout.max_policy_lag)
        values |= {f"time/{phase}": spent for phase, spent in phases.items()}
        counted = self.scorer.counted_besides(self.buffer.outstanding_prompts())
        values |= {f"reward/status/{name}": count for name, count in counted.items()}
        rows = rollout_rows(step, groups, advantages.tolist())
        every = -(-self.config.run.steps // TABLES)
        shown = [] if step % every else rows[: sum(len(group.samples) for group in groups[:GROUPS_IN_TABLE])]
        self.log.write(step, values, Details(to_histograms(metrics), shown))
        if self.config.logging.rollouts:
            if self.config.logging.token_values:
                of_tokens = token_values(batch, targets, self.tokenizer)
                rows = [row | values for row, values in zip(rows, of_tokens, strict=True)]
            self.folder.write_rollouts(step, rows, self.log.files)
        for error in self.scorer.new_errors():
            self.log.warn(error)
        trained = int(batch.trained.sum())
        self.useless_steps.after_step(groups, advantages, trained=trained, updates_taken=updates_taken(updates))
        for finding in self.diagnosis.after_step(step, values):
            self.log.alert(finding.title, finding.text)

    async def _count_updates(self) -> None:
        counts = await self.cluster.learners.call("update_counts")
        self.state.updates_taken, self.state.updates_skipped = counts[0]

    async def update_reference(self, done: int) -> None:
        """After `done` training steps: replace the reference by the policy when due, or average the policy into it."""
        algo = self.config.algo
        if algo.ref_update == "average":
            await self.cluster.learners.call("blend_reference", algo.ref_decay)
        elif algo.ref_update == "replace" and done % algo.ref_every == 0:
            await self.cluster.learners.call("blend_reference", 0.0)

    def checkpoint_is_due(self, step: int) -> bool:
        """Every `checkpoint_every` steps, after the last and the best step, and at a signal; never if that is null."""
        every, best = self.config.checkpoint_every, self.config.checkpoint.best
        is_best = best is not None and best_step(self.state.evaluations, best) == step
        is_last = step == self.config.run.steps
        ends = self.stop.requested or bool(self.lost_folder)
        return every is not None and (step % every == 0 or is_last or is_best or ends)

    def _follow_folder(self) -> None:
        """Go on writing into the run folder where it was renamed to, until the run ends at the next step boundary."""
        before = self.folder.path
        if happened := self.folder.follow():
            self.lost_folder = happened
            self.log.files.move(before, self.folder.path)

    async def checkpoint_if_due(self, step: int) -> None:
        """Write a checkpoint if one is due or the last save failed. If a signal asks the run to end, then end it.

        Raises:
            RuntimeError: the run folder was renamed or removed; the run is saved and ends, or it would go on in two.
        """
        self._follow_folder()
        is_due = self.checkpoint_is_due(step)
        with self.clock.phase("checkpoint"), self.stop.saving():
            if (is_due and step > max(self.folder.saved_step, self.saver.writing_step)) or self.saver.failure:
                await self.saver.save(await self._state_after(step))
        if self.stop.requested or self.lost_folder:
            await self._end_saved(step)

    async def _end_saved(self, step: int) -> None:
        """Complete the save that is under way; then end the run, if a signal or a lost run folder asks for that."""
        with self.clock.phase("checkpoint"), self.stop.saving():
            await self.saver.finish()
            self._follow_folder()
            if self.lost_folder and self.saver.failure:  # the save had begun where the folder was before
                await self.saver.save(await self._state_after(step))
                await self.saver.finish()
        if not (self.stop.requested or self.lost_folder):
            return
        self.stop.close()
        saved = self.folder.saved_step
        if self.lost_folder:
            kept = f"Go on from step {saved} with --resume run.dir={self.folder.path}" if saved else "Nothing was saved"
            raise RuntimeError(f"{self.lost_folder} The run ends after step {step}. {kept}.")
        kept = f"Go on from step {saved} with --resume." if saved else "Nothing was saved."
        self.log.print(f"the run ends after step {step}, as it was asked to. {kept}")
        raise asyncio.CancelledError

    async def _state_after(self, step: int) -> RunState:
        """All that the driver knows about the run, for a checkpoint."""
        await self._count_updates()
        if not self.state.models:
            self.state.models = await asyncio.to_thread(model_fingerprints, self.config)
        account = self.buffer.account
        return replace(
            self.state,
            step=step,
            config=hidden(self.config.model_dump(mode="json")),
            rewards=self.scorer.sources,
            code=await asyncio.to_thread(code_state),
            updates=self.config.update_plan,
            stream=self.tickets.stream.state(),
            outstanding=sorted([*self.buffer.outstanding(), *self.tickets.waiting()]),
            # a resumed run samples the waiting rollouts again
            account=replace(account, sampled=account.sampled - self.buffer.waiting),
            replacements=self.buffer.replacements,
            reward_status=self.scorer.counted_besides(self.buffer.outstanding_prompts()),
            wandb_run_id=self.log.wandb_run_id,
            mlflow_run_id=self.log.mlflow_run_id,
            seconds=dict(self.clock.total),
            # copies, because the loop goes on changing these
            tokens=dict(self.state.tokens),
            evaluations=dict(self.state.evaluations),
        )

    async def finish(self) -> None:
        """Export the model and write the summary.

        Raises:
            OSError: the end of the log could not be written.
            RuntimeError: the last checkpoint could not be written; the export and the summary were.
        """
        config, steps = self.config, self.config.run.steps
        await self._end_saved(steps)
        self.stop.close()
        if config.run.export:
            with self.clock.phase("export"):
                exported = self.folder.model.with_suffix(PARTIAL)
                shutil.rmtree(exported, ignore_errors=True)
                await self.cluster.learners.call("export", str(exported.resolve()), config.model.path)
                card = model_card(await self._state_after(steps), self.folder.metrics)
                (exported / "README.md").write_text(card)
                shutil.rmtree(self.folder.model, ignore_errors=True)  # of an earlier end, before run.steps grew
                exported.rename(self.folder.model)
        end = await self._state_after(steps)
        counted = {"updates_planned": config.training.total_updates, **self.buffer.account_metrics()}
        self.folder.write_summary(end.summary() | counted)
        if after := end.evaluations.get(steps):
            training_s = sum(spent for phase, spent in end.seconds.items() if phase not in ("start", "evaluation"))
            table = {"before": end.evaluations.get(0, {}), "after": after}
            self.log.console.print(evaluation_table(f"evaluation, {training_s:.0f} s of training", table))
        if notice := self.diagnosis.notice():
            self.log.warn(notice)
        self.log.print(f"run folder: {self.folder.path}")
        self.log.files.check()
        if self.saver.failure:
            raise RuntimeError(f"{self.saver.failure} Make room, and repeat the last steps with --resume.")
