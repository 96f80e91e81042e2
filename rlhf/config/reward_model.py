"""A learned reward: how a run uses one (`reward_model`), and the whole config of the program that trains one."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rlhf.config.base import FilePath, Section
from rlhf.config.data import TemplateName
from rlhf.config.model_folder import local_model_folder
from rlhf.config.sections import NonNegativeInt
from rlhf.config.supervised import SupervisedConfig, SupervisedDataConfig, SupervisedLearnerConfig

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


class PairsConfig(SupervisedDataConfig):
    """Rows with `chosen` and `rejected`: messages, or texts with a `prompt`."""

    template: TemplateName = Field(
        "model",
        description="how a conversation is written: model (the tokenizer's chat template), chatml, qwen-math, tulu, "
        "qa, raw (the response right after the prompt); recorded with the model",
    )


class RewardTrainerConfig(SupervisedLearnerConfig):
    pairs_per_update: PositiveInt = Field(64, description="preference pairs of one optimizer step, over all learners")

    @property
    def examples_per_update(self) -> int:
        return self.pairs_per_update


class RewardTrainingConfig(SupervisedConfig):
    """Everything that `python -m rlhf.reward_model` reads."""

    program: ClassVar[str] = "reward_model"
    hosted_learner: ClassVar[str] = "rlhf.learner.reward_trainer:RewardTrainer"
    scalar_learner: ClassVar[bool] = True
    sequences_per_example: ClassVar[int] = 2
    best_metrics: ClassVar[tuple[str, ...]] = ("eval/accuracy", "eval/margin")

    data: PairsConfig
    learner: RewardTrainerConfig = RewardTrainerConfig()
