"""The whole config of a GRPO run: its sections, values derived from them, warnings and contradictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from rlhf.config import contradictions, sections
from rlhf.config.base import key
from rlhf.config.conditions import conflicts
from rlhf.config.data import ENVIRONMENT, DataConfig
from rlhf.config.environment import ADAPTERS, TOOLS, EnvironmentConfig, ToolNames
from rlhf.config.library_options import changes_numbers
from rlhf.config.program import PLAIN_TEXT_CONFLICTS, TrainingProgramConfig, dtype_problems
from rlhf.config.reward import ENVIRONMENT_PART, MODEL_PART, RewardConfig
from rlhf.config.reward_model import RewardModelConfig
from rlhf.config.roles import Training
from rlhf.config.teacher import teacher_problems


class GRPOConfig(TrainingProgramConfig):
    """Everything that `python -m rlhf.grpo` reads."""

    program: ClassVar[str] = "grpo"
    hosted_learner: ClassVar[str] = "rlhf.learner.policy:Learner"

    run: sections.RunConfig
    model: sections.ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig | None = key(None, "a learned reward, added to `reward`; null: none")
    environment: EnvironmentConfig = EnvironmentConfig()
    tools: ToolNames = key((), "functions the model may call: your.module:function, calculator, python")
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    algo: sections.AlgoConfig = sections.AlgoConfig()
    learner: sections.LearnerConfig = sections.LearnerConfig()
    weights: sections.WeightsConfig = sections.WeightsConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    evaluation: sections.EvaluationConfig = sections.EvaluationConfig()
    logging: sections.LoggingConfig = sections.LoggingConfig()
    cluster: sections.ClusterConfig = sections.ClusterConfig()
    plan: sections.PlanConfig = sections.PlanConfig()

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Without data.train the environment makes the prompts, if there is one; those of a package judge too."""
        data, environment = values.get("data") or {}, values.get("environment")
        if isinstance(environment, dict):
            environment = environment.get("name") or environment.get("by_name")
        if isinstance(environment, str) and environment in ADAPTERS:
            values = {"reward": [], **values}
        if environment and isinstance(data, dict) and not data.get("train"):
            return {**values, "data": {**data, "train": ENVIRONMENT}}
        return values

    @property
    def uses_environment_or_tools(self) -> bool:
        """True if the rollouts have an environment or tools."""
        return bool(self.tools or self.environment.parts)

    @property
    def rollouts_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def steps(self) -> int:
        return self.run.steps

    @property
    def training(self) -> Training:
        """How the policy is trained."""
        return Training(self.learner, self.learner.epochs_per_step, self.learner.minibatches_per_epoch, self.run.steps)

    @property
    def sends_changes(self) -> bool:
        """True if engines get only the weights that changed. In float32 nearly all change in each step."""
        return self.weights.transfer == "delta" and self.model.dtype == "bfloat16"

    @property
    def reference_moves(self) -> bool:
        return self.needs_reference and self.algo.ref_update != "fixed"

    @property
    def reference_is_average(self) -> bool:
        """True if the reference is a running average of the policy."""
        return self.reference_moves and self.algo.ref_update == "average"

    @property
    def further_models(self) -> dict[str, str]:
        return {} if self.algo.teacher is None else self.algo.teacher.paths

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.longest

    @property
    def sequence_keys(self) -> str:
        return f"data.max_prompt_tokens={self.data.max_prompt_tokens} + {self.rollout.longest_key}"

    @property
    def evaluations(self) -> dict[str, sections.EvaluationConfig]:
        """The `evaluation` section of each set of data.eval, by its label, with the keys that the set replaces."""
        return {source.label: self.evaluation.model_copy(update=source.sampling) for source in self.data.eval}

    @property
    def metrics(self) -> dict[str, str]:
        return {source.label: self.metric_of(source.label) for source in self.data.eval}

    def metric_of(self, source: str, *, trains: bool = False) -> str:
        """The name of the metric of a data source: a part of its reward, or a further number that a part returns.

        By default it is the only part that compares with an answer, or the only part. Empty if several parts could be
        it (an evaluation refuses that), or if nothing grades the source. `trains`: of data.train, for the curriculum.
        """
        sources = self.data.train if trains else self.data.eval
        named = (each.metric for each in sources if each.label == source and each.metric)
        verifiers = [part.name for part in self.reward.parts_of(source) if part.is_verifier]
        others = [name for name in self.graders_of(source) if name != ENVIRONMENT_PART]  # which may give no reward
        kinds = (verifiers, others or self.graders_of(source))
        default = next((names[0] for names in kinds if len(names) == 1), "")
        return next(named, self.evaluation.metric) or default

    def graders_of(self, source: str) -> tuple[str, ...]:
        """Names of the parts that the reward of a data source may have."""
        environment_judges = any(part.name not in TOOLS for part in self.environment.parts.values())
        others = (ENVIRONMENT_PART,) * environment_judges + (MODEL_PART,) * (self.reward_model is not None)
        return tuple(part.name for part in self.reward.parts_of(source)) + others

    @property
    def evaluation_groups_at_once(self) -> int:
        """Prompts that an evaluation submits at once: twice as many sequences as the engines run, so none idles."""
        sequences = self.cluster.engines * self.rollout.max_concurrent_sequences
        samples = [each.samples_per_prompt for each in self.evaluations.values()]
        return max(1, 2 * sequences // max(samples, default=1))

    @property
    def engine_sleep_level(self) -> int:
        """vLLM's sleep level: 2 keeps no weights, since all are sent before an engine samples again.

        1 keeps them in host memory: the base of an adapter, and the scales of some options, are not sent.
        """
        return 1 if self.model.lora is not None or changes_numbers(self.rollout.engine) else 2

    @property
    def request_deadline_s(self) -> float:
        """Seconds that a request on an engine may take.

        On shared GPUs it waits for a training step per step of lag: passes for the log-probs of learners, teachers and
        values, the epochs of all trained models, and the transfer, each with a deadline of its own.
        """
        trainings = self.rollout.max_policy_lag if self.cluster.placement == "colocated" else 0
        waits = 4 + sum(training.epochs_per_step for _, training in self.trained_roles())
        return (1 + trainings * waits) * self.cluster.step_deadline_s

    @property
    def noise_seed(self) -> int | None:
        """Seed of the sampling noise in a deterministic run. None: noise depends on the order of arrival."""
        return self.run.seed if self.run.deterministic else None

    @property
    def learns_from_rewards(self) -> bool:
        """True if rewards train the policy. False if a teacher replaces them."""
        return self.algo.teacher is None or self.algo.teacher.reward == "add"

    @property
    def needs_reference(self) -> bool:
        return self.algo.kl_coef > 0 or self.algo.log_kl

    @property
    def kl_in_reward(self) -> bool:
        """True if the reward includes a KL penalty. Then advantages are computed after the log-probs."""
        return self.algo.kl_place == "reward" and self.algo.kl_coef > 0

    @property
    def kl_in_loss(self) -> bool:
        """True if a KL penalty is added to the loss."""
        return self.algo.kl_place == "loss" and self.algo.kl_coef > 0

    @property
    def needs_old_logprobs_pass(self) -> bool:
        """True if log-probs are computed before the update: for several updates, a teacher, or a KL in the reward."""
        for_updates = self.training.updates_per_step > 1 and self.algo.old_policy == "learner"
        teacher = self.algo.teacher
        return for_updates or self.kl_in_reward or (teacher is not None and not teacher.in_loss)

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        yield from conflicts(self, contradictions.WARNINGS)
        if self.weights.transfer == "delta" and not self.sends_changes:
            reason = "an update changes nearly every float32 weight. Set weights.transfer=full, or train in bfloat16."
            yield f"weights.transfer=delta with model.dtype={self.model.dtype}: {reason}"
        if self.rollouts_per_step % self.learner.minibatches_per_epoch:
            given = f"learner.minibatches_per_epoch={self.learner.minibatches_per_epoch}"
            yield f"{given}: it does not divide {self.rollouts_per_step} rollouts per step. Minibatches differ by one."

    def sampling_contradictions(self) -> Iterator[str]:
        """The contradictions that matter to an evaluation, which trains nothing."""
        yield from contradictions.sampling_problems(self)
        yield from conflicts(self, PLAIN_TEXT_CONFLICTS)
        yield from dtype_problems(self, "model.dtype")
        yield from contradictions.environment_problems(self)
        yield from contradictions.package_problems(self, "eval")
        yield from contradictions.metric_problems(self)

    def contradictions(self) -> Iterator[str]:
        yield from contradictions.training_problems(self)
        yield from contradictions.support_problems(self)
        yield from contradictions.package_problems(self, "train")
        yield from self.sampling_contradictions()
        yield from contradictions.curriculum_problems(self)
        yield from teacher_problems(self)
        yield from contradictions.best_problems(self)
        yield from super().contradictions()
        yield from self.step_problems()
