"""A loop of one's own: the calls that `rlhf.grpo` makes of a run, for a program that decides what comes between them.

    import rlhf

    with rlhf.Trainer("mine.yaml", **{"run.dir": "runs/own"}) as trainer:  # starts as `rlhf grpo` does, with its checks
        while trainer.step < trainer.config.run.steps:
            groups = trainer.sample(trainer.next_prompts())  # graded groups; or your own, by generate and group
            report = trainer.update(groups, advantages=mine)  # log-probs, minibatches, optimizer steps
            metrics = trainer.publish()  # new weights to the engines, canary, metrics, checkpoint
        trainer.save("out")

Without `advantages` this is `rlhf grpo`: with run.deterministic its weights are equal bit for bit.

A call blocks, and Ctrl-C raises KeyboardInterrupt in it. Each has a twin for programs with an event loop, such as
`await trainer.sample_async(prompts)`. The run lives in a thread of its own (`loop_thread.py`): heartbeats and recovery
go on between calls.

Every training step is `sample`, `update`, `publish`. A call is refused with a ValueError where it would break what a
run guarantees, and changes nothing then:

    sample    while groups of earlier calls are neither trained nor dropped; with rollout.max_policy_lag=L, of L calls
    update    groups that are not whole, not finite, too old, or that do not wait; before the last update is published
    others    what samples or saves, between update and publish; with a lag above 0, sampling goes on there
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np

from rlhf.api.configs import check_alone, read_config
from rlhf.check.start_checks import start_problems
from rlhf.config.base import error_text
from rlhf.config.cli import check_new_folder
from rlhf.config.conditions import conflicts
from rlhf.config.grpo import GRPOConfig
from rlhf.config.printing import waiting
from rlhf.config.reward import FLOAT32_MAX
from rlhf.config.secrets import hide_in_output
from rlhf.processes import objects
from rlhf.types import Prompt, RolloutGroup, ScoredRollout

if TYPE_CHECKING:
    from rlhf.api.loop_thread import LoopThread
    from rlhf.run.rollout_log import FinishedStep
    from rlhf.run.rollout_loop import RolloutLoop

P = ParamSpec("P")
R = TypeVar("R")
Advantages = Callable[..., Any] | Sequence[float] | np.ndarray  # (rewards [R], groups [R]) -> [R], or their values [R]
Tokens = Sequence[int] | np.ndarray

NOTHING_GRADES = "reward=[]:"  # begins a contradiction of a config; here rewards may come from the loop
OWN_REWARD = "own"  # the part of the reward that `group` was given
TEMPERATURE = "temperature"  # a fact of a rollout that was sampled at another one than rollout.temperature
NOT_DONE_HERE = {
    "rollout.dynamic_sampling": (
        "a loop of one's own replaces groups itself: drop those with equal rewards, and sample others. Set it to false."
    ),
    "rollout.on_stale=drop": "a loop of one's own drops groups itself. Set on_stale=wait.",
}


@dataclass(frozen=True)
class UpdateReport:
    """The result of `Trainer.update`.

    Attributes:
        step: number of the training step, from 1.
        advantages: [R], of all rollouts of the groups, in their order; 0 for unscorable ones.
        taken, skipped: optimizer steps; one with a number that is not finite is skipped.
        metrics: of the updates. `publish` returns all metrics of the step.
    """

    step: int
    advantages: np.ndarray
    taken: int
    skipped: int
    metrics: dict[str, Any]


class AdvantagesError(ValueError):
    """The caller's advantages cannot be used; nothing was trained."""


