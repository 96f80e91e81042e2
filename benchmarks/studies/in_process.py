"""Shared by the studies whose runs train in one process: no Ray, no engine, one thread.

A run is the trainer's own learner, reference, batches, advantages and graders. Instead of an engine, transformers
samples from the learner's weights. With a policy lag it has the weights of so many training steps before, or the first
ones. All runs of a seed begin from the same weights and see the same prompts in the same order.

A scan takes many runs in a few worker processes, and writes a file for each; what is there is not run again.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.util
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.studies import report
from rlhf.config.grpo import GRPOConfig
from rlhf.data.load import load_prompts
from rlhf.data.model_files import load_tokenizer
from rlhf.data.order import PromptStream
from rlhf.learner.port import free_port
from rlhf.processes.outside import die_with_parent
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.worker import to_rollout
from rlhf.sampling.requests import Completion
from rlhf.types import Prompt, Rollout, RolloutGroup, StepBatch, VersionSpan, World

# --- a run ---


class Trainer:
    """Learner, reference, sampling and grading in this process, for any number of runs.

    A study says what a training step is, and what is logged of it. One of what the engine samples from replaces
    `publish` too.
    """

    def __init__(self, config: GRPOConfig, world: World | None = None) -> None:
        from transformers import AutoModelForCausalLM  # imported here, because --workers 0 does not need it

        self.base = self.config = config
        self.tokenizer = load_tokenizer(config.model)
        self.prompts = load_prompts(config.data, "train", self.tokenizer).prompts
        held_out = load_prompts(config.data, "eval", self.tokenizer).prompts
        self.held_out = [prompt for prompts in held_out.values() for prompt in prompts]
        self._versions: deque[dict[str, torch.Tensor]] = deque()
        self.learner = self.make_learner(config, world or World(0, 1, 0, "127.0.0.1", free_port(), threads=1))
        self.engine: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=config.model.dtype).eval()
        self._exit_stack = ExitStack()
        self.close = self._exit_stack.close
        self._loop = asyncio.new_event_loop()  # asyncio.run has a signal handler that writes out arrays
        self._exit_stack.callback(self._loop.close)
        self.scorer = self._exit_stack.enter_context(Scorer(config.reward))
        self._start = self._exit_stack.enter_context(TemporaryDirectory(prefix="rlhf-study-"))
        self.learner.save(self._start)
        while (saved := self.learner.save_report()) is None:
            time.sleep(0.01)
        assert saved.error is None, saved.error

    def make_learner(self, config: GRPOConfig, world: World) -> Any:
        from rlhf.learner.policy import Learner

        return Learner(config, world)

    def publish(self, run: Any) -> None:
        """Give what samples the learner's weights, or those of `max_policy_lag` steps ago, or the first ones.

        A tied head has no tensor of its own.
        """
        self._versions.append({name: tensor.detach().clone() for name, tensor in self.learner})
        while len(self._versions) > self.config.rollout.max_policy_lag + 1:
            self._versions.popleft()
        self.engine.load_state_dict(self._versions[0], strict=False)

    def publish_newest(self, run: Any) -> None:
        """Give what samples the learner's weights, whatever the policy lag."""
        versions, self._versions = self._versions, deque()
        self.publish(run)
        self._versions = versions

    def begin(self, run: Any) -> GRPOConfig:
        """The config of a run, with which everything begins anew; a world of several ranks takes one run alone."""
        self.config = self.learner.config = config = run.config(self.base)
        self.learner.training = config.training
        if self.learner.world.size == 1:
            self.learner.load(self._start)
        self._versions.clear()
        return config

    def run(self, run: Any) -> list[report.Row]:
        """One run of the scan, from the first weights and a new Adam: one row per training step."""
        config = self.begin(run)
        stream = PromptStream(self.prompts, seed=config.run.seed, curriculum=config.data.curriculum)
        rows = []
        for step in range(config.run.steps):
            torch.manual_seed(config.run.seed * config.run.steps + step)
            self.publish(run)
            first = stream.drawn
            groups = self.sample(stream.take(config.rollout.prompts_per_step), config.rollout.samples_per_prompt)
            if stream.curriculum is not None:
                for position, group in enumerate(groups, start=first):
                    stream.curriculum.record(position, mean_reward([group]))
            rows.append({"step": step + 1} | self.train_step(groups, step))
            rows[-1] |= self.after_step(run, step)
        return rows

    def train_step(self, groups: Sequence[RolloutGroup], step: int) -> report.Row:
        """Train on these groups. Returns what the study logs of the step."""
        raise NotImplementedError

    def after_step(self, run: Any, step: int) -> report.Row:
        """What is measured after a training step, such as the accuracy on held-out problems."""
        return {}

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], samples: int) -> list[RolloutGroup]:
        """Graded responses of the policy that was published, so many to each prompt."""
        rollout, ends = self.config.rollout, np.atleast_1d(self.engine.generation_config.eos_token_id)
        responses, logprobs = sample_responses(
            self.engine, [prompt.token_ids for prompt in prompts], samples, torch.from_numpy(ends),
            temperature=rollout.temperature, longest=rollout.max_response_tokens,
        )  # fmt: skip
        rollouts = [
            make_rollout(prompts[row // samples], row % samples, response, logprobs[row], ends)
            for row, response in enumerate(responses)
        ]
        return self._loop.run_until_complete(self._grade(prompts, rollouts, samples))

    async def _grade(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], samples: int) -> list[RolloutGroup]:
        async def group(number: int, prompt: Prompt) -> RolloutGroup:
            own = rollouts[number * samples : (number + 1) * samples]
            texts = [self.tokenizer.decode(r.response_ids, skip_special_tokens=True) for r in own]
            return RolloutGroup(prompt, await self.scorer.score_group(prompt, own, texts))

        return list(await asyncio.gather(*(group(number, prompt) for number, prompt in enumerate(prompts))))


def mean_reward(groups: Sequence[RolloutGroup]) -> float:
    return float(np.nanmean([np.nan if s.reward is None else s.reward for group in groups for s in group.samples]))


def sample_responses(
    model: Any, prompts: Sequence[np.ndarray], samples: int, ends: torch.Tensor, *, temperature: float, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their log-probs [prompts x samples, longest]; 0 after a row's first end token.

    What `generate` of transformers computes, but each prompt is computed once, and a row leaves the batch at its end.
    """
    width = max(map(len, prompts))
    ids = torch.from_numpy(np.stack([np.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])).long()
    mask = torch.from_numpy(np.stack([np.arange(width) >= width - len(prompt) for prompt in prompts])).long()
    output = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), logits_to_keep=1)
    cache = output.past_key_values
    cache.batch_repeat_interleave(samples)
    logits, mask = (x.repeat_interleave(samples, 0) for x in (output.logits[:, -1], mask))
    rows = torch.arange(len(mask))  # that have not ended
    responses, logprobs = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
    for at in range(longest):
        of_vocabulary = (logits.float() / temperature).log_softmax(-1)
        drawn = torch.multinomial(of_vocabulary.exp(), 1)
        responses[rows, at], logprobs[rows, at] = drawn[:, 0], of_vocabulary.gather(1, drawn)[:, 0]
        going = (~torch.isin(drawn[:, 0], ends)).nonzero()[:, 0]
        if not len(going) or at + 1 == longest:
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
            rows, mask, drawn = rows[going], mask[going], drawn[going]
        mask = torch.cat([mask, torch.ones_like(drawn)], 1)
        output = model(drawn, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, past_key_values=cache)
        logits = output.logits[:, -1]
    return responses.numpy(), logprobs.numpy()


def make_rollout(prompt: Prompt, sample: int, response: np.ndarray, logprobs: np.ndarray, end: np.ndarray) -> Rollout:
    """One row [R] of what was sampled, cut after its first end token."""
    ends = np.flatnonzero(np.isin(response, end))
    length = int(ends[0]) + 1 if len(ends) else len(response)
    reason, spans = "stop" if len(ends) else "length", (VersionSpan(0, length, 0),)
    return to_rollout(prompt, sample, Completion(response[:length], logprobs[:length], reason, spans))


def column_of(batch: StepBatch, index: np.ndarray, part: np.ndarray) -> np.ndarray:
    """[N] float32 of the step, from what the learner computed at the tokens of `index`."""
    column = np.zeros(len(batch.tokens.token_ids), np.float32)
    column[index] = part
    return column


# --- the scan ---

_trainer: Trainer | None = None  # of a worker process


def start_worker(config: GRPOConfig, kind: type[Trainer]) -> None:
    """Load the models once for all runs of this process, and clean up when it ends or the scan is killed."""
    global _trainer
    _trainer = trainer = kind(config)
    multiprocessing.util.Finalize(trainer, trainer.close, exitpriority=10)

    def end(*_: object) -> None:
        try:
            trainer.close()  # fails where the signal came while its event loop ran
        finally:
            os._exit(1)  # an exception would count as the result of a run, and the process would wait for the next one

    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it was gone before
        end()


def work(run: Any, file: Path) -> Any:
    """Run it in this worker, and write its file, unless another scan of the folder has done so."""
    assert _trainer is not None
    if file.is_file():
        return run
    began = time.monotonic()
    steps = _trainer.run(run)
    keep(file, run, steps, prompts=_trainer.config.rollout.prompts_per_step, seconds=time.monotonic() - began)
    return run


def keep(file: Path, run: Any, steps: Sequence[report.Row], *, prompts: int, seconds: float) -> None:
    """Write the file of a run, whole or not at all."""
    record = {
        **asdict(run),
        "prompts": prompts,
        **report.stamp(),
        "seconds": round(seconds, 1),
        "steps": steps,
    }
    report.write_json(file, record)


def pending(runs: Sequence[Any], folder: Path) -> list[Any]:
    """Those without a file."""
    return [run for run in runs if not (folder / f"{run.name}.json").is_file()]


def scan(base: GRPOConfig, runs: Sequence[Any], folder: Path, *, workers: int, kind: type[Trainer]) -> None:
    """Take every run that has no file yet, in `workers` processes of one thread, each with a trainer of its own."""
    list(read(base, runs, folder))  # files of another size are refused before hours of work
    left = pending(runs, folder)
    if not left or not workers:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker, initargs=(base, kind)) as pool:
        futures = [pool.submit(work, run, folder / f"{run.name}.json") for run in left]
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                print(f"{future.result().name}: done, {len(left) - count} left", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def read(base: GRPOConfig, runs: Sequence[Any], folder: Path) -> Iterator[dict[str, Any]]:
    """What is there of the runs.

    Raises:
        ValueError: a file is of a run of another size.
    """
    for run in runs:
        file = folder / f"{run.name}.json"
        if file.is_file():
            record, config = json.loads(file.read_text()), run.config(base)
            size = (len(record["steps"]), record["prompts"])
            if size != (planned := (config.run.steps, config.rollout.prompts_per_step)):
                raise ValueError(
                    f"{file}: a run of {size[0]} steps of {size[1]} prompts, not of {planned[0]} and {planned[1]}. "
                    "Name another --output."
                )
            yield record
