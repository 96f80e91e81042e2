"""Study: what each KL estimator does to the KL, in the loss and in the reward.

    python -m benchmarks.studies.kl --output runs/studies/kl [--workers 2] [--seeds 0,1,2] [--quick]

k1 to k4 in the loss and k1 to k3 in the reward, five coefficients each, and once none at all, three seeds: 108 runs of
40 steps of the quickstart's task. Each run ends as one file below `--output`; what is there is not run again, so the
scan can be stopped at any time. `--workers 0` only makes tables and picture of the runs that are there.

A run is the trainer's own learner, reference, batches, advantages and graders in one process with one thread. Instead
of an engine, transformers samples from the learner's weights, so the policy that samples is the policy that learns. All
runs of a seed begin from the same weights and see the same prompts in the same order.

The reported KL is always k3 at the tokens that the policy has just sampled, before any update on them, where it has no
bias. A second table has the bias and variance of each estimator's gradient (`kl_gradients.py`).
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.studies import kl_report, report
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
from rlhf.rollout.requests import Completion
from rlhf.rollout.sampler import to_rollout
from rlhf.step.advantages import penalize_kl, step_advantages
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import PolicyTargets, Prompt, Rollout, RolloutGroup, StepBatch, VersionSpan, World

BETAS = (0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS = (0, 1, 2)
ESTIMATORS = {"loss": ("k1", "k2", "k3", "k4"), "reward": ("k1", "k2", "k3")}  # k4 equals k1 in the reward
STEPS, PROMPTS = 40, 16
QUICK_STEPS, QUICK_PROMPTS = 4, 4
MAX_SAMPLING_DIFFERENCE = 1e-3  # nats per token between sampling and learner; float32 gives 1e-6


@dataclass(frozen=True)
class Run:
    """One run of the scan; `estimator` none is a run without a KL."""

    estimator: str
    place: str
    beta: float
    seed: int

    @property
    def name(self) -> str:
        kind = self.estimator if self.estimator == "none" else f"{self.estimator}-{self.place}-{self.beta:g}"
        return f"{kind}-seed{self.seed}"

    def config(self, base: GRPOConfig) -> GRPOConfig:
        algo: dict[str, Any] = {"kl_coef": self.beta}
        if self.estimator != "none":
            algo |= {"kl_estimator": self.estimator, "kl_place": self.place, "kl_ratio_weighted": False}
        return base.model_copy(
            update={
                "run": base.run.model_copy(update={"seed": self.seed}),
                "algo": base.algo.model_copy(update=algo),
            }
        )


def all_runs(betas: Sequence[float], seeds: Sequence[int]) -> list[Run]:
    """Seed after seed, so that a scan that was stopped is a whole one of fewer seeds."""
    return [
        run
        for seed in seeds
        for run in (
            Run("none", "loss", 0.0, seed),
            *(Run(name, place, beta, seed) for place in ESTIMATORS for name in ESTIMATORS[place] for beta in betas),
        )
    ]


def study_config(data: Path, *, steps: int, prompts: int) -> GRPOConfig:
    """The quickstart with a quarter of its rollouts, at a constant rate, so that the end of a run is no quieter.

    Two minibatches, so that the second is off-policy by an update, as in any run with more than one.
    """
    overrides = [
        f"run.steps={steps}", f"model.path={data}/model", f"data.train={data}/train.jsonl", "data.eval=null",
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

        self.config = config
        self.tokenizer = load_tokenizer(config.model)
        self.prompts = load_prompts(config.data, "train", self.tokenizer).prompts
        self.learner = self.make_learner(config, world or World(0, 1, 0, "127.0.0.1", free_port(), threads=1))
        self.engine: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=config.model.dtype).eval()
        self._exit_stack = ExitStack()
        self.close = self._exit_stack.close
        self.scorer = self._exit_stack.enter_context(Scorer(config.reward))
        self._start = self._exit_stack.enter_context(TemporaryDirectory(prefix="rlhf-study-"))
        self.learner.save(self._start)
        while (saved := self.learner.saved()) is None:
            time.sleep(0.01)
        assert saved.error is None, saved.error

    def make_learner(self, config: GRPOConfig, world: World) -> Any:
        from rlhf.learner.policy import Learner

        return Learner(config, world)

    def publish(self, run: Any) -> None:
        """Give what samples the learner's weights; a tied head has no tensor of its own."""
        self.engine.load_state_dict(dict(self.learner), strict=False)

    def compare(self, batch: StepBatch, old: np.ndarray) -> report.Row:
        """What is logged of the difference between what samples and the learner; here there must be none."""
        check_sampled_from(batch, old)
        return {}

    def run(self, run: Any) -> list[report.Row]:
        """One run of the scan, from the first weights and a new Adam: one row per training step."""
        self.config = self.learner.config = config = run.config(self.config)
        self.learner.load(self._start)
        stream = PromptStream(self.prompts, seed=run.seed)
        rows = []
        for step in range(config.run.steps):
            torch.manual_seed(run.seed * config.run.steps + step)
            self.publish(run)
            groups = self.sample(stream.take(config.rollout.prompts_per_step))
            rows.append({"step": step + 1} | self.train_step(groups, step))
        return rows

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Graded responses of the policy that was published."""
        rollout, end = self.config.rollout, self.engine.generation_config.eos_token_id
        longest = max(len(prompt.token_ids) for prompt in prompts)
        ids = np.stack([np.pad(prompt.token_ids, (longest - len(prompt.token_ids), 0)) for prompt in prompts])
        mask = np.stack([np.arange(longest) >= longest - len(prompt.token_ids) for prompt in prompts])
        output = self.engine.generate(
            torch.from_numpy(ids).long(), attention_mask=torch.from_numpy(mask).long(), do_sample=True,
            temperature=rollout.temperature, top_k=0, top_p=1.0, max_new_tokens=rollout.max_response_tokens,
            num_return_sequences=rollout.samples_per_prompt, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        responses = output.sequences[:, longest:]
        logprobs = (torch.stack(output.logits, 1).float() / rollout.temperature).log_softmax(-1)
        logprobs = logprobs.gather(2, responses[..., None])[..., 0].numpy()
        many = rollout.samples_per_prompt
        rollouts = [
            make_rollout(prompts[row // many], row % many, responses[row].numpy(), logprobs[row], end)
            for row in range(len(responses))
        ]
        return asyncio.run(self._grade(prompts, rollouts))

    async def _grade(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[RolloutGroup]:
        async def group(number: int, prompt: Prompt) -> RolloutGroup:
            many = self.config.rollout.samples_per_prompt
            own = rollouts[number * many : (number + 1) * many]
            texts = [self.tokenizer.decode(r.response_ids, skip_special_tokens=True) for r in own]
            return RolloutGroup(prompt, await self.scorer.score_group(prompt, own, texts))

        return list(await asyncio.gather(*(group(number, prompt) for number, prompt in enumerate(prompts))))

    def train_step(self, groups: Sequence[RolloutGroup], step: int) -> report.Row:
        """The step of `rlhf.grpo`, and what the study looks at: measured on the fresh rollouts, before the update."""
        config, learner = self.config, self.learner
        batch = make_batch(groups, mask_truncated=False)
        epochs = plan_epochs(batch, config, step=step)
        learner.start_step(batch.tokens, epochs)
        computed = [batch.tokens.token_indices(rows) for minibatch in epochs[0] for rows in minibatch.microbatches[0]]
        old, ref = (column_of(batch, np.concatenate(computed), part) for part in learner.logprobs())
        compared = self.compare(batch, old)
        rewards = batch.rewards
        if config.kl_in_reward:
            rewards = penalize_kl(batch, batch.trained_rows, old, ref, config.algo)
        advantages = broadcast_to_tokens(batch, step_advantages(batch, rewards, config.algo.advantage))
        learned = mean_over_updates(learner.update(PolicyTargets(advantages, old, ref)))
        return (
            statistics(batch, old, ref)
            | compared
            | {
                "entropy": learned["policy/entropy"].value(),
                "gradient_norm": learned["learner/grad_norm"].value(),
                "skipped": int(learned["learner/updates_skipped"].value()),
            }
        )


def make_rollout(
    prompt: Prompt, sample: int, response: np.ndarray, logprobs: np.ndarray, end: Sequence[int]
) -> Rollout:
    """One row [R] of what was sampled, cut after its first end token."""
    ends = np.flatnonzero(np.isin(response, end))
    length = int(ends[0]) + 1 if len(ends) else len(response)
    reason, spans = "stop" if len(ends) else "length", (VersionSpan(0, length, 0),)
    return to_rollout(prompt, sample, Completion(response[:length], logprobs[:length], reason, spans))


def column_of(batch: StepBatch, index: np.ndarray, part: np.ndarray | None) -> np.ndarray:
    """[N] float32 of the step, from what the learner computed at the tokens of `index`."""
    assert part is not None
    column = np.zeros(len(batch.tokens.token_ids), np.float32)
    column[index] = part
    return column


def check_sampled_from(batch: StepBatch, old: np.ndarray) -> None:
    """The tokens come from the policy that is about to learn, as far as log-probs tell."""
    mask = batch.tokens.response_mask
    difference = float(np.abs(old - batch.tokens.rollout_logprobs)[mask].mean())
    if not difference < MAX_SAMPLING_DIFFERENCE:
        raise RuntimeError(f"sampling and learner differ by {difference:.2g} nats per token: the KL is not on-policy.")


def statistics(batch: StepBatch, old: np.ndarray, ref: np.ndarray) -> report.Row:
    """Of freshly sampled responses: k1, k2 and k3 in nats per token of the trained ones, reward, length."""
    mask = batch.tokens.response_mask & np.repeat(batch.trained_rows, batch.tokens.lengths)
    logprobs, ref_logprobs = (torch.from_numpy(column[mask]).double() for column in (old, ref))
    kls = {name: float(kl_per_token(logprobs, ref_logprobs, estimator=name).mean()) for name in ("k1", "k2", "k3")}
    return kls | {
        "reward": float(np.nanmean(batch.rewards)),
        "length": float(batch.tokens.response_mask.sum() / len(batch.rewards)),
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


def work(run: Any, file: Path) -> Any:
    """Run it in this worker, and write its file."""
    assert _trainer is not None
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


def scan(config: GRPOConfig, runs: Sequence[Any], folder: Path, *, workers: int, kind: type[Trainer] = Trainer) -> None:
    """Take every run that has no file yet, in `workers` processes of one thread, each with a trainer of its own."""
    left = pending(runs, folder)
    if not left or not workers:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker, initargs=(config, kind)) as pool:
        futures = [pool.submit(work, run, folder / f"{run.name}.json") for run in left]
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                print(f"{future.result().name}: done, {len(left) - count} left", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def read_records(folder: Path, runs: Sequence[Any], *, steps: int, prompts: int) -> Iterator[dict[str, Any]]:
    """What is there of the runs.

    Raises:
        ValueError: a file is of a scan of another size.
    """
    for run in runs:
        file = folder / f"{run.name}.json"
        if file.is_file():
            record = json.loads(file.read_text())
            size = (len(record["steps"]), record["prompts"])
            if size != (steps, prompts):
                raise ValueError(
                    f"{file}: a run of {size[0]} steps of {size[1]} prompts, not of {steps} and {prompts}. "
                    "Name another --output."
                )
            yield record


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("kl", "KL estimators in the loss and in the reward, five coefficients each.", trains=True)
    parser.add_argument("--betas", default=",".join(f"{beta:g}" for beta in BETAS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="per training step, 8 samples each")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="0: only tables and picture")
    options = report.parse(parser, arguments)
    if options.quick:
        options.seeds, options.steps, options.prompts = options.seeds[:1], QUICK_STEPS, QUICK_PROMPTS
    runs = all_runs([float(beta) for beta in options.betas.split(",")], options.seeds)
    size = {"steps": options.steps, "prompts": options.prompts}
    folder = options.output / "runs"
    list(read_records(folder, runs, **size))  # a scan of another size is refused before hours of work
    scan(study_config(report.ensure_data(options.data), **size), runs, folder, workers=options.workers)
    kl_report.write(list(read_records(folder, runs, **size)), options.output, planned=len(runs), seeds=options.seeds)


if __name__ == "__main__":
    main()
