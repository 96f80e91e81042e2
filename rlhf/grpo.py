"""Program: GRPO on Ray, vLLM and DeepSpeed.

    python -m rlhf.grpo --config configs/math.yaml [--config configs/cpu.yaml] [section.key=value ...]

`train_step` is one training step, in the order in which it happens:

    take     graded groups: a prompt, its responses and their rewards
    update   one flat batch -> advantages -> minibatches -> old and reference log-probs -> update, if all are finite
    publish  new weights to the engines -> canary (do the engines hold them?) -> metrics

With the KL in the reward, advantages need the log-probs and are computed after them, as those of a teacher are. A
rollout whose advantage is 0 has no gradient if the loss has no KL, entropy bonus or balancing loss: then, unless
algo.log_kl or a teacher asks for its log-probs, it gets no forward and no backward pass.

The docstring of each package (its `__init__.py`) says where to add to it. The keys of the YAML and the values that they
accept are in `config/sections.py`, contradictions between keys in `config/contradictions.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf.check.report import print_plan
from rlhf.check.start_checks import start_problems
from rlhf.config import cli
from rlhf.config.grpo import GRPOConfig
from rlhf.config.printing import waiting

if TYPE_CHECKING:
    from rlhf.run.rollout_log import FinishedStep
    from rlhf.run.rollout_loop import RolloutLoop
    from rlhf.run.run import Run
    from rlhf.types import RolloutGroup

DESCRIPTION = "Group-relative policy optimization (DeepSeekMath, arXiv:2402.03300) with verifiable rewards."


async def train(run: Run[GRPOConfig]) -> None:
    """The run: evaluate, take the steps, evaluate, export."""
    from rlhf.run.rollout_loop import rollout_loop

    async with rollout_loop(run) as loop:
        await loop.evaluate_if_due(run.first_step)
        for step in range(run.first_step, run.config.run.steps):
            async with run.profiled(step + 1):
                await train_step(run, loop, step)
            await loop.evaluate_if_due(step + 1)
            await loop.checkpoint_if_due(step + 1)  # SIGTERM ends the run here, saved
            loop.useless_steps.check()  # ends the run after run.max_useless_steps
        await loop.finish()


async def train_step(run: Run[GRPOConfig], loop: RolloutLoop[GRPOConfig], step: int) -> None:
    """One training step: all rollouts of the step, epochs_per_step x minibatches_per_epoch optimizer updates."""
    run.clock.start_step()
    with run.clock.phase("sampling"):
        groups = await loop.take_groups(step)
    done = await update(run, loop, groups, step)
    await publish(loop, done)


async def update(
    run: Run[GRPOConfig],
    loop: RolloutLoop[GRPOConfig],
    groups: Sequence[RolloutGroup],
    step: int,
    *,
    advantage: Callable[..., Any] | None = None,
) -> FinishedStep:
    """Train on the graded groups of a step. The engines still have the weights from before.

    `advantage`: a function that computes advantages in place of algo.advantage.
    """
    # imported here, so that --help and --plan need neither torch nor ray
    import numpy as np

    from rlhf.run.rollout_log import FinishedStep
    from rlhf.run.useless_steps import skipped_updates_warnings
    from rlhf.step.advantages import add_teacher_advantages, mean_over_responses, penalize_kl, step_advantages
    from rlhf.step.batch import broadcast_to_tokens, make_batch, non_finite_rollouts
    from rlhf.step.minibatches import plan_epochs, rows_with_gradient
    from rlhf.types import PolicyTargets

    config, algo, clock, learners = run.config, run.config.algo, run.clock, run.cluster.learners
    kind = advantage or algo.advantage
    own_metrics: dict[str, float] = {}  # of an advantage of the user
    await loop.engines.sleep_if_colocated()  # with placement=colocated; send_weights wakes them
    batch = make_batch(
        groups, mask_truncated=algo.mask_truncated, needs_reward=config.learns_from_rewards,
        policy_loss=algo.policy_loss,
    )  # fmt: skip

    rows_to_compute = batch.trained_rows
    if not config.kl_in_reward:
        advantages = step_advantages(batch, batch.rewards, kind, algo.normalize_over, own_metrics)
        rows_to_compute = rows_with_gradient(batch, advantages, config)
    epochs = plan_epochs(batch, config, step=step, rows_to_compute=rows_to_compute)

    with clock.phase("logprobs"):
        taught = await loop.teachers.logprobs(groups, batch, rows_to_compute, learners, step=step)  # None: no teachers
        await learners.start_step(batch, epochs)
        old, ref = await learners.compute(lambda learner: learner.logprobs())  # each None if the config does not use it
    of_teachers = None if taught is None else taught.logprobs
    non_finite = non_finite_rollouts(
        batch, rows_to_compute, old_logprobs=old, ref_logprobs=ref, teacher_logprobs=of_teachers
    )
    if config.kl_in_reward:  # rewards of rollouts without log-probs become NaN, which the baseline leaves out
        rewards = penalize_kl(batch, rows_to_compute, old, ref, algo)
        advantages = step_advantages(batch, rewards, kind, algo.normalize_over, own_metrics)

    if not config.learns_from_rewards:  # `add_teacher_advantages` adds what a teacher says outside of the loss
        advantages = np.zeros_like(advantages)
    token_advantages = broadcast_to_tokens(batch, advantages)
    teacher_metrics: dict[str, float] = {}
    if taught is not None and not non_finite:
        assert algo.teacher is not None
        assert old is not None, "a teacher's advantage is against it"
        token_advantages, teacher_metrics = add_teacher_advantages(batch, token_advantages, old, *taught, algo.teacher)
        advantages = mean_over_responses(batch, token_advantages)

    with clock.phase("update"):
        targets = PolicyTargets(token_advantages, old, ref)
        # one NaN would reach every weight
        updates = await (learners.skip_updates() if non_finite else loop.engines.update_learners(targets))
    run.log.warn(*skipped_updates_warnings(step + 1, updates, non_finite))

    loop.count(groups, batch)
    await loop.update_reference(step + 1)
    skipped_rollouts = set(batch.rollouts[batch.trained_rows & ~rows_to_compute].tolist())
    extra_metrics = {"learner/skipped_rollouts": len(skipped_rollouts), **teacher_metrics, **own_metrics}
    return FinishedStep(step + 1, groups, batch, advantages, targets, epochs, updates, extra_metrics)


async def publish(loop: RolloutLoop[GRPOConfig], done: FinishedStep) -> dict[str, Any]:
    """Send the new weights to the engines, and begin the next step. Returns the metrics of this one, also logged."""
    canary = await loop.publish(done.step)  # raises if an engine does not hold the new weights
    loop.buffer.begin_next_step()  # more groups may start, within rollout.max_policy_lag
    done = replace(done, extra_metrics={**done.extra_metrics, **canary})
    logged = loop.write_step(done, *await loop.step_metrics(done))
    loop.judge_step(done)  # may end the run after this step
    return logged


def start(config: GRPOConfig, flags: argparse.Namespace) -> None:
    """Run the training of a checked config; `flags` as for `train_with_restarts`."""
    with waiting("starting: importing torch and Ray"):
        from rlhf.run.folder import with_date
        from rlhf.run.restarts import train_with_restarts

    train_with_restarts(with_date(config), flags, train)


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.grpo", DESCRIPTION, GRPOConfig, argv, check=start_problems)
    if not print_plan(config, arguments):
        start(config, arguments)


if __name__ == "__main__":
    from rlhf.run.supervisor import supervise

    sys.exit(supervise(main))
