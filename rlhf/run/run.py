"""A training run without its loop: folder, state, log, clock, stop, saving, and the cluster. Every program has one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhf.check.start_checks import dtype_warnings, learning_rate_warnings
from rlhf.cluster.actors import ClusterError
from rlhf.cluster.cluster import Cluster
from rlhf.config import cli
from rlhf.config.base import error_text
from rlhf.config.load import flat_keys
from rlhf.config.model_folder import full_name
from rlhf.config.program import TrainingProgramConfig
from rlhf.data.model_files import load_tokenizer
from rlhf.data.read import count_trained_rows
from rlhf.log.clock import Clock
from rlhf.log.diagnosis import Diagnosis
from rlhf.log.panels import metric_title
from rlhf.log.sinks import NO_DETAILS, TRAINED_SHARE, Details, evaluation_table
from rlhf.log.terminal import ROLLOUT_COLUMNS, Columns
from rlhf.run.callbacks import Callbacks
from rlhf.run.checkpoint_files import PARTIAL
from rlhf.run.checkpoint_mirror import Mirror
from rlhf.run.checkpoint_saver import CheckpointSaver
from rlhf.run.folder import RunFolder, best_step
from rlhf.run.model_card import model_card
from rlhf.run.resume import check_not_finished, check_resumed_state, model_fingerprints, resume_warnings
from rlhf.run.run_log import RunLog
from rlhf.run.state import RunState, code_state
from rlhf.run.stop import Stop
from rlhf.types import RolloutGroup

SAVE_S = 60.0  # a failed run waits this long for the checkpoint that is being written
LOST_SAVE_S = 15.0  # the same if Ray has ended: learners that are still alive may complete it

C = TypeVar("C", bound=TrainingProgramConfig)
Progress = Callable[[], Mapping[str, Any]]  # fields of the state that the program's own loop adds to a checkpoint


class Run(Generic[C]):
    """The parts of any training run. The constructor checks the run folder and the tokenizer; it starts nothing.

    Enter the contexts `live_output` and then `open_cluster`. They last until all processes have ended.

    Args:
        resume: go on from the checkpoint with the name `start_at`, or the newest.
        restarted: the run resumes by itself, so its user cannot have changed it on purpose.
        make_cluster: the class of the cluster; tests give one that starts nothing.

    Raises:
        ValueError: the folder cannot be used, or its checkpoint does not fit the config.
    """

    def __init__(
        self,
        config: C,
        *,
        resume: bool,
        start_at: str | None = None,
        restarted: bool = False,
        make_cluster: Callable[..., Cluster] = Cluster,
    ) -> None:
        self.config, self.restarted = config, restarted
        if resume and start_at is None:
            check_not_finished(config)
        self.callbacks = Callbacks(config.run.callbacks)
        mirror = None if config.checkpoint.mirror is None else Mirror(config.checkpoint.mirror)
        self.folder = RunFolder(config.run.dir, resume=resume, mirror=mirror, start_at=start_at)
        self.restored = self.folder.restored  # the checkpoint that a resumed run goes on from
        # the counters of the run so far; a resumed run begins with the state of its checkpoint
        self.state = RunState() if self.restored is None else RunFolder.read_state(self.restored)
        check_resumed_state(config, self.folder.path, self.state)
        self.first_step = self.state.step
        self.log = RunLog(config, self.state)
        self.clock = Clock(self.state.seconds, self.log.terminal.phase)
        self.diagnosis = Diagnosis(flat_keys(config.shown()))
        self.stop = Stop(config.run.grace_s, self.log.print)
        self.tokenizer = load_tokenizer(config.model)
        self.cluster = make_cluster(config, first_step=self.first_step, watch_stage=self.log.terminal.stage)
        self.saver = CheckpointSaver(
            config.checkpoint, self.folder, self.cluster.checkpoints, self.tokenizer, mirror, self.log.warn,
            self.log.files.check,
        )  # fmt: skip
        self._failure, self._stop_reason = "", ""
        self._trained_shares: dict[str, float] = {}  # metrics of every evaluation

    def check_held_out(self, train: Iterable[Hashable], held_out: Mapping[str, Sequence[Hashable]]) -> None:
        """Warn of rows of data.eval that are also in data.train. Every evaluation then logs their share.

        Equal rows have equal keys. `held_out` has those of each evaluation set, by the beginning of its metrics: `eval`
        or `eval/<data set>`.
        """
        for name, count in count_trained_rows(train, held_out).items():
            total = len(held_out[name])
            if not count:
                continue
            self._trained_shares[f"{name}{TRAINED_SHARE}"] = count / total
            number = f"all {total}" if count == total else f"{count} of {total}"
            self.log.warn(
                f"data.{name.replace('/', ' ')}: {number} rows are in data.train too, as the model is given them. "
                "They measure what the model remembers, not what it can do. Remove them from data.train, or evaluate "
                "on other rows."
            )

    # --- start and end ---

    @contextlib.contextmanager
    def live_output(self, columns: Columns = ROLLOUT_COLUMNS) -> Iterator[None]:
        """A context with the run's output and live view; it begins with warnings about config and checkpoint."""
        with self.log.terminal.live(columns):
            warnings = (*self.config.warnings(), *learning_rate_warnings(self.config), *dtype_warnings(self.config))
            self.log.warn(*warnings, *self.folder.warnings, *resume_warnings(self.config, self.state))
            if self.restored is not None:
                self.log.print(f"resuming from {self.restored}")
            yield

    @contextlib.asynccontextmanager
    async def open_cluster(self) -> AsyncIterator[None]:
        """A context with the run folder, all logs and the cluster; at its end a save in progress is completed first."""
        self.folder.create(self.config)
        async with contextlib.AsyncExitStack() as exit_stack:
            self.log.open(self.folder, exit_stack)
            cluster = self.config.cluster
            engines = f"{cluster.engines} engine(s) and " if hasattr(cluster, "engines") else ""
            self.log.print(f"starting {engines}{cluster.learners} learner(s) on {cluster.device} ...")
            async with self.cluster:
                try:
                    yield
                finally:
                    await self.saver.close(within_s=LOST_SAVE_S if self.cluster.lost else SAVE_S)

    def end_start_up(self) -> None:
        """Mark the end of start-up: from now on a signal saves, and waiting time is measured."""
        self.clock.start_window()
        self.stop.can_save = True

    # --- around a step ---

    @contextlib.asynccontextmanager
    async def profiled(self, step: int) -> AsyncIterator[None]:
        """A context around a training step. Learner 0 writes a trace of it if `logging.profile_steps` names it."""
        if step not in self.config.logging.profile_steps:
            yield
            return
        from rlhf.learner import profile

        file = str(self.folder.path.resolve() / "profile" / f"step-{step:06d}.json.gz")
        await self.cluster.learners.call_one(0, lambda learner: learner.apply(profile.start), what="profiling")
        yield
        if why := await self.cluster.learners.call_one(
            0, lambda learner: learner.apply(profile.stop, file), what=f"writing {file}"
        ):
            self.log.warn(f"{file} was not written: {why}.")

    def log_step(
        self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS, groups: Sequence[RolloutGroup] = ()
    ) -> dict[str, Any]:
        """Call the callbacks, write the metrics of a finished step with theirs, and report problems that they show."""
        logged = {**values, **self._call_callbacks("on_step", step, values, list(groups))}
        self.log.write(step, logged, details)
        for finding in self.diagnosis.after_step(step, values):
            self.log.alert(finding.title, finding.text)
        self.log.terminal.who_waits(self.diagnosis.who_waits())
        return logged

    def end_after_step(self, failure: str) -> None:
        """Save and end the run at the next step boundary; its RuntimeError begins with `failure`."""
        self._failure = failure

    def stop_after_step(self, reason: str) -> None:
        """Save and end the run at the next step boundary, unless it is the last; `reason`: who asked for it.

        The run then ends with a StoppedError, which is no failure.
        """
        self._stop_reason = reason

    @property
    def ends(self) -> bool:
        """Whether the run is to end at the next step boundary."""
        return self.stop.requested or bool(self._failure or self._stop_reason)

    def _call_callbacks(self, method: str, step: int, values: Mapping[str, Any], *further: Any) -> dict[str, float]:
        """The further metrics of the callbacks. They may end the run after this step."""
        if not self.callbacks:
            return {}
        with self.clock.phase("callbacks"):
            called = self.callbacks.call(method, step, values, *further)
        if called.failure:
            self.end_after_step(called.failure)
        elif called.stopped_by and step < self.config.steps:
            self.stop_after_step(f"the callback {called.stopped_by}")
        return called.metrics

    def evaluation_is_due(self, step: int) -> bool:
        """Whether the `evaluation` section asks for an evaluation after this many steps that was not done yet."""
        evaluation = self.config.evaluation
        if step in self.state.evaluations:
            return False
        if step in (0, self.config.steps):
            return evaluation.at_end if step else evaluation.at_start and self.first_step == 0
        return evaluation.every is not None and step % evaluation.every == 0

    def log_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Store and write the metrics of an evaluation after `step` training steps."""
        values = {**values, **self._trained_shares}
        self.diagnosis.after_evaluation(values)
        values |= self._call_callbacks("on_evaluation", step, values)
        self.state.evaluations[step] = values
        self.log.write(step, values)
        self.log.terminal.evaluation(step, values)

    # --- checkpoints ---

    def checkpoint_is_due(self, step: int) -> bool:
        """Whether to save: every `checkpoint_every` steps, unless null, after the last and the best, and at an end."""
        every, best = self.config.checkpoint_every, self.config.checkpoint.best
        is_best = best is not None and best_step(self.state.evaluations, best) == step
        is_last = step == self.config.steps
        return every is not None and (step % every == 0 or is_last or is_best or self.ends)

    async def checkpoint_if_due(self, step: int, progress: Progress) -> None:
        """Write a checkpoint if due, or if the last save failed; then end the run if that was asked for.

        The saved run ends with a RuntimeError if `end_after_step` was called, a StoppedError if `stop_after_step` was,
        and a CancelledError after a signal.
        """
        is_due = self.checkpoint_is_due(step)
        with self.clock.phase("checkpoint"), self.stop.saving():
            if (is_due and step > max(self.folder.saved_step, self.saver.writing_step)) or self.saver.save_error:
                await self._save(step, progress)
        if self.ends:
            await self._end_if_asked(step)

    async def _end_if_asked(self, step: int) -> None:
        """Complete the save in progress; then end the run, if a signal, a failure or a callback asks for that."""
        with self.clock.phase("checkpoint"), self.stop.saving():
            await self.saver.finish()
        if not self.ends:
            return
        self.stop.close()
        saved = self.folder.saved_step
        kept = f"Go on from step {saved} with --resume." if saved else "Nothing was saved."
        if self._failure:
            raise RuntimeError(f"{self._failure} The run ends after step {step}. {kept}")
        if self._stop_reason:
            raise cli.StoppedError(f"the run ends after step {step}, as {self._stop_reason} asked. {kept}")
        self.log.print(f"the run ends after step {step}, as a signal asked. {kept}")
        raise asyncio.CancelledError

    async def _save(self, step: int, progress: Progress) -> None:
        try:
            state = await self._state_after(step, progress)
        except OSError as error:  # files of a model are no longer there
            self.saver.fail(step, error)
        else:
            await self.saver.save(state)

    async def _state_after(self, step: int, progress: Progress) -> RunState:
        counts = await self.cluster.learners.call(lambda learner: learner.update_counts())
        self.state.updates_taken, self.state.updates_skipped = counts[0]
        if not self.state.models:
            self.state.models = await asyncio.to_thread(model_fingerprints, self.config)
        stored, path = self.config.stored(), self.config.model.path
        return replace(
            self.state,
            step=step,
            program=self.config.program,
            config=stored,
            base=full_name(path) if stored["model"]["path"] == path else "",
            code=await asyncio.to_thread(code_state),
            updates=self.config.update_plan,
            wandb_run_id=self.log.wandb_run_id,
            seconds=dict(self.clock.total),
            # copies, because the loop goes on changing these
            tokens=dict(self.state.tokens),
            evaluations=dict(self.state.evaluations),
            **progress(),
        )

    async def finish(self, counted: Mapping[str, Any], progress: Progress) -> None:
        """Export the model and write the summary together with the counters `counted`.

        OSError if the end of the log could not be written. RuntimeError if the export failed, and the run does not
        count as finished; or if the last checkpoint could not be written, although the export and the summary were.
        """
        steps = self.config.steps
        await self._end_if_asked(steps)
        self.stop.close()
        if self.config.run.export:
            with self.clock.phase("export"):
                await self._export(steps, progress)
        end = await self._state_after(steps, progress)
        self.folder.write_summary({**end.summary(), "updates_planned": self.config.training.total_updates, **counted})
        if after := end.evaluations.get(steps):
            training_s = sum(spent for phase, spent in end.seconds.items() if phase not in ("start", "evaluation"))
            table = {"before": end.evaluations.get(0, {}), "after": after}
            title = f"evaluation, {training_s:.0f} s of training"
            called = metric_title(self.config.metrics, end.evaluations.values())
            self.log.console.print(evaluation_table(", ".join(filter(None, [title, called])), table))
        if notice := self.diagnosis.notice():
            self.log.warn(notice)
        self.log.print(f"run folder: {self.folder.path}")
        self.log.files.check()
        if self.saver.save_error:
            raise RuntimeError(f"{self.saver.save_error} Remove the cause, and repeat the last steps with --resume.")

    async def save(self, step: int, progress: Progress) -> None:
        """Write the checkpoint of `step` now, unless it was written. RuntimeError if that failed."""
        with self.clock.phase("checkpoint"), self.stop.saving():
            if step > max(self.folder.saved_step, self.saver.writing_step):
                await self._save(step, progress)
            await self.saver.finish()
        if self.saver.save_error:
            raise RuntimeError(self.saver.save_error)

    async def export(self, folder: Path, step: int, progress: Progress) -> str:
        """Write the weights after `step` steps as a model folder, in place of an earlier one.

        Returns why that failed; an empty string if it did not.
        """
        exported = folder.with_name(folder.name + PARTIAL)
        shutil.rmtree(exported, ignore_errors=True)
        try:
            folder.parent.stat()  # a run folder that was renamed is not made a second time
            results = await self.cluster.learners.call(
                lambda learner: learner.try_export(str(exported.resolve()), self.config.model.path)
            )
            why = next((failure for failure, _ in results if failure), "")
            self.log.warn(*(f"{folder}: {warning}" for _, warning in results if warning))
            if not why:
                (exported / "README.md").write_text(model_card(await self._state_after(step, progress)))
                shutil.rmtree(folder, ignore_errors=True)  # from an earlier end, before run.steps grew
                exported.rename(folder)
        except ClusterError:
            raise
        except Exception as error:
            why = error_text(error)
        if why:
            shutil.rmtree(exported, ignore_errors=True)  # a full disk may then hold a checkpoint
        return why

    async def _export(self, steps: int, progress: Progress) -> None:
        """Write run.dir/model, or raise a RuntimeError that names the checkpoint of the weights, made if needed."""
        why = await self.export(self.folder.model, steps, progress)
        if not why:
            return
        if self.folder.saved_step < steps:
            await self._save(steps, progress)
            await self.saver.finish()
        saved = self.folder.saved_step
        kept = "No checkpoint was written."
        if saved:
            newest = self.folder.checkpoints / f"step-{saved:06d}"
            kept = f"`rlhf export {newest} DIR` makes a model of step {saved}; --resume goes on from there."
        lost = f" {self.saver.save_error}" if saved < steps else ""
        raise RuntimeError(f"{self.folder.model}: the export failed: {why.rstrip('.')}.{lost} {kept}")
