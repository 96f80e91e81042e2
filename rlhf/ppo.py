"""Program: PPO with a critic on Ray, vLLM and DeepSpeed.

    python -m rlhf.ppo --config configs/ppo_quickstart.yaml [section.key=value ...]

`train_step` is one training step: take groups -> plan minibatches of policy and critic, fix denominators -> old and
reference log-probs and values on those microbatches -> rewards per token, GAE -> policy and critic update at the same
time -> new weights into the engines, canary -> metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.check.report import print_plan
from rlhf.check.start_checks import start_problems
from rlhf.config import cli
from rlhf.config.ppo import PPOConfig
from rlhf.config.printing import waiting
from rlhf.config.roles import CRITIC, LEARNER

if TYPE_CHECKING:
    from rlhf.algo.kl import KLController
    from rlhf.run.rollout_loop import RolloutLoop
    from rlhf.run.run import Run

DESCRIPTION = "Proximal policy optimization (arXiv:1707.06347) with a critic, as in RLHF (arXiv:1909.08593)."


async def train(run: Run[PPOConfig]) -> None:
    """The run: evaluate, take the steps, evaluate, export."""
    from rlhf.run.rollout_loop import rollout_loop
    from rlhf.step.advantages import make_kl_controller

    controller = make_kl_controller(run.config.algo, run.state.kl_controller.get("coef"))
    async with rollout_loop(run) as loop:
        await loop.evaluate_if_due(run.first_step)
        for step in range(run.first_step, run.config.run.steps):
            async with run.profiled(step + 1):
                await train_step(run, loop, step, controller)
            run.state.kl_controller = {"coef": controller.coef}
            await loop.evaluate_if_due(step + 1)
            await loop.checkpoint_if_due(step + 1)  # SIGTERM ends the run here, saved
            loop.useless_steps.check()  # ends the run after run.max_useless_steps
        await loop.finish()


async def train_step(run: Run[PPOConfig], loop: RolloutLoop[PPOConfig], step: int, controller: KLController) -> None:
    """One training step: all rollouts of the step, epochs_per_step x minibatches_per_epoch optimizer updates."""
    import numpy as np

    from rlhf.run.rollout_log import FinishedStep
    from rlhf.run.useless_steps import skipped_updates_warnings
    from rlhf.step.advantages import assign_credit, mean_over_responses, response_kl
    from rlhf.step.batch import make_batch, non_finite_rollouts
    from rlhf.step.minibatches import plan_epochs
    from rlhf.types import PolicyTargets, ValueTargets

    config, clock, algo = run.config, run.clock, run.config.algo
    learners, critics = run.cluster.learners, run.cluster.critics
    clock.start_step()

    with clock.phase("sampling"):
        groups = await loop.take_groups(step)
    await loop.engines.sleep_if_colocated()  # with placement=colocated; send_weights wakes them
    batch = make_batch(groups, mask_truncated=algo.mask_truncated, policy_loss=algo.policy_loss)
    epochs = plan_epochs(batch, config, step=step)
    critic_epochs = plan_epochs(batch, config, step=step, training=config.critic_training)

    with clock.phase("logprobs"):
        await asyncio.gather(learners.start_step(batch, epochs), critics.start_step(batch, critic_epochs))
        passes = {
            LEARNER: learners.compute(lambda learner: learner.logprobs()),
            CRITIC: critics.compute(lambda critic: critic.values()),
        }
        (old, ref), (values,) = await run.cluster.run_together(passes)
    assert values is not None
    non_finite = non_finite_rollouts(batch, batch.trained_rows, old_logprobs=old, ref_logprobs=ref, values=values)
    if non_finite:  # the updates are skipped, but logged values must be finite
        values = np.zeros_like(values)
    policy_learns = step >= config.critic.warmup_steps  # only the critic learns before; a KL of 0 then says nothing
    kl_coef = controller.coef if config.kl_in_reward and not non_finite else 0.0
    credit = assign_credit(batch, values, old, ref, kl_coef=kl_coef, algo=algo)
    extra_metrics = {**credit.metrics, "policy/kl_coef": controller.coef}
    if old is not None and ref is not None and batch.trained.any() and not non_finite:
        extra_metrics["policy/kl_response"] = response_kl(batch, old, ref)
        if config.kl_in_reward and policy_learns:
            controller.update(extra_metrics["policy/kl_response"], int(batch.trained.sum()))

    with clock.phase("update"):
        targets = PolicyTargets(credit.advantages, old, ref)
        returns = ValueTargets(values, credit.returns)
        # one NaN would reach every weight
        changes = {CRITIC: critics.skip_updates() if non_finite else critics.update(returns)}
        if policy_learns:
            changes[LEARNER] = learners.skip_updates() if non_finite else loop.engines.update_learners(targets)
        updates = [update for of_module in await run.cluster.run_together(changes) for update in of_module]
    advantages = mean_over_responses(batch, credit.advantages)
    run.log.warn(*skipped_updates_warnings(step + 1, updates, non_finite))

    loop.count(groups, batch)
    await loop.update_reference(step + 1)
    extra_metrics |= await loop.publish(step + 1)
    loop.buffer.begin_next_step()
    taken = epochs if policy_learns else []
    done = FinishedStep(step + 1, groups, batch, advantages, targets, taken, updates, extra_metrics)
    loop.write_step(done, *await loop.step_metrics(done))
    loop.judge_step(done)  # may end the run after this step


def start(config: PPOConfig, flags: argparse.Namespace) -> None:
    """Run the training of a checked config; `flags` as for `train_with_restarts`."""
    with waiting("starting: importing torch and Ray"):
        from rlhf.run.folder import with_date
        from rlhf.run.restarts import train_with_restarts

    train_with_restarts(with_date(config), flags, train)


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.ppo", DESCRIPTION, PPOConfig, argv, check=start_problems)
    if not print_plan(config, arguments):
        start(config, arguments)


if __name__ == "__main__":
    from rlhf.run.supervisor import supervise

    sys.exit(supervise(main))
