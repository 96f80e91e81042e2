"""Program: PPO with a critic on Ray, vLLM and DeepSpeed.

    python -m rlhf.ppo --config configs/ppo_quickstart.yaml [section.key=value ...]

A step, all of it in `train_step`: take groups -> plan minibatches of policy and critic, fix denominators -> old and
reference log-probs and values on those microbatches -> rewards a token, GAE -> policy and critic update at the same
time -> new weights into the engines, canary -> metrics.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.config import cli
from rlhf.config.ppo import PPOConfig
from rlhf.plan import check_resources, joins_a_cluster, local_resources, print_plan

if TYPE_CHECKING:
    import numpy as np

    from rlhf.step.batching import Rows
    from rlhf.step.credit import KLController
    from rlhf.run.training_run import TrainingRun
    from rlhf.types import Minibatch, StepMetrics

DESCRIPTION = "Proximal policy optimization (arXiv:1707.06347) with a critic, as in RLHF (arXiv:1909.08593)."


async def train(run: TrainingRun[PPOConfig]) -> None:
    """The run: evaluate, take the steps, evaluate, export."""
    from rlhf.step.credit import make_controller

    config = run.config
    controller = make_controller(config.algo)
    if run.restored is not None:
        controller.load_state_dict(run.state["kl_controller"])
    async with run:
        await run.evaluate(0, due=config.evaluation.at_start and run.first_step == 0)
        for step in range(run.first_step, config.run.steps):
            await train_step(run, step, controller)
            done = step + 1
            last = done == config.run.steps
            every = config.evaluation.every
            await run.evaluate(done, due=config.evaluation.at_end if last else every is not None and done % every == 0)
            await run.checkpoint(done, last=last, more_state={"kl_controller": controller.state_dict()})
        await run.finish()


async def train_step(run: TrainingRun[PPOConfig], step: int, controller: KLController) -> None:
    """One training step: consumes prompts_per_step x samples_per_prompt rollouts, takes updates_per_step updates."""
    from rlhf.step import batching, credit
    from rlhf.run.training_run import logprob_passes

    config, clock, algo = run.config, run.clock, run.config.algo
    clock.start_step()

    with clock.phase("sampling"):
        groups = await run.buffer.take()
    samples = batching.flatten(groups)
    trains = batching.trained_rows(samples, mask_truncated=algo.mask_truncated)
    epochs = batching.plan_epochs(samples, trains, config, step=step)
    critic_epochs = batching.plan_epochs(
        samples, trains, config, step=step,
        epochs=config.critic_epochs_per_step, minibatches=config.critic_minibatches_per_epoch,
    )  # fmt: skip

    with clock.phase("logprobs"):
        (old, ref), values = await asyncio.gather(
            logprob_passes(config, run.cluster.learners, epochs[0]), value_passes(run, critic_epochs[0])
        )
    learns = step >= config.critic.warmup_steps  # the critic learns alone before; a KL of 0 then says nothing
    in_reward = algo.kl_place == "reward" and algo.kl_coef > 0
    kl_coef = controller.coef if in_reward else 0.0
    earned = credit.assign_credit(samples, values, old, ref, kl_coef=kl_coef, algo=algo)
    measured = {**earned.metrics, "policy/kl_coef": controller.coef}
    if old and ref:
        measured["policy/kl_response"] = credit.response_kl(samples, old, ref)
        if in_reward and learns:
            controller.update(measured["policy/kl_response"], len(old))

    with clock.phase("update"):
        at_once = [update_critic(run, critic_epochs, values, earned.returns)]
        if learns:
            at_once.append(update_policy(run, epochs, earned.advantages, old, ref))
        updates = [update for found in await asyncio.gather(*at_once) for update in found]

    run.account(groups, trains)
    await run.move_reference(step + 1)
    with clock.phase("transfer"):
        await run.cluster.send_weights(step + 1)
    with clock.phase("canary"):
        measured |= await run.canary.check(run.cluster, step + 1)
    run.buffer.step_done()
    run.log_step(step + 1, groups, earned.mean_advantages(samples), epochs if learns else [], updates, measured)


async def value_passes(run: TrainingRun[PPOConfig], minibatches: Sequence[Minibatch]) -> dict[int, np.ndarray]:
    """The critic's values of every rollout, from the very microbatches of its first epoch."""
    from rlhf.step import credit

    ranks = range(run.config.cluster.learners)
    work = [([m.microbatches[rank] for m in minibatches],) for rank in ranks]
    return credit.value_rows(minibatches, await run.cluster.critics.call_each("values", work))


async def update_critic(
    run: TrainingRun[PPOConfig], epochs: Sequence[Sequence[Minibatch]], values: Rows, returns: Rows
) -> list[StepMetrics]:
    """Every optimizer step of the critic; the bound of its values is around those before the first."""
    from rlhf.step import batching, credit

    updates: list[StepMetrics] = []
    for minibatches in epochs:
        work = credit.value_minibatches(minibatches, values, returns)
        by_rank = await run.cluster.critics.call_each("update", [(rank,) for rank in work])
        updates += batching.merge_ranks(by_rank)
    return updates


async def update_policy(
    run: TrainingRun[PPOConfig], epochs: Sequence[Sequence[Minibatch]], advantages: Rows, old: Rows, ref: Rows
) -> list[StepMetrics]:
    """Every optimizer step of the policy."""
    from rlhf.step import batching

    updates: list[StepMetrics] = []
    for minibatches in epochs:
        work = batching.learner_minibatches(minibatches, advantages, old, ref)
        by_rank = await run.cluster.learners.call_each("update", [(rank,) for rank in work])
        updates += batching.merge_ranks(by_rank)
    return updates


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.ppo", DESCRIPTION, PPOConfig, argv)
    if arguments.plan:
        print_plan(config)
        return
    if not joins_a_cluster(config):
        check_resources(config, local_resources())
    from rlhf.run.training_run import TrainingRun

    cli.run_async(train(TrainingRun(config, resume=arguments.resume)))


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
