"""The base of the configs of all training programs: their sections, and contradictions between their keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import ValidationInfo, model_validator

from rlhf.config import sections
from rlhf.config.base import Section
from rlhf.config.conditions import conflicts
from rlhf.config.roles import ROLES, Role, Training, engine
from rlhf.config.secrets import hidden, with_references

if TYPE_CHECKING:
    from rlhf.config.data import DatasetsConfig

PLAIN_TEXT_CONFLICTS = {
    "data.chat_template_kwargs and data.template=raw|qa": (
        "plain text takes no arguments. Remove them, or name a chat template."
    )
}
TENSORFLOW_BETA2 = 0.999  # the default of TensorFlow's Adam, and of the work that was done with it
LOW_ADAPTER_RATE = 1e-5  # full training of these models uses 1e-6


class TrainingProgramConfig(Section):
    """The sections that all training programs have, and values derived from them.

    Attributes:
        program: the name of the program, without `rlhf.`.
        hosted_learner: module and class of the learner.
        scalar_learner: its model gives one number per token, not logits.
        sequences_per_example: sequences that one microbatch has to hold together.
    """

    program: ClassVar[str]
    hosted_learner: ClassVar[str]
    scalar_learner: ClassVar[bool] = False
    sequences_per_example: ClassVar[int] = 1

    if TYPE_CHECKING:  # every program declares them, in its own order
        run: sections.AnyRunConfig
        model: sections.ModelConfig
        data: DatasetsConfig[Any]
        learner: sections.AnyLearnerConfig
        evaluation: sections.AnyEvaluationConfig
        checkpoint: sections.CheckpointConfig
        logging: sections.AnyLoggingConfig
        cluster: sections.LearnersConfig

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in values that follow from others, before validation."""
        return values

    @property
    def row_tokens(self) -> int:
        """Tokens that a microbatch can hold: those of one learner, times the learners that share a sequence."""
        return self.learner.max_tokens_per_microbatch * self.cluster.sequence_parallel

    @property
    def row_limit(self) -> str:
        """The keys and values that `row_tokens` comes from, for messages."""
        learner, cluster = self.learner, self.cluster
        shared = f" x {cluster.sequence_parallel=}" if cluster.sequence_parallel > 1 else ""
        return f"{learner.max_tokens_per_microbatch=}{shared}"

    def contradictions(self) -> Iterator[str]:
        """One message for each contradiction: the keys, their values, the reason and the remedy."""
        learner, longest = self.learner, self.sequences_per_example * self.max_sequence_tokens
        cluster = self.cluster
        if cluster.learners % cluster.sequence_parallel:
            yield (
                f"{cluster.sequence_parallel=}: it does not divide {cluster.learners=}, and every learner shares its "
                "sequences with as many others. Use a divisor."
            )
        if self.row_tokens < longest:
            times = f"{self.sequences_per_example} x " if self.sequences_per_example > 1 else ""
            enough = range(-(-longest // learner.max_tokens_per_microbatch), cluster.learners + 1)
            share = next((each for each in enough if cluster.learners % each == 0), None)
            sharing = f"let {share} learners share each (cluster.sequence_parallel={share})"
            several = f", {sharing} if {share} divides the models' attention heads" if share else ""
            yield (
                f"{self.row_limit}: an example may have {times}{self.sequence_keys} = "
                f"{longest} tokens, and has to fit. Raise the budget{several}, or shorten the sequences."
            )
        for role, training in self.trained_roles():
            yield from _section_problems(self, role.section, training.section)

    def step_problems(self, counted_as: str = "") -> Iterator[str]:
        """Contradictions with the number of steps. `counted_as`: the product of keys that gives it, for messages."""
        if late := [step for step in self.logging.profile_steps if step > self.steps]:
            end = f"the run ends at step {self.steps} ({counted_as or 'run.steps'})"
            yield f"logging.profile_steps={late}: {end}. Name steps up to that."
        for role, training in self.trained_roles():
            warmup, updates = training.section.schedule.warmup_steps, training.total_updates
            if warmup >= max(1, updates):
                yield (
                    f"{role.section}.schedule.warmup_steps={warmup}: the run has only {updates} optimizer steps "
                    f"({counted_as or training.counted_as}). Shorten the warm-up, or set warmup_fraction."
                )

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> Self:
        if info.context is None and (problems := list(self.contradictions())):  # `load_config` asks for them itself
            raise ValueError("\n".join(problems))
        return self

    @property
    def steps(self) -> int:
        """Training steps of the run."""
        raise NotImplementedError

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that is trained."""
        raise NotImplementedError

    @property
    def sequence_keys(self) -> str:
        """The keys that set `max_sequence_tokens`, with their values, for messages."""
        raise NotImplementedError

    @property
    def training(self) -> Training:
        """How `model` is trained."""
        return Training(self.learner, epochs_per_step=1, minibatches_per_epoch=1, steps=self.steps)

    def roles(self, *, trains: bool = True) -> tuple[Role, ...]:
        """All roles of the run. With `trains=False`, the engines of an evaluation, on GPUs of their own."""
        roles = [make(self) for make in ROLES] if trains else [engine(self, shares_gpus=False)]
        return tuple(role for role in roles if role is not None)

    def trained_roles(self) -> tuple[tuple[Role, Training], ...]:
        """The roles that learn, and how."""
        return tuple((role, role.training) for role in self.roles() if role.training is not None)

    @property
    def update_plan(self) -> dict[str, int]:
        """The keys that determine the number of optimizer steps. A resumed run must not change them."""
        plan = {}
        for role, training in self.trained_roles():
            plan[f"{role.section}.epochs_per_step"] = training.epochs_per_step
            plan[f"{role.section}.minibatches_per_epoch"] = training.minibatches_per_epoch
        return plan

    @property
    def checkpoint_every(self) -> int | None:
        """Training steps between checkpoints. None: no checkpoints."""
        every = self.checkpoint.every
        return math.ceil(self.steps / 10) if every == "auto" else every

    @property
    def reference_moves(self) -> bool:
        """True if the reference changes during the run. Then checkpoints hold it."""
        return False

    @property
    def further_models(self) -> dict[str, str]:
        """Models that the learners keep next to their own, by key."""
        return {}

    @property
    def metrics(self) -> dict[str, str]:
        """The name of the evaluation metric of each set of data.eval, by the label of the set."""
        return {}

    @property
    def fed_models(self) -> dict[str, str]:
        """Models other than model.path that read token ids of the policy, by key."""
        others = (role for role in self.roles() if not role.reads and role.model_key != "model.path")
        return {**{role.model_key: role.model for role in others}, **self.further_models}

    def warnings(self) -> Iterator[str]:
        """Settings that are allowed but likely a mistake, one sentence each."""
        evaluation, lr = self.evaluation, self.learner.optimizer.lr
        if self.model.lora is not None and 0 < lr < LOW_ADAPTER_RATE:
            yield (
                f"learner.optimizer.lr={lr} with model.lora: a rate for the training of all weights. Adapters need "
                f"about ten times as much: {LOW_ADAPTER_RATE:g} or more."
            )
        if evaluation.every is not None and not self.data.eval:
            yield f"{evaluation.every=} without data.eval: there is nothing to evaluate on. Name a data set, or null."
        cluster = self.cluster
        over_nodes = cluster.device == "cuda" and cluster.learners > cluster.gpus_per_node
        if over_nodes and cluster.gpus_per_node % cluster.sequence_parallel:
            yield (
                f"{cluster.sequence_parallel=}: it does not divide {cluster.gpus_per_node=}. Learners of several nodes "
                "share a sequence, and every layer sends it over the network. Use a divisor."
            )
        for role, training in self.trained_roles():
            optimizer = training.section.optimizer
            if optimizer.variant == "tensorflow" and optimizer.betas[1] < TENSORFLOW_BETA2:
                given = f"{role.section}.optimizer.variant=tensorflow with {role.section}.optimizer.betas="
                yield (
                    f"{given}{list(optimizer.betas)}: TensorFlow's second beta is {TENSORFLOW_BETA2}. With a smaller "
                    "one the first updates are longer than those of the work that this repeats. Set betas=[0.9, 0.999]."
                )

    def shown(self) -> dict[str, Any]:
        """The resolved config as JSON, without secrets."""
        values: dict[str, Any] = hidden(self.model_dump(mode="json"))
        return values

    def stored(self) -> dict[str, Any]:
        """The config as files store it: with references to environment variables, without secrets."""
        values: dict[str, Any] = with_references(self.model_dump(mode="json"))
        return values


def _section_problems(config: TrainingProgramConfig, key: str, trained: sections.TrainedConfig) -> Iterator[str]:
    """Contradictions within the section of one trained model; `key` is the name of the section."""
    yield from conflicts(
        config,
        {
            f"{key}.schedule.warmup_steps and {key}.schedule.warmup_fraction": "both set the warm-up. Set one of them.",
            f"{key}.offload_optimizer and {key}.zero_stage=0": "offloading needs stage 1, 2 or 3.",
            f"{key}.zero_stage=0 and model.dtype=bfloat16": (
                "DeepSpeed would accumulate gradients in bfloat16. Use stage 1 or higher, or model.dtype=float32."
            ),
        },
    )
    if trained.schedule.min_lr > trained.optimizer.lr:
        reason = f"above {key}.optimizer.lr={trained.optimizer.lr}, which is the peak. Lower it."
        yield f"{key}.schedule.min_lr={trained.schedule.min_lr}: {reason}"


def dtype_problems(config: TrainingProgramConfig, key: str) -> Iterator[str]:
    """A problem if the attention for packed rows does not support the dtype on the device."""
    reason = f"flash attention on packed rows takes bfloat16. Set {key}=bfloat16 (master weights are float32)."
    yield from conflicts(config, {f"{key}=float32 and cluster.device=cuda": reason})


C = TypeVar("C", bound=TrainingProgramConfig)


def with_values(config: C, **sections: dict[str, Any]) -> C:
    """A copy of the config with some keys replaced, by section. Does not validate."""
    update = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=update)
