"""Study: what each KL estimator does to the KL, in the loss and in the reward.

    python -m benchmarks.studies.kl --output runs/studies/kl [--workers 2] [--seeds 0,1,2] [--quick]

Runs of 40 steps of the quickstart's task with and without a KL (`kl_runs.py` lists them): in the loss by estimator,
aggregation, minibatches per step, coefficient and lag, in the reward by estimator, coefficient and advantage. Each run
ends as one file below `--output`; what is there is not run again, so the scan can be stopped at any time. `--workers 0`
only makes tables and picture of the runs that are there.

A run is the trainer's own learner, reference, batches, advantages and graders in one process with one thread. Instead
of an engine, transformers samples from the learner's weights, so the policy that samples is the policy that learns; in
runs with a lag it is the policy of one training step before. All runs of a seed begin from the same weights and see the
same prompts in the same order.

The reported KL is always k3 at the tokens that a policy has just sampled, of that same policy, where it has no bias. At
the end the last policy answers held-out problems. A second table has the bias and variance of each estimator's gradient
(`kl_gradients.py`).
"""

from __future__ import annotations

import asyncio
import datetime
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

from benchmarks.studies import kl_report, report
from benchmarks.studies.kl_runs import SEEDS, all_runs
from rlhf.algo.kl import kl_per_token
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.data.load import load_prompts
from rlhf.data.model_files import load_tokenizer
from rlhf.data.order import PromptStream
from rlhf.learner.port import free_port
from rlhf.log.reductions import mean_over_updates
from rlhf.processes.outside import die_with_parent
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.worker import to_rollout
from rlhf.sampling.requests import Completion
from rlhf.step.advantages import penalize_kl, step_advantages
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import PolicyTargets, Prompt, Rollout, RolloutGroup, StepBatch, VersionSpan, World

STEPS, PROMPTS = 40, 16
QUICK_STEPS, QUICK_PROMPTS = 4, 1
HELD_OUT = 256  # problems, one response each
MAX_SAMPLING_DIFFERENCE = 1e-3  # nats per token between sampling and learner; float32 gives 1e-6


def study_config(data: Path, *, steps: int, prompts: int, held_out: int = 0) -> GRPOConfig:
    """The quickstart with a quarter of its rollouts, at a constant rate, so that the end of a run is no quieter.

    Two minibatches, so that the second is off-policy by an update, as in any run with more than one.

    held_out: problems that the last policy of a run answers.
    """
    overrides = [
        *report.RECORDED_WITH, f"run.steps={steps}", f"model.path={data}/model", f"data.train={data}/train.jsonl",
        *([f"data.eval={data}/test.jsonl", f"data.eval_rows={held_out}"] if held_out else ["data.eval=null"]),
        "evaluation.every=null", f"rollout.prompts_per_step={prompts}", "algo.kl_coef=1.0", "algo.log_kl=true",
        "algo.importance_correction=none", "learner.minibatches_per_epoch=2", "learner.schedule.name=constant",
        "learner.schedule.min_lr=0.0", "learner.schedule.warmup_steps=0", "learner.schedule.warmup_fraction=0.125",
        "reward={parts: [{name: math, mode: strict}], workers: 1}",
    ]  # fmt: skip
    return load_config(GRPOConfig, ["configs/quickstart.yaml"], overrides)


# --- a run ---


