"""Study: what each KL estimator does to the KL, in the loss and in the reward.

    python -m benchmarks.studies.kl --output runs/studies/kl [--workers 2] [--seeds 0,1,2] [--quick]

Runs of 40 steps of the quickstart's task with and without a KL (`kl_runs.py` lists them): in the loss by estimator,
aggregation, minibatches per step, coefficient, lag and rate, in the reward by estimator, coefficient and advantage.
Each run ends as one file below `--output`; what is there is not run again, nor what `--known FILE`, the JSON of a
picture, has. So the scan can be stopped at any time. `--workers 0` only makes tables and picture.

A run trains in one process (`in_process.py`): the policy that samples is the policy that learns, or in runs with a lag
that of one training step before.

The reported KL is always k3 at the tokens that a policy has just sampled, of that same policy, where it has no bias. At
the end the last policy answers held-out problems. A second table has the bias and variance of each estimator's gradient
(`kl_gradients.py`), a third what the gradient of whole responses becomes by aggregation (`kl_responses.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.studies import in_process, kl_report, report
from benchmarks.studies.kl_runs import SEEDS, all_runs
from rlhf.algo.kl import kl_per_token
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.log.reductions import mean_over_updates
from rlhf.step.advantages import penalize_kl, step_advantages
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import PolicyTargets, RolloutGroup, StepBatch

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


class Trainer(in_process.Trainer):
    """Steps with a reference, of which the KL is logged.

    A study of what the engine samples from replaces `publish` and `compare`.
    """

    def compare(self, batch: StepBatch, old: np.ndarray | None) -> report.Row:
        """What is logged of the difference between what samples and the learner; here there must be none."""
        if old is not None and not self.config.rollout.max_policy_lag:
            check_sampled_from(batch, old)
        return {}

    def after_step(self, run: Any, step: int) -> report.Row:
        """At the end of a run, what is measured of one response of the last policy to each held-out problem."""
        if step + 1 < self.config.run.steps or not self.held_out:
            return {}
        self.publish_newest(run)
        batch, _, ref = self.forward(self.sample(self.held_out, 1), step=self.config.run.steps)
        measured = statistics(batch, batch.tokens.rollout_logprobs, ref)
        return {f"held-out {name}": measured[name] for name in ("k3", "reward", "length")}

    def forward(self, groups: Sequence[RolloutGroup], step: int) -> tuple[StepBatch, np.ndarray | None, np.ndarray]:
        """The batch, and what the learner computes of it: old log-probs [N], if it needs them, and the reference's."""
        batch = make_batch(groups, mask_truncated=False)
        epochs = plan_epochs(batch, self.config, step=step)
        self.learner.start_step(batch.tokens, epochs)
        computed = [batch.tokens.token_indices(rows) for minibatch in epochs[0] for rows in minibatch.microbatches[0]]
        index = np.concatenate(computed)
        old, ref = self.learner.logprobs()
        assert ref is not None
        column = None if old is None else in_process.column_of(batch, index, old)
        return batch, column, in_process.column_of(batch, index, ref)

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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("kl", "KL estimators in the loss and in the reward.", trains=True, scans=True, seeds=SEEDS)
    parser.add_argument("--known", type=Path, help="JSON of a picture whose runs are not made again")
    options = report.parse(parser, arguments)
    size, held_out = {"steps": STEPS, "prompts": PROMPTS}, HELD_OUT
    if options.quick:
        options.seeds, size, held_out = options.seeds[:1], {"steps": QUICK_STEPS, "prompts": QUICK_PROMPTS}, 8
    rows = kl_report.known_rows(options.known) if options.known else []
    known, folder = {kl_report.run_of(row) for row in rows}, options.output / "runs"
    runs = [run for run in all_runs(options.seeds) if run not in known]
    config = study_config(report.ensure_data(options.data), **size, held_out=held_out)
    in_process.scan(config, runs, folder, workers=options.workers, kind=Trainer)
    rows += map(kl_report.summarize, in_process.read(config, runs, folder))
    kl_report.write(rows, options.output, seeds=options.seeds)


if __name__ == "__main__":
    main()
