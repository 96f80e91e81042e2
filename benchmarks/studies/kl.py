"""Study: what each KL estimator in the loss does to the KL.

    python -m benchmarks.studies.kl --output runs/studies/kl

k1 to k4 in the loss, three coefficients each, and once none at all, 40 steps of the quickstart's task. The stack
(engine, learner, reference, scorer) is started once: before each run the learner gets its first weights and a new Adam,
and sends the weights to the engine. All runs see the same prompts in the same order.

The reported KL is always k3 at the tokens that the policy has just sampled, before any update on them, where it has no
bias. A second table has the expected gradients, enumerated over a small softmax policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies import report
from rlhf.algo.kl import KL_ESTIMATORS, kl_per_token
from rlhf.cluster.canary import Canary
from rlhf.cluster.cluster import Cluster
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.data.load import LoadedPrompts, load_prompts
from rlhf.data.model_files import load_tokenizer
from rlhf.data.order import PromptStream
from rlhf.log.reductions import mean_over_updates
from rlhf.rewards.answers.extract import gold_answer
from rlhf.rewards.scorer import Scorer
from rlhf.run.sample_and_grade import Sampler
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.step.response_advantages import step_advantages
from rlhf.types import PolicyTargets, RolloutGroup, StepBatch

BETAS = (0.01, 0.1, 1.0)
STEPS = 40
COLOURS = {"k1": "tab:red", "k2": "tab:blue", "k3": "tab:orange", "k4": "tab:green", "none": "0.45"}

# --- the expectations, without sampling ---

VOCABULARY = 5


def enumerated_gradients(seed: int = 0) -> list[report.Row]:
    """Expected gradients of each estimator as a loss over a softmax policy in float64, against those of both KLs.

    `noise` is the root mean square length of one token's gradient around its mean.
    """
    theta, ref, old = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_ref = ref.log_softmax(-1)

    def reverse(log_pi: Tensor) -> Tensor:
        return (log_pi.exp() * (log_pi - log_ref)).sum()

    def forward(log_pi: Tensor) -> Tensor:
        return (log_ref.exp() * (log_ref - log_pi)).sum()

    exact_reverse, exact_forward = (_gradient(f, theta) for f in (reverse, forward))
    rows = []
    for name in (*KL_ESTIMATORS, "k3 weighted"):
        on_policy, noise = expected_gradient(name, theta, log_ref, sampled_from=theta)
        off_policy, _ = expected_gradient(name, theta, log_ref, sampled_from=old)
        rows.append(
            {
                "estimator": name,
                "length of the expected gradient": float(on_policy.norm()),
                "noise": noise,
                "distance to that of KL(pi, ref)": float((on_policy - exact_reverse).norm()),
                "distance to that of KL(ref, pi)": float((on_policy - exact_forward).norm()),
                "distance to that of KL(pi, ref), off-policy": float((off_policy - exact_reverse).norm()),
            }
        )
    return rows


def _gradient(of: Any, theta: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    of(theta.log_softmax(-1)).backward()
    assert theta.grad is not None
    return theta.grad


def expected_gradient(name: str, theta: Tensor, log_ref: Tensor, *, sampled_from: Tensor) -> tuple[Tensor, float]:
    """Mean gradient of the KL loss over all tokens, by their probability under `sampled_from`; and its noise."""
    estimator, _, weighted = name.partition(" ")
    log_old = sampled_from.log_softmax(-1)

    def penalty(log_pi: Tensor) -> Tensor:
        return kl_per_token(log_pi, log_ref, estimator=estimator, old_logprobs=log_old, ratio_weighted=bool(weighted))

    by_token = torch.stack([_gradient(lambda log_pi, t=t: penalty(log_pi)[t], theta) for t in range(VOCABULARY)])
    probability = log_old.exp()
    mean = probability @ by_token
    noise = (probability * (by_token - mean).square().sum(-1)).sum().sqrt()
    return mean, float(noise)


# --- the scan ---


@dataclass(frozen=True)
class Settings:
    """The KL in the loss of one run of the scan; `estimator` none is a run without a KL."""

    estimator: str
    beta: float

    def config(self, base: GRPOConfig) -> GRPOConfig:
        if self.estimator == "none":
            return base.model_copy(update={"algo": base.algo.model_copy(update={"kl_coef": 0.0})})
        algo = base.algo.model_copy(update={"kl_estimator": self.estimator, "kl_coef": self.beta})
        return base.model_copy(update={"algo": algo})


def all_settings(betas: Sequence[float]) -> list[Settings]:
    return [Settings("none", 0.0), *(Settings(name, beta) for name in KL_ESTIMATORS for beta in betas)]


def study_config(data: Path, *, steps: int, prompts: int, seed: int) -> GRPOConfig:
    """The quickstart with a quarter of its rollouts, at a constant rate, so that the end of a run is no quieter.

    Two minibatches, so that the second is off-policy by an update, as in any run with more than one.
    """
    overrides = [
        f"run.steps={steps}", f"run.seed={seed}", f"model.path={data}/model", f"data.train={data}/train.jsonl",
        "data.eval=null", "evaluation.every=null", f"rollout.prompts_per_step={prompts}", "algo.kl_coef=1.0",
        "algo.log_kl=true", "learner.minibatches_per_epoch=2", "learner.schedule.name=constant",
        "learner.schedule.min_lr=0.0", "cluster.threads_per_learner=1",
    ]  # fmt: skip
    return load_config(GRPOConfig, ["configs/quickstart.yaml"], overrides)


class Stack:
    """Engine, learner, reference and scorer for all runs of the scan; the loop reads `config` and `cluster`."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model)
        self.prompts: LoadedPrompts = load_prompts(config.data, "train", self.tokenizer, gold_answer)
        self.version = 0
        self._exit_stack = AsyncExitStack()

    async def __aenter__(self) -> Stack:
        config = self.config
        scorer = Scorer(config.reward)
        self._exit_stack.callback(scorer.close)
        self._start_state = Path(self._exit_stack.enter_context(TemporaryDirectory(prefix="rlhf-study-")))
        self.cluster = await self._exit_stack.enter_async_context(Cluster(config))
        self.sampler = Sampler(config, self.cluster, scorer, self.tokenizer)
        self.canary = Canary(
            next(iter(self.prompts.prompts.values())), dtype=config.model.dtype, max_tokens=config.max_sequence_tokens
        )
        await self.canary.measure_noise(self.cluster)
        await self.canary.check_start(self.cluster, self.version)
        await self.cluster.checkpoints.save(self._start_state)
        await self.cluster.checkpoints.saved()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._exit_stack.__aexit__(*failure)

    async def begin(self, settings: Settings) -> PromptStream:
        """Put everything back to the start and take up these settings; the prompts of a run."""
        self.config = settings.config(self.config)
        await self.cluster.load(self._start_state)
        await self.cluster.learners.call("change_config", self.config)
        await self.send_weights()
        return PromptStream(self.prompts.prompts, seed=self.config.run.seed)

    async def send_weights(self) -> None:
        self.version += 1
        await self.cluster.send_weights(self.version)
        await self.canary.check(self.cluster, self.version)


