"""Program: GRPO on Ray, vLLM and DeepSpeed.

    python -m rlhf.grpo --config configs/math.yaml [--config configs/cpu.yaml] [section.key=value ...]

`train_step` is one training step, in the order in which it happens:

    take graded groups -> flat batch -> minibatches and their denominators -> the learners' old and reference log-probs,
    where the config needs them -> advantages -> update -> new weights into the engines, canary -> metrics

Unless the KL is in the reward, the advantages come before the log-probs. If the loss is then also free of a KL and an
entropy bonus, and algo.log_kl is off, rollouts whose advantage is 0 are not computed.
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

DESCRIPTION = "Group-relative policy optimization (DeepSeekMath, arXiv:2402.03300) with verifiable rewards."


async def train(run: TrainingRun) -> None:
    """The run: evaluate, take the steps, evaluate, export."""
    async with run:
        await run.evaluate_if_due(0)
        for step in range(run.first_step, run.config.run.steps):
            await train_step(run, step)
            await run.evaluate_if_due(step + 1)
            await run.checkpoint_if_due(step + 1)
        await run.finish()


async def train_step(run: TrainingRun, step: int) -> None:
    """One training step: consumes prompts_per_step x samples_per_prompt rollouts, takes updates_per_step updates."""
    # imported here, so that --help and --plan need neither torch nor ray
    from rlhf.step.advantages import penalize_kl, step_advantages
    from rlhf.step.batch import at_every_token, make_batch
    from rlhf.step.minibatches import plan_epochs, rows_with_gradient
    from rlhf.types import PolicyTargets

    config, algo, clock, learners = run.config, run.config.algo, run.clock, run.cluster.learners
    clock.start_step()

    with clock.phase("sampling"):
        groups = await run.buffer.take()
    await run.cluster.yield_gpus()  # engines on the learners' GPUs sleep until send_weights wakes them
    batch = make_batch(groups, mask_truncated=algo.mask_truncated)

    rows_to_compute = batch.trained
    if not config.kl_in_reward:
        advantages = step_advantages(batch, batch.rewards, algo.advantage)
        rows_to_compute = rows_with_gradient(batch, advantages, config)
    epochs = plan_epochs(batch, config, step=step, rows_to_compute=rows_to_compute)

    with clock.phase("logprobs"):
        await learners.start_step(batch, epochs)
        old, ref = await learners.columns("logprobs")  # each None where nothing reads it
    if config.kl_in_reward:  # rows that were not computed become NaN here, and so leave the baseline
        rewards = penalize_kl(batch, rows_to_compute, old, ref, algo)
        advantages = step_advantages(batch, rewards, algo.advantage)

    with clock.phase("update"):
        updates = await learners.update(PolicyTargets(at_every_token(batch, advantages), old, ref))

    run.count_rollouts(batch)
    await run.move_reference(step + 1)
    with clock.phase("transfer"):
        await run.cluster.send_weights(step + 1)
    with clock.phase("canary"):
        canary = await run.canary.check(run.cluster, step + 1)  # raises where an engine does not hold the weights
    run.buffer.begin_next_step()  # its groups are sampled with the new weights
    measured = {"learner/skipped_rollouts": int((batch.trained & ~rows_to_compute).sum()), **canary}
    run.log_step(step + 1, groups, batch, advantages, epochs, updates, measured)


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
