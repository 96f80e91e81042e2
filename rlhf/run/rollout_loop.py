"""The rollout side of a run with engines: prompts, grader, engines, buffer, canary, evaluation, and their logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from rlhf.cluster.canary import Canary
from rlhf.cluster.engines import Engines
from rlhf.cluster.rollout_workers import RolloutWorkers
from rlhf.config.grpo import GRPOConfig
from rlhf.config.library_options import changes_numbers
from rlhf.config.reward import logged_name
from rlhf.data.load import first_prompt, show_prompt
from rlhf.data.model_files import truncate_token_id
from rlhf.data.turns import rollout_warnings
from rlhf.data.vocabulary import check_vocabularies
from rlhf.environments.rollouts import FailedEnvironments
from rlhf.environments.start import StartedEnvironments
from rlhf.log.clock import waiting_seconds
from rlhf.log.reductions import Counts, mean_over_updates, to_histograms, to_values
from rlhf.log.sinks import Details
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.buffer import RolloutBuffer, Staleness, groups_at_engines
from rlhf.rollout.purpose import evaluation_purpose, texts_purpose, training_purpose
from rlhf.run.evaluation import evaluate, evaluation_metrics, rollouts_of, ungraded_warning
from rlhf.run.prompts import PromptTickets, RunData, read_data, sized, source_lines, without_bad_gold
from rlhf.run.resume import code_warnings
from rlhf.run.reward_outcomes import RewardOutcomes, silent_rewards
from rlhf.run.reward_scale import normalize_scores
from rlhf.run.rollout_log import FinishedStep, rollout_metrics, rollout_rows, token_values
from rlhf.run.run import Run
from rlhf.run.speed import LearnerSpeed
from rlhf.run.teachers import Teachers
from rlhf.run.threads import in_thread
from rlhf.run.useless_steps import UselessSteps
from rlhf.types import Prompt, RolloutGroup, StepBatch

SAY_FRACTION = 0.1  # of cluster.step_deadline_s; a step that waits longer says for which groups
TABLES, GROUPS_IN_TABLE = 20, 2  # tables of sampled responses in a run, for wandb; groups in each

C = TypeVar("C", bound=GRPOConfig)


@contextlib.asynccontextmanager
async def rollout_loop(
    run: Run[C], *, make_engines: Callable[..., Engines] = Engines, dispatches: bool = True
) -> AsyncIterator[RolloutLoop[C]]:
    """Start a run and its rollout side: the gold answers are graded first, then engines and learners start.

    `dispatches`: sample groups in the background, as `take_groups` needs them.
    """
    config, say = run.config, run.log.print
    async with contextlib.AsyncExitStack() as exit_stack:
        with run.clock.phase("start"):
            exit_stack.enter_context(run.live_output())
            with run.log.terminal.stage("data"):
                run.log.warn(*await in_thread(list, check_vocabularies(config, run.tokenizer)))
                data = await in_thread(read_data, config, run.tokenizer)
                run.check_held_out(*data.row_keys(config))
                teachers = await in_thread(Teachers, config, data.train.prompts, run.tokenizer)
            first = first_prompt(data.train)
            environments = None
            if config.uses_environment_or_tools:
                with run.log.terminal.stage("environment"):
                    start = partial(StartedEnvironments, say=partial(say, wrap=False))
                    environments = exit_stack.enter_context(await in_thread(start, config, run.tokenizer))
                    now = environments.hosts.sources
                    changed = code_warnings("environment", run.state.environments, now, restarted=run.restarted)
                    run.log.warn(*environments.warnings, *changed)
                    data = sized(data, config, environments.with_rows)
                    first = await environments.first_prompt(first)
            run.log.warn(*rollout_warnings(config, run.tokenizer))
            for key, loaded in (("data.eval", data.evaluation), ("data", data.train)):
                for line in source_lines(key, loaded, config.data.max_prompt_tokens):
                    say(line)
            say("first prompt, as the model is given it:")
            say(show_prompt(first, run.tokenizer), wrap=False)
            with run.log.terminal.stage("grader"):
                scorer = Scorer(config.reward, say=partial(say, wrap=False))
                exit_stack.callback(scorer.close)
                changed = code_warnings("reward", run.state.rewards, scorer.sources, restarted=run.restarted)
                run.log.warn(*scorer.warnings, *changed)
                # takes minutes for a large data set; SIGTERM must still be handled
                data = await in_thread(without_bad_gold, data, config, scorer, say)
            # a resumed run whose prompts have changed is refused here, before its folder is touched
            restored = None if run.restored is None else run.state
            tickets = PromptTickets(
                data.train, seed=config.run.seed, restored=restored, curriculum=config.data.curriculum,
                metric_of=partial(config.metric_of, trains=True),
            )  # fmt: skip
            await exit_stack.enter_async_context(run.open_cluster())
            if environments is not None and run.state.outstanding:
                opened = len(run.state.outstanding) * config.rollout.samples_per_prompt
                say(f"up to {opened} rollouts that were open when the run was saved begin anew")
            engines = await exit_stack.enter_async_context(make_engines(run.cluster, config))
            speed = LearnerSpeed(config, (await run.cluster.learners.call(lambda learner: learner.device_name()))[0])
            outcomes = RewardOutcomes(config.reward, run.state.reward_status)
            workers = await exit_stack.enter_async_context(
                RolloutWorkers(
                    engines, config, run.tokenizer, scorer, environments,
                    say=partial(say, wrap=False), check=outcomes.check,
                )
            )  # fmt: skip
            cached_sequences = await engines.cached_sequences() if run.cluster.shares_gpus else None
            loop = RolloutLoop(
                run, data, tickets, scorer, outcomes, engines, workers, speed, first, teachers, environments,
                dispatches=dispatches, cached_sequences=cached_sequences,
            )  # fmt: skip
            exit_stack.push_async_callback(loop.buffer.close)
            with run.log.terminal.stage("check"):
                await loop.check_start()
            await engines.take_work()  # tokens that the checks sampled belong to no step
        run.end_start_up()
        yield loop


class RolloutLoop(Generic[C]):
    """The parts of a run that need engines; made by `rollout_loop`, when everything has started.

    `first` is the first prompt, as the model gets it. Without `environments` a rollout is one response.
    `cached_sequences`: as of `groups_at_engines`.
    """

    def __init__(
        self,
        run: Run[C],
        data: RunData,
        tickets: PromptTickets,
        scorer: Scorer,
        outcomes: RewardOutcomes,
        engines: Engines,
        workers: RolloutWorkers,
        speed: LearnerSpeed,
        first: Prompt,
        teachers: Teachers,
        environments: StartedEnvironments | None = None,
        *,
        dispatches: bool = True,
        cached_sequences: float | None = None,
    ) -> None:
        config = run.config
        self.engines, self.scorer, self.data, self.tickets, self.speed = engines, scorer, data, tickets, speed
        self.workers, self.outcomes = workers, outcomes
        self.groups_at_once = groups_at_engines(config, cached_sequences)
        self._truncate_token = truncate_token_id(config.rollout, run.tokenizer)
        self.training_purpose = training_purpose(config, self._truncate_token)
        self.teachers = teachers
        self.failed_environments = FailedEnvironments(config.environment.max_failed_fraction)
        self._environments = environments
        by_template = config.data.template == "model" and first.messages
        self._example = list(first.messages) if by_template else run.tokenizer.decode(first.token_ids.tolist())
        prompts = next(iter(data.train.prompts.values()))
        self.canary = Canary(
            engines,
            prompts if environments is None else [first],
            dtype=config.model.dtype,
            max_tokens=config.max_sequence_tokens,
            noise_seed=config.noise_seed,
            own_options=changes_numbers(config.rollout.engine),
            return_support=bool(config.rollout.restriction),
        )
        self.buffer = RolloutBuffer(
            self.rollout_for_training,
            self.tickets.next,
            ended=self.tickets.record,
            groups_per_step=config.rollout.prompts_per_step,
            total_steps=config.run.steps * dispatches,
            staleness=Staleness(config.rollout.max_policy_lag, config.rollout.on_stale),
            step=run.first_step,
            account=run.state.account,
            replacements=run.state.replacements,
            max_replacements=config.rollout.max_replacements if config.rollout.dynamic_sampling else 0,
            deciding_part=config.rollout.dynamic_sampling_part,
            in_order=config.run.deterministic,
            max_running=None if config.run.deterministic else self.groups_at_once,
            deadline_s=2 * config.request_deadline_s,  # after a first one, another engine may take its place
        )
        teacher = config.algo.teacher
        loss_teaches = config.algo.has_own_loss or (teacher is not None and teacher.in_loss)
        self.useless_steps = UselessSteps(
            config.run, run.diagnosis, teachers=teacher is not None, loss_teaches=loss_teaches
        )
        self._start_metrics: dict[str, float] = {}  # of the canary; those that no step has go to the first step
        self._warned: set[str] = set()  # data sets with ungraded responses; checkpoint.best that was not measured
        self._run = run

    async def check_start(self) -> None:
        """Check that engines and learners hold the same weights, before and after a checkpoint is loaded."""
        run = self._run
        await self.canary.measure_noise()  # before a checkpoint is loaded: both sides hold model.path
        purpose = texts_purpose(run.config, self._truncate_token)
        await normalize_scores(self.workers, purpose, self.data.train, run.config, run.state)
        if run.restored is not None:
            await self.engines.sleep_if_colocated()
            await run.cluster.load(run.restored)
        self._start_metrics = await self.canary.check_start(run.first_step)
        self.engines.replace_lost(self.canary.check)

    async def finish(self) -> None:
        """End the run after its last step. An engine or worker lost from now on does not cancel the export."""
        await self.engines.stop_replacing()
        await self.workers.stop_replacing()
        await self._run.finish(self.buffer.account_metrics(), self.progress)

    async def publish(self, version: int) -> dict[str, float]:
        """Send the weights to the engines as `version`; metrics of that and of `Canary.check`, which may raise."""
        metrics = await self.engines.publish(version, self.canary.check, watch=self._run.clock.phase)
        at_start, self._start_metrics = self._start_metrics, {}
        return at_start | metrics

    async def checkpoint_if_due(self, step: int) -> None:
        """`Run.checkpoint_if_due`, with the progress of the rollout side."""
        await self._run.checkpoint_if_due(step, self.progress)

    def progress(self) -> dict[str, Any]:
        """The rollout side's fields of the state in a checkpoint."""
        account, buffer, outstanding = self.buffer.account, self.buffer, self.buffer.outstanding()
        positions = sorted(ticket.position for ticket in (*outstanding, *self.tickets.waiting))
        return {
            "rewards": self.scorer.sources,
            "environments": self._environments.hosts.sources if self._environments else {},
            "stream": self.tickets.stream.state(positions),
            "example": self._example,
            "outstanding": positions,
            # a resumed run samples the waiting rollouts again
            "account": replace(account, sampled=account.sampled - buffer.waiting),
            "replacements": buffer.replacements,
            "reward_status": dict(self.outcomes.counters),
        }

    # --- a training step ---

    def rollout_for_training(self, prompt: Prompt) -> Awaitable[RolloutGroup]:
        """Sample and grade the group of a prompt, with the settings of `rollout`."""
        return self.workers.rollout_group(prompt, self.training_purpose)

    async def take_groups(self, step: int) -> Sequence[RolloutGroup]:
        """The graded groups for the step after `step` finished ones. A signal meanwhile saves and ends the run."""
        run, buffer = self._run, self.buffer
        if run.ends and not run.stop.requested:  # as the evaluation before the first step asked
            await self.checkpoint_if_due(step)
        run.log.terminal.show(buffer.waits_for)
        say_s = run.config.cluster.step_deadline_s * SAY_FRACTION
        say = asyncio.get_running_loop().call_later(say_s, lambda: run.log.print(f"{buffer.waits_for()}."))
        try:
            groups = await run.stop.unless_requested(buffer.take())
        finally:
            say.cancel()
        if groups is None:
            await self.checkpoint_if_due(step)
        assert groups is not None, "checkpoint_if_due ends the run"
        return groups

    def count(self, groups: Sequence[RolloutGroup], batch: StepBatch) -> None:
        """Count the rollouts of the step by their use, and their tokens."""
        self.buffer.count(groups, batch)
        response_tokens, tokens = int(batch.response_lengths.sum()), self._run.state.tokens
        tokens["prompt"] += len(batch.tokens.token_ids) - response_tokens
        tokens["response"] += response_tokens

    async def update_reference(self, done: int) -> None:
        """After `done` training steps: replace the reference by the policy if due, or average the policy into it."""
        algo, learners = self._run.config.algo, self._run.cluster.learners
        if algo.ref_update == "average":
            await learners.call(lambda learner: learner.blend_reference(algo.ref_decay))
        elif algo.ref_update == "replace" and done % algo.ref_every == 0:
            await learners.call(lambda learner: learner.blend_reference(0.0))

    async def step_metrics(self, done: FinishedStep) -> tuple[dict[str, Any], dict[str, Counts]]:
        """The metrics of a finished step, and its histograms. The next step's times and rates begin here."""
        run, config, rollout = self._run, self._run.config, self._run.config.rollout
        engine_metrics, engines_busy_s = await self.engines.take_work()  # first: what follows is of one moment
        update_metrics, asynchronous = mean_over_updates(done.updates), rollout.max_policy_lag > 0
        metrics = rollout_metrics(done.groups, done.advantages, version=done.step - 1, asynchronous=asynchronous)
        if not config.learns_from_rewards:  # groups of equal rewards teach as much as others
            del metrics["reward/equal_group_fraction"]
        metrics |= update_metrics
        values = to_values(metrics) | done.extra_metrics | self.buffer.account_metrics()
        values["time/step"] = run.clock.step_seconds()
        phases, window_s = run.clock.take()
        values |= waiting_seconds(phases, window_s, engines_busy_s)
        shared, update_s = run.cluster.learners.shared, phases.get("update", 0.0)
        values |= self.speed.step_metrics(done.batch, done.epochs, shared, update_s)
        values["time/slow_groups"], self.buffer.slow_wait_s = self.buffer.slow_wait_s, 0.0
        values |= engine_metrics | {"data/epoch": self.tickets.stream.epochs}
        values |= {} if (curriculum := self.tickets.stream.curriculum) is None else curriculum.metrics()
        # without a pass before them, later updates compare the engines with a policy that has moved
        moves = config.training.updates_per_step > 1 and not config.needs_old_logprobs_pass
        lag = max(rollout.max_policy_lag, moves)
        values |= self.canary.check_rollouts(update_metrics, temperature=rollout.temperature, max_lag=lag)
        values |= {f"time/{phase}": spent for phase, spent in phases.items()}
        self.outcomes.add_step(done.groups)
        values |= {f"reward/status/{logged_name(name)}": count for name, count in self.outcomes.counters.items()}
        return values, to_histograms(metrics)

    def write_step(self, done: FinishedStep, metrics: dict[str, Any], histograms: dict[str, Counts]) -> dict[str, Any]:
        """Write the metrics, the table of responses and the rollouts of a finished step. Returns the logged metrics."""
        run, config = self._run, self._run.config
        rows = rollout_rows(done.step, done.groups, done.advantages.tolist())
        in_table = sum(len(group.samples) for group in done.groups[:GROUPS_IN_TABLE])
        shown = [] if done.step % -(-config.run.steps // TABLES) else rows[:in_table]
        logged = run.log_step(done.step, metrics, Details(histograms, shown), done.groups)
        if config.logging.rollouts:
            if config.logging.token_values:
                values_by_rollout = token_values(done.batch, done.targets, run.tokenizer)
                rows = [row | more for row, more in zip(rows, values_by_rollout, strict=True)]
            run.folder.write_rollouts(done.step, rows, run.log.files)
        return logged

    def judge_step(self, done: FinishedStep) -> None:
        """Warn of failed environments and rewards, and count a useless step; too many failures end the run."""
        run = self._run
        failed, failure = self.failed_environments.check([s.rollout for group in done.groups for s in group.samples])
        run.log.warn(*self.outcomes.new_errors(), *failed)
        if failure:
            run.end_after_step(failure)
        if done.step == run.first_step + 1:
            silent, notes = silent_rewards(run.config, self.outcomes, done.groups, step=done.step)
            run.log.warn(*silent)
            for note in notes:
                run.log.print(note)
        trained = int(done.batch.trained.sum())
        self.useless_steps.after_step(done.groups, done.advantages, done.updates, trained=trained)

    # --- evaluation ---

    def rollout_for_evaluation(self, prompt: Prompt) -> Awaitable[RolloutGroup]:
        """Sample and grade a held-out prompt, with the settings of its data set."""
        purpose = evaluation_purpose(self._run.config, self._truncate_token, prompt.source)
        return self.workers.rollout_group(prompt, purpose)

    async def evaluate_if_due(self, step: int) -> None:
        """Evaluate on data.eval if it is due. If a stop was requested, skip it; the resumed run evaluates."""
        if self._run.evaluation_is_due(step) and self.data.evaluation.prompts:
            await self.evaluate(step)

    async def evaluate(self, step: int) -> None:
        """Evaluate the weights of the engines on data.eval, and log that under `step`."""
        run, prompts = self._run, self.data.evaluation.prompts
        with run.clock.phase("evaluation"):
            at_once = run.config.evaluation_groups_at_once
            count = run.log.terminal.progress("problem", sum(map(len, prompts.values())))
            evaluation = evaluate(prompts, self.rollout_for_evaluation, at_once=at_once, count=count)
            groups = await run.stop.unless_requested(evaluation)
        if groups is not None:  # else a resumed run does this evaluation
            run.log.warn(*self.failed_environments.check(rollouts_of(groups))[0])
            metrics = run.config.metrics
            for source, source_groups in groups.items():
                warning = ungraded_warning(source, source_groups, metrics[source])
                if warning and source not in self._warned:
                    run.log.warn(warning)
                    self._warned.add(source)
            values, best = evaluation_metrics(groups, metrics), run.config.checkpoint.best
            if best is not None and best not in values and best not in self._warned:
                run.log.warn(
                    f"checkpoint.best={best}: the evaluation of step {step} has no such number, so its checkpoint "
                    "cannot be the best. avg@k needs a graded response; pass@k and maj@k a problem of which all are "
                    "graded, pass@k also values from 0 to 1, and maj@k an answer."
                )
                self._warned.add(best)
            run.log_evaluation(step, values)