async def run_once(stack: Stack, settings: Settings) -> list[report.Row]:
    """One run of the scan: one row per training step."""
    stream = await stack.begin(settings)
    rows = []
    for step in range(stack.config.run.steps):
        prompts = stream.take(stack.config.rollout.prompts_per_step)
        groups = await asyncio.gather(*(stack.sampler.for_training(prompt) for prompt in prompts))
        rows.append({"estimator": settings.estimator, "beta": settings.beta, "step": step + 1})
        rows[-1] |= await train_step(stack, groups, step)
        await stack.send_weights()
    return rows


async def train_step(stack: Stack, groups: Sequence[RolloutGroup], step: int) -> report.Row:
    """The step of `rlhf.grpo`, and what the study looks at: measured on the fresh rollouts, before the update."""
    config, learners = stack.config, stack.cluster.learners
    batch = make_batch(groups, mask_truncated=False)
    advantages = step_advantages(batch, batch.rewards, config.algo.advantage)
    await learners.start_step(batch, plan_epochs(batch, config, step=step))
    old, ref = await learners.compute("logprobs")
    assert old is not None
    assert ref is not None
    updates = await learners.update(PolicyTargets(broadcast_to_tokens(batch, advantages), old, ref))
    learned = mean_over_updates(updates)
    return {
        "kl": measured_kl(batch, old, ref),
        "reward": float(np.nanmean(batch.rewards)),
        "length": float(batch.tokens.response_mask.sum() / len(batch.rewards)),
        "entropy": learned["policy/entropy"].value(),
        "gradient_norm": learned["learner/grad_norm"].value(),
        "skipped": int(learned["learner/updates_skipped"].value()),
    }


