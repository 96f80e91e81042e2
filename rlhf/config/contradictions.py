"""Contradictions between keys that every trained or loaded model has: policy, critic, reward model."""

from __future__ import annotations

from rlhf.config.sections import TrainedConfig

STEPS_OF_A_RUN = "run.steps x epochs_per_step x minibatches_per_epoch"
STEPS_OF_PAIRS = "run.epochs x pairs / learner.pairs_per_update"


def training_problems(
    key: str, trained: TrainedConfig, *, total_updates: int | None, dtype: str, counted_as: str = STEPS_OF_A_RUN
) -> list[str]:
    """What cannot be trained as one section says.

    Args:
        key: of the section, for messages.
        total_updates: optimizer steps of the module; None where they are not known before the data.
        counted_as: what they are the product of, for messages.
    """
    schedule, problems = trained.schedule, []
    if schedule.warmup_steps and schedule.warmup_fraction:
        problems.append(
            f"{key}.schedule.warmup_steps={schedule.warmup_steps} and {key}.schedule.warmup_fraction="
            f"{schedule.warmup_fraction}: both set the warm-up. Set one of them."
        )
    if total_updates is not None and schedule.warmup_steps >= max(1, total_updates):
        problems.append(
            f"{key}.schedule.warmup_steps={schedule.warmup_steps}: the run has only {total_updates} optimizer "
            f"steps ({counted_as}). Shorten the warm-up (as warmup_fraction it follows the length of the run), or run "
            "longer."
        )
    if schedule.min_lr > trained.optimizer.lr:
        problems.append(
            f"{key}.schedule.min_lr={schedule.min_lr}: above {key}.optimizer.lr={trained.optimizer.lr}. "
            "The minimum must not exceed the peak."
        )
    if trained.offload_optimizer and trained.zero_stage == 0:
        problems.append(f"{key}.offload_optimizer=true with {key}.zero_stage=0: offloading needs stage 1, 2 or 3.")
    if trained.zero_stage == 0 and dtype == "bfloat16":
        problems.append(
            f"{key}.zero_stage=0 with model.dtype=bfloat16: DeepSpeed would accumulate gradients in bfloat16 there. "
            "Use stage 1 or higher, which costs nothing on one learner, or model.dtype=float32."
        )
    return problems


def dtype_problems(key: str, dtype: str, device: str) -> list[str]:
    """Whether a model can compute packed rows in its dtype on a device."""
    if device == "cuda" and dtype == "float32":
        return [
            f"{key}=float32 with cluster.device=cuda: flash attention on packed rows takes bfloat16. Set "
            f"{key}=bfloat16 (master weights are float32 anyway), or cluster.device=cpu."
        ]
    return []
