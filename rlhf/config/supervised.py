"""The configs of supervised programs: their shared sections, and the config of supervised fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Self

from pydantic import PositiveInt

from rlhf.config import sections
from rlhf.config.base import key
from rlhf.config.conditions import conflicts
from rlhf.config.data import DatasetConfig, DatasetsConfig, TemplateArguments, TemplateName
from rlhf.config.program import PLAIN_TEXT_CONFLICTS, TrainingProgramConfig, dtype_problems


class SupervisedRunConfig(sections.AnyRunConfig):
    epochs: PositiveInt = key(1, "passes over data.train")
    steps: PositiveInt | None = key(None, "training steps, one optimizer step each; null: run.epochs passes")


class SupervisedDataConfig(DatasetsConfig[DatasetConfig]):
    max_tokens: PositiveInt = key(2048, "longest sequence, tokens; longer rows are left out and counted")


class SupervisedConfig(TrainingProgramConfig):
    """The config of a program that takes one optimizer step per training step, on one minibatch of examples.

    Attributes:
        examples_key: the key of `learner` that holds the rows of data of one optimizer step, over all learners.
        best_metrics: metrics of an evaluation that are better the higher they are.
    """

    examples_key: ClassVar[str]
    best_metrics: ClassVar[tuple[str, ...]] = ()

    run: SupervisedRunConfig
    model: sections.ModelConfig
    data: SupervisedDataConfig
    learner: sections.AnyLearnerConfig
    cluster: sections.LearnersConfig = sections.LearnersConfig()
    evaluation: sections.AnyEvaluationConfig = sections.AnyEvaluationConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    logging: sections.AnyLoggingConfig = sections.AnyLoggingConfig()

    @property
    def examples_per_update(self) -> int:
        examples: int = getattr(self.learner, self.examples_key)
        return examples

    def updates_per_epoch(self, examples: int) -> int:
        return math.ceil(examples / self.examples_per_update)

    def with_steps(self, examples: int) -> Self:
        """A copy with `run.steps` set for this number of training examples. ValueError if `step_problems` finds any."""
        steps = self.run.steps or self.run.epochs * self.updates_per_epoch(examples)
        counted_as = "run.steps" if self.run.steps else f"run.epochs x {examples} examples by minibatches"
        config = self.model_copy(update={"run": self.run.model_copy(update={"steps": steps})})
        for problem in config.step_problems(counted_as):
            raise ValueError(problem)
        return config

    @property
    def steps(self) -> int:
        """Training steps of the run. Before `with_steps` is called, a lower bound."""
        return self.run.steps or self.run.epochs

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_tokens

    @property
    def sequence_keys(self) -> str:
        return f"data.max_tokens={self.data.max_tokens}"

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.scalar_learner and self.model.lora is not None:
            yield "model.lora: a reward model is trained whole, head and all. Remove the key."
        yield from dtype_problems(self, "model.dtype")
        checkpoint, evaluates = self.checkpoint, self.data.eval and self.evaluation.every
        if checkpoint.best is not None and (checkpoint.best not in self.best_metrics or not evaluates):
            use = f"Use {' or '.join(self.best_metrics)}, with data.eval and evaluation.every; or null."
            remedy = use if self.best_metrics else "Set it to null."
            yield f"{checkpoint.best=!s}: no evaluation measures it as a value to maximize. {remedy}"


class SFTDataConfig(SupervisedDataConfig):
    """Rows with `messages`, or with `prompt` and `completion`, each text or messages."""

    template: TemplateName | None = key(None, "as data.template of rlhf.grpo; null: model for messages, raw for texts")
    chat_template_kwargs: TemplateArguments = key({}, "what the chat template is given, {enable_thinking: false}")

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments of the chat template besides the conversation."""
        return {**self.chat_template_kwargs, **self.clock}


class SFTLearnerConfig(sections.AnyLearnerConfig):
    sequences_per_update: PositiveInt = key(64, "rows of one optimizer step, at most, over all learners")


class SFTConfig(SupervisedConfig):
    """Everything that `python -m rlhf.sft` reads."""

    program: ClassVar[str] = "sft"
    hosted_learner: ClassVar[str] = "rlhf.learner.supervised:SFTTrainer"
    examples_key: ClassVar[str] = "sequences_per_update"

    data: SFTDataConfig
    learner: SFTLearnerConfig = SFTLearnerConfig()

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from conflicts(self, PLAIN_TEXT_CONFLICTS)