def measured_kl(batch: StepBatch, old: np.ndarray, ref: np.ndarray) -> float:
    """k3 of the policy that sampled against the reference, nats per token of the trained responses."""
    mask = batch.tokens.response_mask & np.repeat(batch.trained, batch.tokens.lengths)
    logprobs, ref_logprobs = (torch.from_numpy(column[mask]).double() for column in (old, ref))
    return float(kl_per_token(logprobs, ref_logprobs, estimator="k3").mean())


async def scan(config: GRPOConfig, betas: Sequence[float]) -> list[report.Row]:
    rows = []
    async with Stack(config) as stack:
        for settings in all_settings(betas):
            began = time.monotonic()
            steps = await run_once(stack, settings)
            rows += steps
            print(
                f"{settings.estimator} beta {settings.beta:g}: KL {steps[-1]['kl']:.4f}, reward "
                f"{steps[-1]['reward']:.3f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return rows


# --- table and picture ---


def by_run(rows: Sequence[report.Row]) -> dict[tuple[str, float], list[report.Row]]:
    runs: dict[tuple[str, float], list[report.Row]] = {}
    for row in rows:
        runs.setdefault((row["estimator"], row["beta"]), []).append(row)
    return runs


def summarize(rows: Sequence[report.Row]) -> list[report.Row]:
    """One row per run, over the second half of its steps; the median, because single steps are outliers."""
    summary = []
    for (estimator, beta), steps in by_run(rows).items():
        late = steps[len(steps) // 2 :]
        summary.append(
            {
                "estimator": estimator,
                "beta": beta,
                "KL, median (nats a token)": float(np.median([step["kl"] for step in late])),
                "KL, largest": max(step["kl"] for step in late),
                "reward, mean": round(report.mean(step["reward"] for step in late), 3),
                "length, mean": round(report.mean(step["length"] for step in late), 1),
                "entropy, mean": report.mean(step["entropy"] for step in late),
                "updates skipped": steps[-1]["skipped"],
            }
        )
    return summary


def draw(rows: Sequence[report.Row], path: Path) -> None:
    """A column for each beta, a line for each estimator; the grey line is the run without a KL."""
    runs = by_run(rows)
    betas = sorted({beta for estimator, beta in runs if estimator != "none"})
    panels = {"kl": "KL to the reference (k3)\nnats a token", "reward": "reward", "length": "response length, tokens"}
    drawn, axes = report.figure(3, len(betas), width=9.5, height=6.6, sharex=True, sharey="row")
    for column, beta in enumerate(betas):
        for (key, label), panel in zip(panels.items(), axes[:, column], strict=True):
            for (estimator, of), steps in runs.items():
                if estimator == "none" or of == beta:
                    name = "no KL" if estimator == "none" else estimator
                    line = "--" if estimator == "none" else "-"
                    values = [max(step[key], 1e-6) if key == "kl" else step[key] for step in steps]
                    panel.plot([s["step"] for s in steps], values, line, color=COLOURS[estimator], label=name, lw=1.2)
            if column == 0:
                panel.set_ylabel(label)
        axes[0, column].set(title=f"beta = {beta:g}", yscale="log")
        axes[-1, column].set_xlabel("training step")
    axes[0, 0].set_ylim(1e-4, 2 * max(row["kl"] for row in rows))  # a step at KL 0 has no place on a log axis
    axes[0, 0].legend(ncols=2, loc="lower right")
    report.save(drawn, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("kl", "Four KL estimators in the loss, three coefficients each.", trains=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--prompts", type=int, default=16, help="a training step, 8 samples each")
    parser.add_argument("--betas", default=",".join(map(str, BETAS)))
    options = report.parse(parser, arguments)
    began = time.monotonic()
    gradients = enumerated_gradients()
    report.write_table(options.output / "kl-gradients", gradients)
    data = report.ensure_data(options.data)
    config = study_config(data, steps=options.steps, prompts=options.prompts, seed=options.seed)
    rows = asyncio.run(scan(config, [float(beta) for beta in options.betas.split(",")]))
    report.write_table(options.output / "kl-steps", rows)
    summary = summarize(rows)
    report.write_table(options.output / "kl", summary)
    print(report.markdown(gradients), report.markdown(summary), sep="\n")
    draw(rows, options.output / "kl.png")
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
