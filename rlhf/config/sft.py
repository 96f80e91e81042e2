"""The whole config of supervised fine-tuning."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveInt

from rlhf.config.data import TemplateName
from rlhf.config.supervised import SupervisedConfig, SupervisedDataConfig, SupervisedLearnerConfig


class SFTDataConfig(SupervisedDataConfig):
    """Rows with `messages`, or with `prompt` and `completion`, each text or messages."""

    template: TemplateName | None = Field(
        None,
        description="how rows are written: model (the tokenizer's chat template), chatml, qwen-math, tulu, qa, raw; "
        "null: messages as model, texts as raw (prompt, completion and eos, nothing between them)",
    )


class SFTLearnerConfig(SupervisedLearnerConfig):
    sequences_per_update: PositiveInt = Field(64, description="rows of one optimizer step, at most, over all learners")

    @property
    def examples_per_update(self) -> int:
        return self.sequences_per_update


class SFTConfig(SupervisedConfig):
    """Everything that `python -m rlhf.sft` reads."""

    program: ClassVar[str] = "sft"
    hosted_learner: ClassVar[str] = "rlhf.learner.supervised:SFTTrainer"

    data: SFTDataConfig
    learner: SFTLearnerConfig = SFTLearnerConfig()
