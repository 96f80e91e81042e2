"""A learned reward: how a run uses one (`reward_model`), and the whole config of the program that trains one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rlhf.config.base import FilePath, Section
from rlhf.config.data import TemplateName
from rlhf.config.model_folder import local_model_folder
from rlhf.config.program import ProgramConfig, dtype_problems, training_problems
from rlhf.config.sections import LearnersConfig, ModelConfig, NonNegativeInt, TrainedConfig

RECORD_FILE = "reward_normalization.json"  # of a trained model: {"mean", "std"} of its scores, and its "template"


def reward_model_record(path: str) -> dict[str, Any]:
    """What was recorded with a reward model, in its folder or in the hub's cache; empty if nothing was."""
    file = local_model_folder(path) / RECORD_FILE
    record: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return record


class RewardModelConfig(Section):
    """A reward model whose normalized score, times its weight, is added to the reward of every response."""

    path: FilePath | None = Field(None, description="sequence-classification model with one label; null: an endpoint")
    endpoint: str | None = Field(
        None, description='URL that takes {"conversations": [[{role, content}]]} and returns {"scores": [number]}'
    )
    weight: float = Field(1.0, description="factor in the sum with the parts of `reward`")
    mean: float | None = Field(None, description="subtracted from scores; null: as recorded with the model, else 0")
    std: PositiveFloat | None = Field(None, description="then divides scores; null: as recorded with the model, else 1")
    reference_samples: int | None = Field(
        None,
        ge=2,
        description="responses of the start policy, sampled before the first step, over which scores get mean 0 and "
        "variance 1; null: mean and std as above",
    )
    template: TemplateName | None = Field(
        None,
        description="how a prompt and its response are written for it, as data.template; null: as recorded with the "
        "model, else model",
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="type of its weights")
    replicas: PositiveInt = Field(1, description="copies of the model, a GPU each; or concurrent requests")
    max_tokens_per_batch: PositiveInt = Field(16384, description="tokens in one forward pass of one copy")
    timeout_s: PositiveFloat = Field(60.0, description="seconds that one request to the endpoint may take")
    retries: NonNegativeInt = Field(5, description="further tries of a failed request; the wait doubles each time")

    @model_validator(mode="after")
    def _one_source(self) -> RewardModelConfig:
        if (self.path is None) == (self.endpoint is None):
            raise ValueError(
                f"reward_model.path={self.path} and reward_model.endpoint={self.endpoint}: set exactly one of them."
            )
        if self.reference_samples is not None and (self.mean is not None or self.std is not None):
            raise ValueError(
                f"reward_model.reference_samples={self.reference_samples} with reward_model.mean={self.mean} and "
                f"reward_model.std={self.std}: the samples set both. Remove the key, or mean and std."
            )
        if self.template is not None and self.endpoint is not None:
            raise ValueError(
                f"reward_model.template={self.template} with reward_model.endpoint={self.endpoint}: an endpoint gets "
                "messages, and writes them itself. Remove one of them."
            )
        return self


class PairsConfig(Section):
    train: FilePath = Field(
        min_length=1,
        description="pairs, a file or a hub name; columns chosen and rejected: messages, or texts with a prompt",
    )
    eval: FilePath | None = Field(None, min_length=1, description="held-out pairs of the same form; null: none")
    template: TemplateName = Field(
        "model",
        description="how a conversation is written: model (the tokenizer's chat template), chatml, qwen-math, tulu, "
        "qa, raw (the response right after the prompt); recorded with the model",
    )
    max_tokens: PositiveInt = Field(
        2048, description="longest conversation, tokens; pairs with a longer one are left out and counted"
    )


class RewardTrainingRunConfig(Section):
    dir: FilePath = Field(description="folder that the model, its normalization and metrics.jsonl are written to")
    epochs: PositiveInt = Field(1, description="passes over the pairs; one is usual, more tend to overfit")
    seed: int = Field(0, ge=0, description="seeds the order of pairs and the head")


class RewardTrainerConfig(TrainedConfig):
    pairs_per_update: PositiveInt = Field(64, description="preference pairs of one optimizer step, over all learners")
    max_tokens_per_microbatch: PositiveInt = Field(16384, description="tokens in one forward and backward pass")


class RewardTrainingConfig(ProgramConfig):
    """Everything that `python -m rlhf.reward_model` reads."""

    run: RewardTrainingRunConfig
    model: ModelConfig
    data: PairsConfig
    learner: RewardTrainerConfig = RewardTrainerConfig()
    cluster: LearnersConfig = LearnersConfig()

    def contradictions(self) -> Iterator[str]:
        yield from training_problems("learner", self.learner, dtype=self.model.dtype)
        yield from dtype_problems("model.dtype", self.model.dtype, self.cluster.device)
        if self.learner.max_tokens_per_microbatch < 2 * self.data.max_tokens:
            yield (
                f"learner.max_tokens_per_microbatch={self.learner.max_tokens_per_microbatch}: a pair may have 2 x "
                f"data.max_tokens = {2 * self.data.max_tokens} tokens and is never split. Raise one or lower the other."
            )