class Trainer:
    """Learner, reference, sampling and grading in this process, for any number of runs.

    A study of what the engine samples from replaces `publish` and `compare`.
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

    def compare(self, batch: StepBatch, old: np.ndarray | None) -> report.Row:
        """What is logged of the difference between what samples and the learner; here there must be none."""
        if old is not None and not self.config.rollout.max_policy_lag:
            check_sampled_from(batch, old)
        return {}

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
        stream = PromptStream(self.prompts, seed=run.seed)
        rows = []
        for step in range(config.run.steps):
            torch.manual_seed(run.seed * config.run.steps + step)
            self.publish(run)
            groups = self.sample(stream.take(config.rollout.prompts_per_step), config.rollout.samples_per_prompt)
            rows.append({"step": step + 1} | self.train_step(groups, step))
        if self.held_out:
            self._versions.clear()
            self.publish(run)
            rows[-1] |= {f"held-out {name}": value for name, value in self.evaluate().items()}
        return rows

    def evaluate(self) -> report.Row:
        """What is measured of one response of the published policy to each of the held-out problems."""
        batch, _, ref = self.forward(self.sample(self.held_out, 1), step=self.config.run.steps)
        measured = statistics(batch, batch.tokens.rollout_logprobs, ref)
        return {name: measured[name] for name in ("k3", "reward", "length")}

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

    def forward(self, groups: Sequence[RolloutGroup], step: int) -> tuple[StepBatch, np.ndarray | None, np.ndarray]:
        """The batch, and what the learner computes of it: old log-probs [N], if it needs them, and the reference's."""
        batch = make_batch(groups, mask_truncated=False)
        epochs = plan_epochs(batch, self.config, step=step)
        self.learner.start_step(batch.tokens, epochs)
        computed = [batch.tokens.token_indices(rows) for minibatch in epochs[0] for rows in minibatch.microbatches[0]]
        index = np.concatenate(computed)
        old, ref = self.learner.logprobs()
        assert ref is not None
        return batch, None if old is None else column_of(batch, index, old), column_of(batch, index, ref)

    def train_step(self, groups: Sequence[RolloutGroup], step: int) -> report.Row:
        """The step of `rlhf.grpo`, and what the study looks at: measured on the fresh rollouts, before the update."""
        config = self.config
        batch, old, ref = self.forward(groups, step)
        compared = self.compare(batch, old)
        rewards = batch.rewards
        if config.kl_in_reward:
            rewards = penalize_kl(batch, batch.trained_rows, old, ref, config.algo)
        advantages = broadcast_to_tokens(batch, step_advantages(batch, rewards, config.algo.advantage))
        learned = mean_over_updates(self.learner.update(PolicyTargets(advantages, old, ref)))
        sampled_from = batch.tokens.rollout_logprobs if old is None or config.rollout.max_policy_lag else old
        return (
            statistics(batch, sampled_from, ref)
            | compared
            | {
                "entropy": learned["policy/entropy"].value(),
                "gradient_norm": learned["learner/grad_norm"].value(),
                "skipped": int(learned["learner/updates_skipped"].value()),
            }
        )


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


def check_sampled_from(batch: StepBatch, old: np.ndarray) -> None:
    """The tokens come from the policy that is about to learn, as far as log-probs tell."""
    mask = batch.tokens.response_mask
    difference = float(np.abs(old - batch.tokens.rollout_logprobs)[mask].mean())
    if not difference < MAX_SAMPLING_DIFFERENCE:
        raise RuntimeError(f"sampling and learner differ by {difference:.2g} nats per token: the KL is not on-policy.")


def statistics(batch: StepBatch, sampled_from: np.ndarray, ref: np.ndarray) -> report.Row:
    """Of responses, and log-probs [N] of the policy that sampled them and of the reference.

    k1, k2 and k3 in nats per token of the trained ones; mean reward and length; the share of groups whose rewards are
    equal.
    """
    mask = batch.tokens.response_mask & np.repeat(batch.trained_rows, batch.tokens.lengths)
    logprobs, ref_logprobs = (torch.from_numpy(column[mask]).double() for column in (sampled_from, ref))
    starts = np.flatnonzero(np.diff(batch.groups, prepend=-1))
    highest, lowest = (extreme.reduceat(batch.rewards, starts) for extreme in (np.maximum, np.minimum))
    kls = {name: float(kl_per_token(logprobs, ref_logprobs, estimator=name).mean()) for name in ("k1", "k2", "k3")}
    return kls | {
        "reward": float(np.nanmean(batch.rewards)),
        "length": float(batch.tokens.response_mask.sum() / len(batch.rewards)),
        "tied": float((highest == lowest).mean()),
    }


# --- the scan ---

_trainer: Trainer | None = None  # of a worker process


def start_worker(config: GRPOConfig, kind: type[Trainer]) -> None:
    """Load the models once for all runs of this process, and clean up when it ends or the scan is killed."""
    global _trainer
    _trainer = trainer = kind(config)
    multiprocessing.util.Finalize(trainer, trainer.close, exitpriority=10)

    def end(*_: object) -> None:
        trainer.close()
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
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "seconds": round(seconds, 1),
        "steps": steps,
    }
    report.write_json(file, record)


def pending(runs: Sequence[Any], folder: Path) -> list[Any]:
    """Those without a file."""
    return [run for run in runs if not (folder / f"{run.name}.json").is_file()]


def scan(base: GRPOConfig, runs: Sequence[Any], folder: Path, *, workers: int, kind: type[Trainer] = Trainer) -> None:
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("kl", "KL estimators in the loss and in the reward.", trains=True, scans=True, seeds=SEEDS)
    options = report.parse(parser, arguments)
    size, held_out = {"steps": STEPS, "prompts": PROMPTS}, HELD_OUT
    if options.quick:
        options.seeds, size, held_out = options.seeds[:1], {"steps": QUICK_STEPS, "prompts": QUICK_PROMPTS}, 8
    runs, folder = all_runs(options.seeds), options.output / "runs"
    config = study_config(report.ensure_data(options.data), **size, held_out=held_out)
    scan(config, runs, folder, workers=options.workers)
    kl_report.write(list(read(config, runs, folder)), options.output, seeds=options.seeds)


if __name__ == "__main__":
    main()
