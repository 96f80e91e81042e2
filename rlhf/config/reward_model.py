"""A learned reward: how a run uses one (`reward_model`), and the whole config of the program that trains one."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from rlhf.config.base import FilePath, NonNegativeInt, Section, key
from rlhf.config.conditions import conflicts
from rlhf.config.data import NamedTemplate
from rlhf.config.model_folder import local_model_folder, read_json
from rlhf.config.sections import AnyLearnerConfig, ModelDType
from rlhf.config.supervised import SupervisedConfig, SupervisedDataConfig

RECORD_FILE = "reward_normalization.json"  # of a trained model: {"mean", "std"} of its scores, and its "template"


def reward_model_record(path: str) -> dict[str, Any]:
    """The record of a reward model, in its folder or in the hub's cache. Empty if there is none."""
    return read_json(local_model_folder(path) / RECORD_FILE)


class RewardModelConfig(Section):
    """A reward model whose normalized score, times its weight, is added to the reward of every response."""

    path: FilePath | None = key(None, "sequence-classification model with one label; null: an endpoint", resume="free")
    endpoint: str | None = key(None, 'URL: {"conversations": [[{role, content}]]} -> {"scores": [number]}')
    weight: float = key(1.0, "factor in the sum with the parts of `reward`")
    mean: float | None = key(None, "subtracted from scores; null: as recorded with the model, else 0")
    std: PositiveFloat | None = key(None, "then divides scores; null: as recorded with the model, else 1")
    reference_samples: int | None = key(None, "responses of the start policy that set both; null: as above", ge=2)
    template: NamedTemplate | None = key(None, "of its input, as data.template; null: as recorded, else model")
    dtype: ModelDType = key("bfloat16", "type of its weights")
    replicas: PositiveInt = key(1, "copies of the model, a GPU each; or concurrent requests", resume="free")
    max_tokens_per_batch: PositiveInt = key(16384, "tokens in one forward pass of one copy", resume="rounding")
    timeout_s: PositiveFloat = key(60.0, "seconds that one request to the endpoint may take", resume="free")
    retries: NonNegativeInt = key(5, "further tries of a failed request; the wait doubles each time", resume="free")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = f"reward_model.path={self.path} and reward_model.endpoint={self.endpoint}"
        if (self.path is None) == (self.endpoint is None):
            raise ValueError(f"{given}: set exactly one of them.")
        remedy = "the samples set mean and std. Remove one of them."
        reasons = {"reference_samples and mean!=null": remedy, "reference_samples and std!=null": remedy}
        reasons["template and endpoint"] = "an endpoint writes the messages itself. Remove template."
        for problem in conflicts(self, reasons, "reward_model."):
            raise ValueError(problem)
        return self


class PairsConfig(SupervisedDataConfig):
    """Rows with `chosen` and `rejected`: messages, or texts with a `prompt`."""

    template: NamedTemplate = key("model", "how a conversation is written, and will be for the trained model")


class RewardTrainerConfig(AnyLearnerConfig):
    pairs_per_update: PositiveInt = key(64, "preference pairs of one optimizer step, over all learners")


class RewardTrainingConfig(SupervisedConfig):
    """Everything that `python -m rlhf.reward_model` reads."""

    program: ClassVar[str] = "reward_model"
    hosted_learner: ClassVar[str] = "rlhf.learner.reward_trainer:RewardTrainer"
    scalar_learner: ClassVar[bool] = True
    examples_key: ClassVar[str] = "pairs_per_update"
    sequences_per_example: ClassVar[int] = 2
    best_metrics: ClassVar[tuple[str, ...]] = ("eval/accuracy", "eval/margin")

    data: PairsConfig
    learner: RewardTrainerConfig = RewardTrainerConfig()
