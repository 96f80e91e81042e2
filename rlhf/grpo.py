"""Program: GRPO on Ray, vLLM and DeepSpeed.

    python -m rlhf.grpo --config configs/math.yaml [--config configs/cpu.yaml] [section.key=value ...]

A step, all of it in `train_step`: take groups -> plan minibatches, fix denominators -> old and reference log-probs on
those microbatches -> KL reward, advantages -> update -> new weights into the engines, canary -> metrics.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf import cli
from rlhf.config.run import GRPOConfig
from rlhf.plan import check_resources, joins_a_cluster, local_resources, print_plan

if TYPE_CHECKING:
    from rlhf.run import TrainingRun
    from rlhf.types import Minibatch, StepMetrics

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
    from rlhf import batching

    config, clock, learners = run.config, run.clock, run.cluster.learners
    clock.start_step()

    with clock.phase("sampling"):
        groups = await run.buffer.take()
    await run.cluster.yield_gpus()
    samples = batching.flatten(groups)
    trains = batching.trained_rows(samples, mask_truncated=config.algo.mask_truncated)
    epochs = batching.plan_epochs(samples, trains, config, step=step)

    old, ref, kl = {}, {}, None
    if config.needs_old_logprobs_pass or config.needs_reference:
        with clock.phase("logprobs"):
            old, ref = await logprob_passes(run, epochs[0])
    if config.algo.kl_place == "reward" and config.algo.kl_coef > 0:
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
    run.log_step(step + 1, groups, advantages, epochs, updates, canary)


async def logprob_passes(run: TrainingRun, minibatches: Sequence[Minibatch]):  # type: ignore[no-untyped-def]
    """Old and reference log-probs of every rollout, from the very microbatches of the first epoch."""
    from rlhf import batching

    config = run.config
    ranks = range(config.cluster.learners)
    work = [([m.microbatches[rank] for m in minibatches], config.needs_old_logprobs_pass) for rank in ranks]
    by_rank = await run.cluster.learners.call_each("logprobs", work)
    old = batching.rows_of(minibatches, by_rank, "old") if config.needs_old_logprobs_pass else {}
    ref = batching.rows_of(minibatches, by_rank, "ref") if config.needs_reference else {}
    return old, ref


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.grpo", DESCRIPTION, GRPOConfig, argv)
    if arguments.plan:
        print_plan(config)
        return
    if not joins_a_cluster(config):
        check_resources(config, local_resources())
    from rlhf.run import TrainingRun

    asyncio.run(train(TrainingRun(config, resume=arguments.resume)))


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
