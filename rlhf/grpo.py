"""Program: GRPO on Ray, vLLM and DeepSpeed.

    python -m rlhf.grpo --config configs/math.yaml [--config configs/cpu.yaml] [section.key=value ...]

A step, all of it in `train_step`: take groups -> plan minibatches, fix denominators -> old and reference log-probs on
those microbatches -> KL reward, advantages -> update -> new weights into the engines, canary -> metrics. Without a KL
in the reward the advantages come first, and what cannot have a gradient is not computed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.config import cli
from rlhf.config.run import GRPOConfig
from rlhf.plan import check_resources, joins_a_cluster, local_resources, print_plan

if TYPE_CHECKING:
    from rlhf.run.training_run import TrainingRun
    from rlhf.types import StepMetrics

DESCRIPTION = "Group-relative policy optimization (DeepSeekMath, arXiv:2402.03300) with verifiable rewards."


async def train(run: TrainingRun) -> None:
    """The run: evaluate, take the steps, evaluate, export."""
    config = run.config
    async with run:
        await run.evaluate(0, due=config.evaluation.at_start and run.first_step == 0)
        for step in range(run.first_step, config.run.steps):
            await train_step(run, step)
            done = step + 1
            last = done == config.run.steps
            every = config.evaluation.every
            await run.evaluate(done, due=config.evaluation.at_end if last else every is not None and done % every == 0)
            await run.checkpoint(done, last=last)
        await run.finish()


async def train_step(run: TrainingRun, step: int) -> None:
    """One training step: consumes prompts_per_step x samples_per_prompt rollouts, takes updates_per_step updates."""
    import numpy as np

    from rlhf.step import batching
    from rlhf.run.training_run import logprob_passes

    config, clock, learners = run.config, run.clock, run.cluster.learners
    clock.start_step()

    with clock.phase("sampling"):
        groups = await run.buffer.take()
    await run.cluster.yield_gpus()
    samples = batching.flatten(groups)
    trains = batching.trained_rows(samples, mask_truncated=config.algo.mask_truncated)

    kl_in_reward = config.algo.kl_place == "reward" and config.algo.kl_coef > 0
    works, advantages = trains, np.zeros(len(samples))
    if not kl_in_reward:
        rewards = batching.penalized_rewards(samples, None, 0.0)
        advantages = batching.step_advantages(rewards, groups, config.algo.advantage)
        works = batching.work_rows(trains, advantages, config)
    epochs = batching.plan_epochs(samples, trains, config, step=step, works=works)

    with clock.phase("logprobs"):
        old, ref = await logprob_passes(config, learners, epochs[0])
    if kl_in_reward:
        kl = batching.kl_rewards(old, ref, config.algo.kl_estimator)
        rewards = batching.penalized_rewards(samples, kl, config.algo.kl_coef)
        advantages = batching.step_advantages(rewards, groups, config.algo.advantage)

    with clock.phase("update"):
        updates: list[StepMetrics] = []
        for minibatches in epochs:
            work = batching.learner_minibatches(minibatches, advantages, old, ref)
            by_rank = await learners.call_each("update", [(rank,) for rank in work])
            updates += batching.merge_ranks(by_rank)

    run.account(groups, trains)
    await run.move_reference(step + 1)
    with clock.phase("transfer"):
        await run.cluster.send_weights(step + 1)
    with clock.phase("canary"):
        canary = await run.canary.check(run.cluster, step + 1)
    run.buffer.step_done()
    measured = {"learner/skipped_rollouts": int((trains & ~works).sum()), **canary}
    run.log_step(step + 1, groups, advantages, epochs, updates, measured)


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.grpo", DESCRIPTION, GRPOConfig, argv)
    if arguments.plan:
        print_plan(config)
        return
    if not joins_a_cluster(config):
        check_resources(config, local_resources())
    from rlhf.run.training_run import TrainingRun

    cli.run_async(train(TrainingRun(config, resume=arguments.resume)))


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
