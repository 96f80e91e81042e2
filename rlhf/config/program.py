"""Contradictions between keys that the configs of all training programs have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import ValidationInfo, model_validator

from rlhf.config.base import Section
from rlhf.config.sections import TrainedConfig


class ProgramConfig(Section):
    """The whole config of a program; one message names all its contradictions."""

    def contradictions(self) -> Iterator[str]:
        """A sentence for each: the keys, their values, and what to change."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> Self:
        problems = list(self.contradictions())
        if info.context is not None:  # load_config reports them with the other problems of the files
            info.context["contradictions"].extend(problems)
        elif problems:
            raise ValueError("\n".join(problems))
        return self


def training_problems(key: str, trained: TrainedConfig, *, dtype: str) -> Iterator[str]:
    """Contradictions within the section of one trained model; `key` is the name of the section."""
    schedule, lr = trained.schedule, trained.optimizer.lr
    if schedule.warmup_steps and schedule.warmup_fraction:
        yield (
            f"{key}.schedule.warmup_steps={schedule.warmup_steps} and {key}.schedule.warmup_fraction="
            f"{schedule.warmup_fraction}: both set the warm-up. Set one of them."
        )
    if schedule.min_lr > lr:
        yield (
            f"{key}.schedule.min_lr={schedule.min_lr}: above {key}.optimizer.lr={lr}. "
            "The minimum must not exceed the peak."
        )
    if trained.offload_optimizer and trained.zero_stage == 0:
        yield f"{key}.offload_optimizer=true with {key}.zero_stage=0: offloading needs stage 1, 2 or 3."
    if trained.zero_stage == 0 and dtype == "bfloat16":
        yield (
            f"{key}.zero_stage=0 with model.dtype=bfloat16: DeepSpeed would accumulate gradients in bfloat16 there. "
            "Use stage 1 or higher, which costs nothing on one learner, or model.dtype=float32."
        )


def warmup_problems(key: str, trained: TrainedConfig, updates: int, counted_as: str) -> Iterator[str]:
    """A problem if the warm-up is not shorter than the run, which has `updates` optimizer steps.

    Args:
        counted_as: the product of keys that gives `updates`.
    """
    warmup = trained.schedule.warmup_steps
    if warmup >= max(1, updates):
        yield (
            f"{key}.schedule.warmup_steps={warmup}: the run has only {updates} optimizer steps ({counted_as}). "
            "Shorten the warm-up (as warmup_fraction it follows the length of the run), or run longer."
        )


def dtype_problems(key: str, dtype: str, device: str) -> Iterator[str]:
    """A problem if the attention for packed rows does not support the dtype on the device."""
    if device == "cuda" and dtype == "float32":
        yield (
            f"{key}=float32 with cluster.device=cuda: flash attention on packed rows takes bfloat16. Set "
            f"{key}=bfloat16 (master weights are float32 anyway), or cluster.device=cpu."
        )
