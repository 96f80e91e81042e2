"""What the configs of `rlhf.sft` and `rlhf.reward_model` have in common: both learn from fixed examples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveInt

from rlhf.config.data import DatasetConfig, DatasetsConfig
from rlhf.config.program import TrainingProgramConfig, dtype_problems, training_problems, warmup_problems
from rlhf.config.sections import (
    AnyEvaluationConfig,
    AnyLoggingConfig,
    AnyRunConfig,
    CheckpointConfig,
    LearnersConfig,
    ModelConfig,
    TrainedConfig,
)


class SupervisedRunConfig(AnyRunConfig):
    epochs: PositiveInt = Field(1, description="passes over data.train")
    steps: PositiveInt | None = Field(
        None, description="training steps, one optimizer step each; null: as many as run.epochs take"
    )


class SupervisedDataConfig(DatasetsConfig[DatasetConfig]):
    max_tokens: PositiveInt = Field(
        2048, description="longest sequence, tokens; rows with a longer one are left out and counted"
    )
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail", description="a row that cannot be used ends the program before it starts, or is left out and counted"
    )


class SupervisedLearnerConfig(TrainedConfig):
    max_tokens_per_microbatch: PositiveInt = Field(
        16384,
        description="tokens in one forward and backward pass of a learner; changes memory and speed, never the result",
    )

    @property
    def examples_per_update(self) -> int:
        """Rows of data of one optimizer step, over all learners."""
        raise NotImplementedError


class SupervisedConfig(TrainingProgramConfig):
    """The config of a program that takes one optimizer step per training step, on a minibatch of its examples.

    Attributes:
        sequences_per_example: the adjacent sequences that a row of data becomes.
        best_metrics: of an evaluation, those whose highest value is the best.
    """

    sequences_per_example: ClassVar[int] = 1
    best_metrics: ClassVar[tuple[str, ...]] = ()

    run: SupervisedRunConfig
    model: ModelConfig
    data: SupervisedDataConfig
    learner: SupervisedLearnerConfig
    cluster: LearnersConfig = LearnersConfig()
    evaluation: AnyEvaluationConfig = AnyEvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: AnyLoggingConfig = AnyLoggingConfig()

    def updates_per_epoch(self, examples: int) -> int:
        return math.ceil(examples / self.learner.examples_per_update)

    def with_steps(self, examples: int) -> Self:
        """This config for so many training examples: `run.steps` is set.

        Raises:
            ValueError: the warm-up is not shorter than the run.
        """
        steps = self.run.steps or self.run.epochs * self.updates_per_epoch(examples)
        counted_as = "run.steps" if self.run.steps else f"run.epochs x {examples} examples by minibatches"
        for problem in warmup_problems("learner", self.learner, steps, counted_as):
            raise ValueError(problem)
        return self.model_copy(update={"run": self.run.model_copy(update={"steps": steps})})

    @property
    def steps(self) -> int:
        """Training steps of the run; at least so many, before `with_steps`."""
        return self.run.steps or self.run.epochs

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_tokens

    @property
    def sequence_keys(self) -> str:
        return f"data.max_tokens={self.data.max_tokens}"

    def contradictions(self) -> Iterator[str]:
        yield from training_problems("learner", self.learner, dtype=self.model.dtype)
        yield from dtype_problems("model.dtype", self.model.dtype, self.cluster.device)
        longest = self.sequences_per_example * self.data.max_tokens
        if self.learner.max_tokens_per_microbatch < longest:
            times = f"{self.sequences_per_example} x " if self.sequences_per_example > 1 else ""
            yield (
                f"learner.max_tokens_per_microbatch={self.learner.max_tokens_per_microbatch}: an example may have "
                f"{times}data.max_tokens = {longest} tokens and is never split. Raise one or lower the other."
            )
        best, evaluates = self.checkpoint.best, self.data.eval and self.evaluation.every
        if best is not None and (best not in self.best_metrics or not evaluates):
            known = ", ".join(self.best_metrics)
            use = f"Use {known}, with data.eval and evaluation.every, or null." if known else "Set it to null."
            yield f"checkpoint.best={best}: no evaluation measures it as a value of which the highest is best. {use}"