def _twin(
    method: Callable[Concatenate[Trainer, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Trainer, P], Coroutine[Any, Any, R]]:
    """A coroutine function of the caller's event loop, for one that runs in the Trainer's thread."""

    @functools.wraps(method)
    async def twin(trainer: Trainer, *arguments: P.args, **named: P.kwargs) -> R:
        thread = trainer._open_thread(method.__name__)
        return await thread.wait_async(thread.submit(method(trainer, *arguments, **named)))

    return twin


def _blocking(
    twin: Callable[Concatenate[Trainer, P], Coroutine[Any, Any, R]], *, samples: bool = False
) -> Callable[Concatenate[Trainer, P], R]:
    """The call that blocks; one that `samples` must not wait for a `publish` which only its caller would call."""
    method: Callable[..., Coroutine[Any, Any, R]] = twin.__wrapped__  # type: ignore[attr-defined]
    name = method.__name__.removesuffix("_async")

    @functools.wraps(method)
    def call(trainer: Trainer, *arguments: P.args, **named: P.kwargs) -> R:
        thread = trainer._open_thread(name)
        if samples:
            trainer._check_awake(name)
        return thread.wait(thread.submit(method(trainer, *arguments, **named)))

    call.__name__ = name
    return call


class Trainer:
    """A run of GRPO whose loop is the caller's; a context for `with` or `async with`. See the module's docstring.

    Folder, logs, wandb, evaluations and checkpoints are as the config says: `publish` ends a step as one of `rlhf grpo`
    ends. A run that loses its last engine or a learner ends with an error; a Trainer with `resume=True` goes on.

    Leaving the context ends everything that was started. After run.steps steps the run is finished: it gets its
    summary, and with `run.export` the model in run.dir/model. Before, also after Ctrl-C, the last published step is
    saved, unless checkpoint.every is null. After another exception nothing more is saved.

    Args:
        config, given: files, mappings, keys and objects, as for `rlhf.train`. `reward=[]` is allowed: the rewards then
            come from the loop, by `group`. The learning-rate schedule spans run.steps; no more updates are possible.
        resume: go on from the newest checkpoint in run.dir, or from the one of this name.

    Raises:
        ValueError: what the command line refuses, with the same message. RuntimeError: the run could not start.
    """

    def __init__(self, config: Any = (), *, resume: Any = False, **given: Any) -> None:
        with hide_in_output(), waiting("starting: checking the config, and the data, models and functions it names"):
            self.config: GRPOConfig = read_config(
                config, program="grpo", given=given, resume=bool(resume), check=start_problems,
                contradictions=_contradictions,
            )  # fmt: skip
        self._resume = resume
        self._thread: LoopThread[RolloutLoop[GRPOConfig]] | None = None
        self._updated: FinishedStep | None = None  # and not published
        self._changing = False  # the weights, by a call that has not ended
        self._broken = ""  # why nobody knows what the learners hold
        self._sampling = 0  # calls that use the engines now
        self._open_samples = 0  # calls of `sample` that have not ended
        self._samples: list[list[RolloutGroup]] = []  # by call, those of which some wait
        self._in_step = False
        self._profile = contextlib.AsyncExitStack()

    @property
    def step(self) -> int:
        """The number of training steps that are published."""
        self._check_started("step")
        return self._loop.buffer.step

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        self._check_started("tokenizer")
        return self._run.tokenizer

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts of data.train, for a loop that chooses them itself; see `next_prompts`."""
        self._check_started("prompts")
        return [prompt for rows in self._loop.data.train.prompts.values() for prompt in rows]

    @property
    def closed(self) -> bool:
        """Whether no call is possible, before the context and after it."""
        return self._thread is None or self._thread.closed

    # --- start and end ---

    def open(self) -> Self:
        """Start the run, as `with` does. Returns when engines and learners have started and are checked."""
        thread = self._begin()
        try:
            thread.wait(thread.started)
        except BaseException as error:
            self.close(error)
            raise
        _reset_signals()
        return self

    def close(self, error: BaseException | None = None) -> None:
        """End the run, as `with` does; `error` is the exception that ends it. Without a run it does nothing."""
        if (thread := self._thread) is None:
            return
        trace = None if error is None else error.__traceback__
        thread.end(error)
        try:
            failure = thread.ended.exception()
        except KeyboardInterrupt:  # while the run ends
            thread.cancel()
            thread.ended.exception()
            raise
        _raise_another(failure, error, trace)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.close(error)

    async def __aenter__(self) -> Self:
        thread = self._begin()
        try:
            await thread.wait_async(thread.started)
        except BaseException as error:
            await self.__aexit__(None, error, None)
            raise
        _reset_signals()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        thread, trace = self._thread, None if error is None else error.__traceback__
        assert thread is not None
        thread.end(error)
        try:
            await asyncio.gather(asyncio.wrap_future(thread.ended), return_exceptions=True)
        except asyncio.CancelledError:
            thread.cancel()
            await asyncio.gather(asyncio.wrap_future(thread.ended), return_exceptions=True)
            raise
        _raise_another(thread.ended.exception(), error, trace)

    def _begin(self) -> LoopThread[RolloutLoop[GRPOConfig]]:
        if self._thread is not None:
            raise ValueError("a Trainer starts once. Make another one; with resume=True it goes on.")
        check_alone(in_main_thread=False)
        with waiting("starting: importing torch and Ray"):
            from rlhf.api.loop_thread import LoopThread
        self._thread = LoopThread(self._running())
        return self._thread

    def _check_started(self, name: str) -> LoopThread[RolloutLoop[GRPOConfig]]:
        if self._thread is None:
            raise ValueError(f"trainer.{name}: the run has not started. Use it inside of `with rlhf.Trainer(...)`.")
        return self._thread

    def _open_thread(self, call: str) -> LoopThread[RolloutLoop[GRPOConfig]]:
        thread = self._check_started(call)
        if self._broken and not thread.closed:
            raise RuntimeError(f"trainer.{call}: {self._broken}")
        return thread

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[RolloutLoop[GRPOConfig]]:
        """The run from its start to its end, in the Trainer's thread."""
        from rlhf.api.loop_thread import InterruptedLoopError
        from rlhf.run import rollout_loop
        from rlhf.run.folder import with_date
        from rlhf.run.run import Run

        with hide_in_output(), objects.of_run(self.config):
            self.config, start_at = with_date(self.config), self._resume if isinstance(self._resume, str) else None
            run = self._run = Run(self.config, resume=bool(self._resume), start_at=start_at)
            self._learners = asyncio.Lock()  # held by calls that use them
            try:
                async with rollout_loop.rollout_loop(run, dispatches=False) as loop:
                    self._loop = loop
                    await loop.evaluate_if_due(run.first_step)
                    try:
                        yield loop
                    except InterruptedLoopError:
                        await self._finish(interrupted=True)
                        raise
                    await self._finish()
            finally:
                run.folder.unlock()

    async def _finish(self, *, interrupted: bool = False) -> None:
        """End a run that has not failed: finish it after its last step, or save the last published one."""
        run, steps = self._run, self.config.run.steps
        if self._broken or self._changing or self._updated is not None:
            run.log.warn(f"step {self.step + 1} was not published, so nothing is saved. Go on with resume=True.")
        elif self.step == steps and not interrupted:
            await self._loop.finish()
        elif self.step > run.first_step and self.config.checkpoint_every is not None:
            await run.save(self.step, self._loop.progress)
            run.log.print(f"the loop has ended after step {self.step} of {steps}. It is saved: resume=True goes on.")

    # --- prompts and groups ---

    @_twin
    async def next_prompts_async(self, count: int | None = None) -> list[Prompt]:
        """Draw prompts from the run's stream, by default `rollout.prompts_per_step`.

        A resumed run goes on behind them. It draws those again that are neither trained nor dropped.
        """
        number = self.config.rollout.prompts_per_step if count is None else count
        return [self._loop.buffer.draw() for _ in range(number)]

    @_twin
    async def sample_async(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Sample and grade a group of `rollout.samples_per_prompt` rollouts for each prompt, with its environment.

        The groups wait until `update` has trained them or `drop` has dropped them. In a deterministic run the noise
        belongs to the prompt and its epoch.
        """
        lag, buffer = self.config.rollout.max_policy_lag, self._loop.buffer
        if any(_grades_nothing(problem) for problem in self.config.contradictions()):
            raise ValueError("sample: reward=[] grades nothing. Name a reward, or call generate and group.")
        self._samples = [groups for groups in self._samples if any(map(buffer.holds, groups))]
        if (calls := len(self._samples) + self._open_samples) > lag:
            raise ValueError(
                f"sample: groups of {calls} earlier calls are neither trained nor dropped, and rollout.max_policy_lag="
                f"{lag} allows those of {lag}. Call update, or drop(groups)."
            )
        self._open_samples += 1
        try:
            groups = await self._sampled("sample", prompts, self._loop.rollout_for_training)
        finally:
            self._open_samples -= 1
        for group in groups:
            buffer.hold(group)
        self._samples.append(groups)
        return groups

    @_twin
    async def generate_async(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> list[tuple[ScoredRollout, ...]]:
        """Sample without grading, to look at or to make groups of: `samples` rollouts for each prompt.

        A rollout has `text`, and `rollout.response_ids`, `rollout.rollout_logprobs` and `rollout.finish_reason`. They
        count nowhere until `group` makes a group of them, which needs `rollout.temperature`.

        Args:
            temperature, max_tokens: by default those of `rollout`.
        """
        from rlhf.rollout.purpose import Purpose

        training, config = self._loop.training_purpose, self.config.rollout
        longest = config.max_response_tokens if max_tokens is None else max_tokens
        if not 0 < longest <= config.max_response_tokens:
            raise ValueError(
                f"generate: {max_tokens=}: the engines have room for rollout.max_response_tokens="
                f"{config.max_response_tokens}. Ask for 1 to that many."
            )
        if samples < 1 or not 0 <= (heat := config.temperature if temperature is None else temperature) < math.inf:
            raise ValueError(
                f"generate: {samples=}, {temperature=}. Ask for 1 sample or more, and a temperature from 0."
            )
        if samples > 1 and not heat:
            raise ValueError(f"generate: {samples=} at temperature 0 would all be equal. Generate one.")
        settings = replace(training.settings, temperature=heat, max_tokens=longest)
        purpose = Purpose("texts", samples, settings)
        rollout_group = self._loop.workers.rollout_group
        groups = await self._sampled("generate", prompts, lambda prompt: rollout_group(prompt, purpose))
        if heat == config.temperature:
            return [group.samples for group in groups]
        return [tuple(_with_fact(sample, TEMPERATURE, heat) for sample in group.samples) for group in groups]

    @_twin
    async def group_async(
        self, prompt: Prompt, rollouts: Sequence[ScoredRollout], rewards: Sequence[float | None]
    ) -> RolloutGroup:
        """A group of generated rollouts with rewards of your own; None is unscorable. It waits as those of `sample`.

        No penalty of the config is applied to these rewards.
        """
        from rlhf.rewards.grade import OK, UNSCORABLE

        of_prompt, buffer, trained = f"group: prompt {prompt.id}", self._loop.buffer, self.config.rollout.temperature
        if len(rewards) != len(rollouts):
            raise ValueError(f"{of_prompt}: {len(rewards)} rewards for {len(rollouts)} rollouts. Give one for each.")
        for number, sample in enumerate(rollouts):
            if (heat := sample.rollout.facts.get(TEMPERATURE, trained)) != trained:
                raise ValueError(
                    f"{of_prompt}: rollout {number} was sampled at temperature {heat:g}, and rollout.temperature="
                    f"{trained:g} is trained. Generate at that temperature."
                )
            twice = any(sample.rollout is earlier.rollout for earlier in rollouts[:number])
            if twice or buffer.holds_rollout(sample.rollout):
                raise ValueError(f"{of_prompt}: rollout {number} is in a group already. Use each rollout once.")
        values = [None if reward is None else float(reward) for reward in rewards]
        graded = RolloutGroup(
            prompt,
            tuple(
                replace(
                    sample, rollout=replace(sample.rollout, sample=number), reward=value,
                    reward_parts={OWN_REWARD: value}, status=UNSCORABLE if value is None else OK,
                )
                for number, (sample, value) in enumerate(zip(rollouts, values, strict=True))
            ),
        )  # fmt: skip
        _check_whole("group", graded, self.config.rollout.samples_per_prompt)
        buffer.hold(graded)
        return graded

    @_twin
    async def drop_async(self, unwanted: Sequence[RolloutGroup | Prompt]) -> None:
        """Drop groups that wait: they are counted as filtered, or as stale if no step may train them any more.

        A prompt whose rollouts are in no group can be dropped too. A resumed run does not draw dropped prompts again.
        """
        buffer = self._loop.buffer
        for item in unwanted:
            if isinstance(item, RolloutGroup) and not buffer.holds(item):
                raise ValueError(f"drop: {_does_not_wait(item)}")
        for item in unwanted:
            buffer.drop(item) if isinstance(item, RolloutGroup) else buffer.drop_prompt(item)

    # --- a training step ---

    @_twin
    async def update_async(self, groups: Sequence[RolloutGroup], advantages: Advantages | None = None) -> UpdateReport:
        """Train on groups that wait: log-probs, minibatches, optimizer steps. The engines keep their weights.

        Any number of groups makes a step, `learner.epochs_per_step` x `minibatches_per_epoch` optimizer steps. The next
        update needs `publish` first: versions of weights, metrics and the canary belong to a training step. If an
        update fails or is interrupted nobody knows what the learners hold, so the Trainer cannot go on.

        Args:
            groups: whole groups, also with other rewards (`dataclasses.replace`).
            advantages: a function as `algo.advantage` (docs/algorithms.md) or one number for each rollout of the
                groups, in their order; by default `algo.advantage` computes them.
        """
        from rlhf import grpo
        from rlhf.algo.own_functions import ObjectiveError
        from rlhf.log.reductions import mean_over_updates, to_values

        async with self._learners:
            self._check_published("update")
            if not self.config.rollout.max_policy_lag:
                self._check_turn("update")
            self._check_groups(groups)
            advantage = None if advantages is None else self._advantage_function(advantages, groups)
            self._begin_step()
            with self._whole("update"):
                await self._profile.enter_async_context(self._run.profiled(self.step + 1))
                try:
                    done = await grpo.update(self._run, self._loop, groups, self.step, advantage=advantage)
                except ObjectiveError as error:
                    await self._profile.aclose()
                    if self._sampling:
                        await self._loop.engines.wake_if_asleep(self.step)
                    raise AdvantagesError(f"update: advantages: {error}. Correct it.") from error
                self._updated = done
        taken = sum(update.taken for update in done.updates)
        metrics = to_values(mean_over_updates(done.updates)) | done.extra_metrics
        return UpdateReport(done.step, done.advantages, taken, len(done.updates) - taken, metrics)

    @_twin
    async def publish_async(self) -> dict[str, Any]:
        """Send the new weights to the engines, check that they hold them, and end the step as `rlhf grpo` does.

        Returns the metrics of the step, with those of an evaluation if one was due. A checkpoint is saved if due. Then
        what ends a run ends this one: a RuntimeError, or a StoppedError if a callback asked for the end.
        """
        from rlhf import grpo

        async with self._learners:
            if (done := self._updated) is None:
                raise ValueError(f"publish: nothing was updated after step {self.step}. Call update first.")
            with self._whole("publish"):
                metrics = await grpo.publish(self._loop, done)
                await self._profile.aclose()
            self._updated, self._in_step = None, False
            await self._loop.evaluate_if_due(done.step)
            await self._loop.checkpoint_if_due(done.step)
            self._loop.useless_steps.check()
        return metrics | self._run.state.evaluations.get(done.step, {})

    # --- measuring and saving ---

    @_twin
    async def evaluate_async(self) -> dict[str, float]:
        """Evaluate the published weights on data.eval now. Returns the metrics, which are logged under this step."""
        if not self._loop.data.evaluation.prompts:
            raise ValueError("evaluate: data.eval names no rows. Set data.eval.")
        async with self._awake("evaluate", lag=0, holds_learners=True):
            await self._loop.evaluate(self.step)
        return self._run.state.evaluations[self.step]

    @_twin
    async def logprobs_async(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[np.ndarray]:
        """The learners' log-probs of given tokens, with the weights of the last update, published or not.

        They are of the policy at rollout.temperature, over the whole vocabulary.

        Args:
            sequences: the token ids of a prompt [P] and of a response to it [R].

        Returns:
            [R] float32 for each.
        """
        budget, temperature = self.config.row_tokens, self.config.rollout.temperature
        rows = [np.concatenate([np.asarray(part, np.int64) for part in pair]) for pair in sequences]
        self._check_tokens(rows, [len(prompt) for prompt, _ in sequences], budget)
        results: list[np.ndarray] = []
        async with self._learners:
            self._check_turn("logprobs")
            await self._loop.engines.sleep_if_colocated()
            while chunk := _first_rows(rows[len(results) :], budget):
                by_rank = await self._run.cluster.learners.call(
                    lambda learner: learner.canary(chunk, False, temperature)
                )
                results += by_rank[0]
        return [row[len(prompt) :] for row, (prompt, _) in zip(results, sequences, strict=True)]

    @_twin
    async def save_async(self, folder: str | Path | None = None) -> Path:
        """Save a checkpoint of the last published step, from which `resume=True` goes on; or export the model.

        Args:
            folder: a new folder for the model in Hugging Face's format; None: a checkpoint in run.dir.

        Returns:
            The checkpoint, or the folder. RuntimeError if it could not be written.
        """
        run, progress = self._run, self._loop.progress
        async with self._learners:
            self._check_published("save")
            if folder is None:
                if not self.step:
                    raise ValueError("save: no step is published yet, so the model is that of model.path. Train first.")
                await run.save(self.step, progress)
                return run.folder.checkpoints / f"step-{self.step:06d}"
            check_new_folder(path := Path(folder), "save: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            with run.clock.phase("export"):
                why = await run.export(path, self.step, progress)
        if why:
            raise RuntimeError(f"save: {path}: the export failed: {why}")
        return path

    next_prompts = _blocking(next_prompts_async)
    sample = _blocking(sample_async, samples=True)
    generate = _blocking(generate_async, samples=True)
    group = _blocking(group_async)
    drop = _blocking(drop_async)
    update = _blocking(update_async)
    publish = _blocking(publish_async)
    evaluate = _blocking(evaluate_async)
    logprobs = _blocking(logprobs_async)
    save = _blocking(save_async)

    # --- what the calls share ---

    async def _sampled(
        self, call: str, prompts: Sequence[Prompt], rollout_group: Callable[[Prompt], Awaitable[RolloutGroup]]
    ) -> list[RolloutGroup]:
        """The groups of these prompts, in their order."""
        from rlhf.run.evaluation import evaluate

        if other := [type(prompt).__name__ for prompt in prompts if not isinstance(prompt, Prompt)]:
            raise ValueError(
                f"{call}: a {other[0]} is not a Prompt. Give those of next_prompts, or of trainer.prompts."
            )
        config, run = self.config, self._run
        at_once = len(prompts) if config.run.deterministic else self._loop.groups_at_once
        self._begin_step()
        async with self._awake(call, config.rollout.max_policy_lag) as alone:
            with run.clock.phase("sampling") if alone else contextlib.nullcontext():
                count = run.log.terminal.progress("prompt", len(prompts))
                return (await evaluate({"": prompts}, rollout_group, at_once=max(1, at_once), count=count))[""]

    @contextlib.asynccontextmanager
    async def _awake(self, call: str, lag: int, *, holds_learners: bool = False) -> AsyncIterator[bool]:
        """A context in which the engines may sample; gives whether no other call samples.

        ValueError if their rollouts would be older than `lag` steps for the next update. `holds_learners`: no other
        call uses the learners meanwhile, so on shared GPUs the engines stay awake.
        """
        self._check_version(call, lag)
        async with contextlib.AsyncExitStack() as held:
            if holds_learners or self._run.cluster.shares_gpus:
                await held.enter_async_context(self._learners)
                self._check_version(call, lag)  # an update may have come first
                if self._updated is None:
                    await self._loop.engines.wake_if_asleep(self.step)
                elif self._run.cluster.shares_gpus:
                    until = f"until step {self._updated.step} is published"
                    self._run.log.print(f"{call} waits: engines on the learners' GPUs sleep {until}.")
            if not holds_learners:
                await held.aclose()
            self._sampling += 1
            try:
                yield self._sampling == 1
            finally:
                self._sampling -= 1

    def _begin_step(self) -> None:
        """The time of a step begins with its first call."""
        if not self._in_step:
            self._run.clock.start_step()
        self._in_step = True

    @contextlib.contextmanager
    def _whole(self, call: str) -> Iterator[None]:
        """A context after which the Trainer goes on only if it was not left by an exception."""
        self._changing = True
        try:
            yield
        except AdvantagesError:
            raise
        except BaseException:
            self._broken = (
                f"a call of {call} failed or was interrupted, so nobody knows what the learners hold. Leave the "
                "context, and go on from the newest checkpoint with resume=True."
            )
            raise
        finally:
            self._changing = False

    # --- refusals ---

    def _check_version(self, call: str, lag: int) -> None:
        if (self._changing or self._updated is not None) and not lag:
            raise ValueError(
                f"{call}: the engines have the weights of step {self.step} until step {self.step + 1} is published. "
                "Call publish first."
            )

    def _check_awake(self, call: str) -> None:
        if self._run.cluster.shares_gpus and self._updated is not None and not self._changing:
            raise ValueError(
                f"{call}: the engines on the learners' GPUs sleep until step {self._updated.step} is published. Call "
                f"publish first, or start `await {call}_async` before the update."
            )

    def _check_published(self, call: str) -> None:
        if self._updated is not None:
            raise ValueError(f"{call}: step {self._updated.step} is not published. Call publish first.")

    def _check_turn(self, call: str) -> None:
        if self._run.cluster.shares_gpus and self._sampling:
            raise ValueError(f"{call}: the engines on the learners' GPUs are sampling. Wait for the call that samples.")

    def _check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        """Raise a ValueError unless these groups can be trained now."""
        config, buffer, step = self.config, self._loop.buffer, self.step
        size, lag = config.rollout.samples_per_prompt, config.rollout.max_policy_lag
        if step >= config.run.steps:
            raise ValueError(
                f"update: run.steps={config.run.steps}: all steps are done, and the learning-rate schedule has ended. "
                "Set run.steps to the length of the loop."
            )
        minibatches = config.learner.minibatches_per_epoch
        if len(groups) * size < minibatches:
            raise ValueError(
                f"update: {len(groups)} groups of {size} rollouts for learner.minibatches_per_epoch={minibatches}. "
                "Give at least one rollout per minibatch."
            )
        for number, group in enumerate(groups):
            _check_whole("update", group, size)
            if any(group is earlier for earlier in groups[:number]):
                raise ValueError(f"update: the group of prompt {group.prompt.id} was given twice. Give it once.")
            if not buffer.holds(group):
                raise ValueError(f"update: {_does_not_wait(group)}")
            if not buffer.staleness.admits(group.oldest_version, step=step):
                raise ValueError(
                    f"update: the group of prompt {group.prompt.id} was sampled with the weights of step "
                    f"{group.oldest_version}, and those of step {step} are trained: rollout.max_policy_lag={lag}. "
                    "Drop it with drop(groups), or raise the lag."
                )

    def _advantage_function(self, given: Advantages, groups: Sequence[RolloutGroup]) -> Callable[..., Any]:
        """The caller's advantages as a function like that of `algo.advantage`. Raises AdvantagesError."""
        if not self.config.learns_from_rewards:
            raise AdvantagesError("update: advantages: algo.teacher replaces them. Set algo.teacher.reward=add.")
        if callable(given):
            return _told(given)
        samples, values = [sample for group in groups for sample in group.samples], np.array(given, np.float32)
        if values.shape != (len(samples),):
            raise AdvantagesError(
                f"update: advantages of shape {list(values.shape)} for {len(samples)} rollouts. Give one for each, in "
                "the order of the groups."
            )
        if len(wrong := np.flatnonzero(~np.isfinite(values))):
            raise AdvantagesError(f"update: advantage {wrong[0]} is {values[wrong[0]]}. Give finite numbers.")
        if self.config.kl_in_reward:
            raise AdvantagesError(
                "update: algo.kl_place=reward: numbers as advantages do not contain the KL. Give a function of the "
                "rewards, or set algo.kl_place=loss."
            )
        import torch

        scorable = torch.from_numpy(values[[sample.reward is not None for sample in samples]])
        return lambda rewards, groups: scorable

    def _check_tokens(self, rows: Sequence[np.ndarray], prompt_lengths: Sequence[int], budget: int) -> None:
        for number, (row, prompt) in enumerate(zip(rows, prompt_lengths, strict=True)):
            if not 0 < prompt < len(row) <= budget:
                raise ValueError(
                    f"logprobs: sequence {number} has {prompt} tokens of a prompt and {len(row) - prompt} of a "
                    f"response. Give some of both, together at most {self.config.row_limit}."
                )
            if not 0 <= row.min() <= row.max() < len(self.tokenizer):
                raise ValueError(
                    f"logprobs: sequence {number} has an id outside of 0 to {len(self.tokenizer) - 1}. Give token ids."
                )


def _with_fact(sample: ScoredRollout, name: str, value: float) -> ScoredRollout:
    return replace(sample, rollout=replace(sample.rollout, facts={**sample.rollout.facts, name: value}))


def _grades_nothing(problem: str) -> bool:
    return problem.startswith(NOTHING_GRADES)


def _contradictions(config: GRPOConfig) -> Iterator[str]:
    """The contradictions of a config, but that nothing grades."""
    yield from (problem for problem in config.contradictions() if not _grades_nothing(problem))
    yield from conflicts(config, NOT_DONE_HERE)


def _check_whole(call: str, group: RolloutGroup, size: int) -> None:
    """Raise a ValueError unless the group has `size` rollouts of its prompt, with finite rewards."""
    prompt = group.prompt
    if len(group.samples) != size:
        raise ValueError(
            f"{call}: the group of prompt {prompt.id} has {len(group.samples)} rollouts, and rollout."
            f"samples_per_prompt={size}. Give whole groups; a reward of None leaves a rollout out."
        )
    for number, sample in enumerate(group.samples):
        if (sample.rollout.prompt_id, sample.rollout.epoch) != (prompt.id, prompt.epoch):
            raise ValueError(
                f"{call}: rollout {number} in the group of prompt {prompt.id} is of prompt {sample.rollout.prompt_id}. "
                "Do not mix prompts: advantages compare the rollouts of one."
            )
        if sample.reward is not None and not abs(sample.reward) <= FLOAT32_MAX:
            raise ValueError(
                f"{call}: rollout {number} of prompt {prompt.id} has the reward {sample.reward}. Give a finite number, "
                "or None if it cannot be scored."
            )


def _does_not_wait(group: RolloutGroup) -> str:
    return (
        f"the group of prompt {group.prompt.id} does not wait: it was trained or dropped before, or it is not from "
        "sample or group. Give each group once."
    )


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """The caller's function; its errors become ObjectiveErrors."""
    from rlhf.algo.own_functions import ObjectiveError

    @functools.wraps(function)
    def told(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            raise ObjectiveError(error_text(error)) from error

    return told


def _first_rows(rows: Sequence[np.ndarray], budget: int) -> list[np.ndarray]:
    """The first rows that have together at most `budget` tokens."""
    ends = np.cumsum([len(row) for row in rows])
    return [*rows[: int(np.searchsorted(ends, budget, side="right"))]]


def _raise_another(failure: BaseException | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """Raise the failure of a run that has ended, unless it is `error`, with which it was ended; that has its trace."""
    from rlhf.api.loop_thread import InterruptedLoopError

    if failure is error and error is not None:
        error.__traceback__ = trace
    elif isinstance(failure, Exception) and not isinstance(failure, InterruptedLoopError):
        raise failure


def _reset_signals() -> None:
    """Set back the handler of SIGTERM, where Ray's C++ has put its own; the main thread alone can do it."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
