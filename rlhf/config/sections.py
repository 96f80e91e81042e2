"""The sections of the YAML, one model each. Every size is global; none is per device."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, field_validator

from rlhf.config.base import (
    REQUIRED,
    FilePath,
    Fraction,
    NonNegative,
    NonNegativeInt,
    OwnOr,
    Resume,
    Section,
    UserCode,
    key,
)
from rlhf.config.cards import CardName
from rlhf.config.library_options import check_deepspeed_options, check_engine_options
from rlhf.config.parsers import check_tool_parser
from rlhf.config.teacher import TeacherConfig

KLEstimator = Literal["k1", "k2", "k3", "k4"]  # of algo/kl.py
PolicyLoss = Annotated[str, OwnOr("ppo", "gspo", "cispo", "sapo", "dppo_tv")]
CLIPPING_LOSSES = ("ppo", "gspo", "cispo", "dppo_tv")  # they read clip_low and clip_high
Advantage = Annotated[str, OwnOr("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline")]
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM
ModelDType = Literal["bfloat16", "float32"]
Checkpointing = bool | Literal["selective", "tiled"]
EngineOptions = Annotated[dict[str, Any], AfterValidator(check_engine_options)]
DeepSpeedOptions = Annotated[dict[str, Any], AfterValidator(check_deepspeed_options)]
ToolParser = Annotated[str, Field(min_length=1), AfterValidator(check_tool_parser)]
UNRESTRICTED: dict[str, Any] = {"top_p": 1.0, "top_k": None, "min_p": 0.0}  # sampling from all tokens


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the weights, which stay as they are in model.path."""

    rank: int = key(16, "r, rank of the trained product B A of each layer", ge=1, le=512)
    alpha: PositiveInt = key(32, "the product is multiplied by alpha / rank")
    targets: Literal["all-linear"] | tuple[str, ...] = key(
        "all-linear", "layers with an adapter: all linear ones but the head, or names such as [q_proj, v_proj]"
    )
    exclude: tuple[str, ...] = key((), "layers without one, by name; [layers.0.mlp.up_proj] is that of one layer")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def slot_rank(self) -> int:
        """The smallest rank of an engine's slot that holds the adapter."""
        return next(rank for rank in SLOT_RANKS if rank >= self.rank)

    @field_validator("targets", mode="before")
    @classmethod
    def _is_all_or_names(cls, value: Any) -> Any:
        if value == "all-linear":
            return value
        if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
            return tuple(value)
        raise ValueError(f"model.lora.targets={value}: set all-linear, or a list of names such as [q_proj, v_proj].")


class ModelConfig(Section):
    path: FilePath = key(REQUIRED, "folder or hub name of the model that is trained", resume="free")
    dtype: ModelDType = key("bfloat16", "of weights and activations; master weights are float32")
    gradient_checkpointing: Checkpointing = key(
        False,
        "recompute activations in the backward pass; selective: all but matrix products and attention; tiled: all, and "
        "MLPs in tiles of tokens",
        resume="rounding",
    )
    trust_remote_code: bool = key(False, "run code that the model's repository ships", resume="free")
    lora: LoraConfig | None = key(None, "train adapters in place of all weights: {rank: 16}; null: all weights")

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _is_a_kind(cls, value: Any) -> Any:
        if isinstance(value, bool) or value in ("selective", "tiled"):
            return value
        raise ValueError(f"model.gradient_checkpointing={value}: set true, false, selective or tiled.")


class AnyRunConfig(Section):
    """The `run` section of any program that trains."""

    resume: ClassVar[Resume | None] = "free"
    dir: FilePath = Field(description="folder of the run: config, metrics, rollouts, checkpoints, final model")
    seed: NonNegativeInt = key(0, "seeds the order of the data, sampling and minibatches", resume="fixed")
    deterministic: bool = key(False, "two runs on one machine, and a resumed one, are equal bit for bit; slower")
    export: bool = key(True, "write the final model in Hugging Face format")
    max_restarts: NonNegativeInt = key(
        3,
        "engines, and rollout workers, replaced between two transfers; after other deaths restarts from one checkpoint",
    )
    grace_s: NonNegative = key(120.0, "seconds after SIGTERM or Ctrl-C to end the step and save it")
    callbacks: tuple[UserCode, ...] = key((), "classes with on_step or on_evaluation: [mine.py:Mine]")


class RunConfig(AnyRunConfig):
    steps: PositiveInt = Field(description="training steps, each of prompts_per_step x samples_per_prompt rollouts")
    max_useless_steps: PositiveInt | None = key(
        20, "steps in a row, or all of a shorter run, without an update or a signal before the run ends; null: never"
    )


class SamplingConfig(Section):
    """A section with keys for sampling."""

    @property
    def restriction(self) -> dict[str, Any]:
        """The keys that restrict sampling to a part of the vocabulary, with their values."""
        return {name: getattr(self, name) for name, all_ in UNRESTRICTED.items() if getattr(self, name) != all_}


class RolloutConfig(SamplingConfig):
    prompts_per_step: PositiveInt = key(64, "prompts of one training step, over all engines")
    samples_per_prompt: PositiveInt = key(8, "responses sampled for each prompt, the group size G")
    max_response_tokens: PositiveInt = key(1024, "longest response, or turn of a rollout with several, tokens")
    max_rollout_tokens: PositiveInt | None = key(
        None, "all that follows the prompt, answers of tools too, tokens; null is max_response_tokens"
    )
    max_turns: PositiveInt | None = key(None, "responses of one rollout with tools or an environment; null: no limit")
    max_rollout_s: PositiveFloat | None = key(None, "seconds after which a rollout gets no further turn; null: never")
    temperature: PositiveFloat = key(1.0, "sampling temperature; the learner divides its logits by it too")
    top_p: float = key(1.0, "nucleus sampling; the learner normalizes over the same tokens; 1: all", gt=0, le=1)
    top_k: int | None = key(None, "sample from this many most probable tokens, at least 2; null: all", ge=2)
    min_p: float = key(0.0, "sample from tokens of at least this share of the highest probability; 0: all", ge=0, lt=1)
    stop: tuple[str, ...] = key((), "strings that end a response, in addition to the model's eos ids")
    truncate_token: str | None = key(None, "token that also ends a response, as a stop that is kept; null: none")
    truncate_after: NonNegativeInt = key(0, "first tokens in which truncate_token does not end the text that is graded")
    truncate: Literal["response", "graded_text"] = key(
        "response",
        "what ends at truncate_token: the response, or (if it goes on to the longest length) the text that is graded",
    )
    tool_parser: ToolParser = key("auto", "vLLM's parser of tool calls; auto: by the chat template")
    non_stop_reward: float | None = key(None, "replaces the reward of a response that did not stop; null: nothing does")
    missing_eos_penalty: NonNegative = key(0.0, "subtracted from the reward of a response that did not stop")
    dynamic_sampling: bool = key(False, "replace groups whose rewards are all equal by groups of other prompts (DAPO)")
    dynamic_sampling_part: str | None = key(None, "part of the reward, such as math, that is compared; null: the sum")
    max_replacements: NonNegativeInt = key(64, "groups that it may replace for one step; then it trains on equal ones")
    max_policy_lag: NonNegativeInt = key(0, "largest age of a rollout's oldest token, training steps; 0 is synchronous")
    on_stale: Literal["wait", "drop"] = key("wait", "wait for groups that get too old, or drop them, often slow ones")
    on_weight_update: Literal["recompute", "keep_kv"] = key("recompute", "KV cache of running requests")
    gpu_memory_utilization: Fraction = key(0.85, "share of a GPU that an engine takes", resume="free")
    kv_cache_gib: PositiveFloat = key(1.0, "KV cache of an engine on CPU, GiB", resume="free")
    max_concurrent_sequences: PositiveInt = key(256, "sequences that an engine runs at once", resume="free")
    enforce_eager: bool = key(False, "no CUDA graphs in the engines; CPU never has them", resume="rounding")
    engine: EngineOptions = key({}, "further arguments of vLLM's engine: {block_size: 32}", resume="rounding")

    @property
    def longest(self) -> int:
        """The most tokens that may follow a prompt."""
        return self.max_rollout_tokens or self.max_response_tokens

    @property
    def longest_key(self) -> str:
        """The key that sets `longest`, with its value, for messages."""
        name = "max_response_tokens" if self.max_rollout_tokens is None else "max_rollout_tokens"
        return f"rollout.{name}={self.longest}"


class AlgoConfig(Section):
    advantage: Advantage = key(
        "grpo", "how rewards become advantages; grpo divides by the group's std; gae: rlhf.ppo; or your.module:function"
    )
    normalize_over: Literal["responses", "tokens"] = key(
        "responses", "what mean and std of reinforce_pp and reinforce_pp_baseline count once: a response, or a token"
    )
    policy_loss: PolicyLoss = key("ppo", "surrogate objective; or a function of yours, your.module:function")
    clip_low: NonNegative = key(0.2, "the ratio is clipped below at 1 - clip_low; dppo_tv: most a probability may fall")
    clip_high: NonNegative = key(
        0.2, "the ratio is clipped above at 1 + clip_high; dppo_tv: how far a probability may rise"
    )
    sapo_tau_positive: PositiveFloat = key(1.0, "temperature of sapo's gate for positive advantages; larger: narrower")
    sapo_tau_negative: PositiveFloat = key(1.05, "the same for the other advantages")
    dual_clip: float | None = key(None, "bound of the loss for negative advantages; null is off", gt=1.0)
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = key(
        "token_mean", "mean over all tokens; mean over rollouts of their token means; or sum divided by a fixed length"
    )
    constant_length: PositiveInt | None = key(None, "tokens, of loss_aggregation=constant; null: most after a prompt")
    kl_estimator: KLEstimator = key("k3", "estimator of KL(policy || reference); k1 in the reward, k3 in the loss")
    kl_place: Literal["loss", "reward"] = key("loss", "where the KL penalty goes")
    kl_coef: NonNegative = key(0.0, "beta; 0 needs no reference model")
    kl_ratio_weighted: bool | None = key(
        None, "multiply k3 in the loss by the ratio, for the gradient of the reverse KL; null: true for k3 in the loss"
    )
    ref_update: Literal["fixed", "replace", "average"] = key(
        "fixed", "reference: the fixed start model, replaced by the policy every ref_every steps, or an average"
    )
    ref_every: PositiveInt = key(100, "training steps between replacements (ref_update=replace)")
    ref_decay: float = key(0.99, "weight of the old average in each training step (ref_update=average)", gt=0, lt=1)
    log_kl: bool = key(False, "load the reference and log the KL even when kl_coef is 0")
    entropy_coef: float = key(0.0, "bonus on the entropy of the policy, nats")
    old_policy: Literal["learner", "engine"] = key(
        "learner", "of the ratio: the learner before the step's first update, or the engine, without a pass for it"
    )
    importance_correction: Literal["none", "truncated", "masked"] = key(
        "truncated", "weight by the ratio of learner to engine probabilities, cut or masked outside of its bounds"
    )
    importance_level: Literal["token", "sequence"] = key("token", "one weight per token or per sequence")
    importance_cap: float = key(2.0, "upper bound of the importance weight", ge=1.0)
    importance_floor: float | None = key(
        None, "lower bound of the importance weight; null: 1/importance_cap if masked, none if truncated", gt=0, le=1
    )
    geometric_mask: tuple[PositiveFloat, PositiveFloat] | None = key(
        None, "bounds; a sequence whose geometric mean ratio of learner to engine is outside is left out; null: none"
    )
    off_policy_mask: PositiveFloat | None = key(
        None,
        "nats per token; where a sequence's mean log(engine/policy) is above, its negative advantages are left out",
    )
    mask_truncated: bool = key(False, "leave responses that did not stop out of the loss")
    teacher: TeacherConfig | None = key(None, "a model to learn from token by token; null: rewards alone teach")

    @property
    def weights_kl(self) -> bool:
        """True if the KL in the loss is multiplied by the ratio."""
        if self.kl_ratio_weighted is None:
            return self.kl_estimator == "k3" and self.kl_place == "loss"
        return self.kl_ratio_weighted

    @property
    def has_own_loss(self) -> bool:
        """True if policy_loss is a function of the user."""
        return ":" in self.policy_loss

    @property
    def clips(self) -> bool:
        """True if policy_loss stops the gradient of some tokens, or cuts their weight."""
        return self.policy_loss in CLIPPING_LOSSES

    @property
    def own_functions(self) -> dict[str, str]:
        """The functions of the user by key."""
        named = {"algo.policy_loss": self.policy_loss, "algo.advantage": self.advantage}
        return {where: name for where, name in named.items() if ":" in name}


class OptimizerConfig(Section):
    variant: Literal["torch", "tensorflow"] = key(
        "torch", "where Adam adds epsilon: outside the root, or inside it (as TensorFlow: set betas=[0.9, 0.999] too)"
    )
    lr: NonNegative = key(1e-6, "peak learning rate")
    betas: tuple[Fraction, Fraction] = key((0.9, 0.95), "decay of the first and second moment")
    eps: PositiveFloat = key(1e-8, "Adam's epsilon, used as variant says")
    weight_decay: NonNegative = key(0.0, "decoupled weight decay, on every parameter")


class ScheduleConfig(Section):
    name: Literal["constant", "linear", "cosine", "polynomial"] = key("constant", "shape after warm-up")
    warmup_steps: NonNegativeInt = key(0, "optimizer steps of linear warm-up")
    warmup_fraction: Fraction = key(0.0, "warm-up as a share of all optimizer steps")
    num_cycles: NonNegative = key(0.5, "cosine cycles; 0.5 is one monotone descent")
    min_lr: NonNegative = key(0.0, "learning rate at the last optimizer step")
    power: PositiveFloat = key(1.0, "exponent of polynomial")

    def warmup_updates(self, total_updates: int) -> int:
        """Optimizer steps of linear warm-up; a fraction of the total is rounded up."""
        return self.warmup_steps or math.ceil(self.warmup_fraction * total_updates)


class TrainedConfig(Section):
    """Settings that policy, critic and reward model each have: optimizer, schedule, ZeRO stage."""

    zero_stage: Literal[0, 1, 2, 3] = key(2, "DeepSpeed ZeRO stage", resume="rounding")
    offload_optimizer: bool = key(False, "keep the optimizer state in host memory", resume="rounding")
    reduce_dtype: ModelDType = key("bfloat16", "of gradients between learners; float32 sends twice the bytes")
    max_grad_norm: PositiveFloat | None = key(1.0, "global gradient norm is clipped to it; null is off")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    deepspeed: DeepSpeedOptions = key({}, "further settings of DeepSpeed: {zero_optimization: {}}", resume="rounding")


class AnyLearnerConfig(TrainedConfig):
    """The `learner` section of any program that trains."""

    max_tokens_per_microbatch: PositiveInt = key(
        16384,
        "tokens that a learner computes at once; changes memory and speed, and the result by rounding alone",
        resume="rounding",
    )


class LearnerConfig(AnyLearnerConfig):
    epochs_per_step: PositiveInt = key(1, "passes over the rollouts of a step (GRPO's mu)")
    minibatches_per_epoch: PositiveInt = key(1, "optimizer steps in a pass")
    router_balance_coef: NonNegative = key(0.0, "weight of the loss that balances a mixture of experts, per sequence")
    router_replay: Literal["none", "rollout"] = key(
        "none", "which experts compute the tokens of rollouts: those that the router chooses, or those of the engine"
    )

    @property
    def replays_experts(self) -> bool:
        return self.router_replay == "rollout"


class WeightsConfig(Section):
    transfer: Literal["full", "delta"] = key(
        "full", "what engines are sent after an update: all weights, or only those that have changed (bfloat16)"
    )


class CheckpointConfig(Section):
    resume: ClassVar[Resume | None] = "free"
    every: PositiveInt | Literal["auto"] | None = key(
        "auto", "training steps between checkpoints; auto is a tenth of run.steps, rounded up; null saves none"
    )
    keep: PositiveInt = key(2, "newest complete checkpoints that are kept")
    best: str | None = key(None, "metric of an evaluation, eval/math/avg@8; its best checkpoint is kept; null: none")
    mirror: FilePath | None = key(None, "address of a copy for --resume, s3://bucket/run; null: none", min_length=1)

    @field_validator("every", mode="before")
    @classmethod
    def _is_a_count_or_auto(cls, value: Any) -> Any:
        if value is None or value == "auto" or (type(value) is int and value > 0):
            return value
        raise ValueError(f"checkpoint.every={value}: set a whole number of steps above 0, auto or null.")

    @property
    def kept(self) -> int:
        """Checkpoints that stay: the newest and the best."""
        return self.keep + (self.best is not None)

    @property
    def most(self) -> int:
        """Most checkpoints on the disk at once: kept ones, one being written, one being copied to the mirror."""
        return self.kept + 1 + (self.mirror is not None)


class AnyEvaluationConfig(Section):
    """When a program evaluates."""

    resume: ClassVar[Resume | None] = "free"
    every: PositiveInt | None = key(None, "training steps between evaluations; null is off")
    at_start: bool = key(True, "evaluate before the first step")
    at_end: bool = key(True, "evaluate after the last step")


class EvaluationConfig(AnyEvaluationConfig, SamplingConfig):
    metric: FilePath | None = key(
        None,
        "what avg@k averages, a set of data.eval may have its own: the name of a reward, environment, or reward_model; "
        "null: the only reward, or of several the one that compares with an answer",
    )
    samples_per_prompt: PositiveInt = key(1, "responses per prompt: the k of avg@k and pass@k")
    temperature: NonNegative = key(1.0, "sampling temperature; 0 is greedy")
    top_p: float = key(1.0, "nucleus sampling: most probable tokens up to this total probability; 1: all", gt=0, le=1)
    top_k: PositiveInt | None = key(None, "sample from this many most probable tokens; null: all")
    min_p: float = key(0.0, "sample from tokens of at least this share of the highest probability; 0: all", ge=0, lt=1)
    max_response_tokens: PositiveInt | None = key(None, "tokens; null is rollout.max_response_tokens")


class WandbConfig(Section):
    mode: Literal["auto", "online", "offline", "disabled"] = key("auto", "auto: online if there is an API key")
    project: str = key("rlhf", "project name")
    entity: str | None = key(None, "team or user")
    group: str | None = key(None, "group of runs")
    name: str | None = key(None, "run name; null is the run folder's name")
    tags: tuple[str, ...] = key((), "tags")
    run_id: str | None = key(None, "run id; null makes one, which --resume uses again")


class TrackioConfig(Section):
    project: str | None = key(None, "project name; null logs nothing")
    group: str | None = key(None, "group of runs")
    server: str | None = key(None, "Space of the hub, as org/name, or address of a server; null: files of this machine")


class AnyLoggingConfig(Section):
    """The `logging` section of any program that trains."""

    resume: ClassVar[Resume | None] = "free"
    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = key(False, "write event files for TensorBoard to tensorboard/ in the run folder")
    trackio: TrackioConfig = TrackioConfig()
    profile_steps: tuple[PositiveInt, ...] = key((), "training steps that learner 0 profiles, into profile/")
    level: Literal["debug", "info", "warning"] = key("warning", "log level of the libraries")


class LoggingConfig(AnyLoggingConfig):
    rollouts: bool = key(True, "write every trained rollout, with text, reward parts and advantage")
    token_values: bool = key(False, "write their tokens with advantage and log-prob difference; several times the disk")


class LearnersConfig(Section):
    """The `cluster` section of a program that trains without engines, and the part that all programs share."""

    resume: ClassVar[Resume | None] = "free"
    device: Literal["cuda", "cpu"] = key("cuda", "where the models compute", resume="rounding")
    learners: PositiveInt = key(1, "learner ranks, one GPU each", resume="rounding")
    sequence_parallel: PositiveInt = key(
        1,
        "learners that share each sequence, for contexts that one learner's memory cannot hold; divides learners and "
        "the attention heads of every model that learners hold",
        resume="rounding",
    )
    threads_per_learner: PositiveInt | None = key(
        None,
        "threads of a learner on CPU, and of an optimizer in host memory; null: cores of its node / learners",
        resume="rounding",
    )
    gpus_per_node: PositiveInt = key(8, "for --plan, which takes this machine's if it is not set; a run asks Ray")
    gpu: CardName | None = key(None, "card that --plan assumes, such as H100; null: this machine's, or by its memory")
    gpu_memory_gib: PositiveFloat = key(79.0, "memory of a GPU, GiB, for --plan; if not set, the card's")
    peak_tflops: PositiveFloat | None = key(None, "bf16 TFLOP/s of a GPU, for --plan and learner/mfu; null: the card's")
    ray_address: str | None = key(None, "address of a running Ray cluster; null starts one here")
    cpus_per_learner: PositiveFloat = key(0.5, "CPU cores reserved for each learner")
    start_deadline_s: PositiveFloat = key(900.0, "seconds that start-up may take before the run fails")
    step_deadline_s: PositiveFloat = key(3600.0, "seconds that one wait in the loop may take")

    @property
    def data_shards(self) -> int:
        """Groups of learners that compute different microbatches."""
        return self.learners // self.sequence_parallel


class ClusterConfig(LearnersConfig):
    engines: PositiveInt = key(1, "vLLM engines")
    tensor_parallel: PositiveInt = key(1, "GPUs of one engine", resume="rounding")
    min_engines: PositiveInt = key(1, "sampling waits while fewer engines run; lost ones are replaced meanwhile")
    placement: Literal["separate", "colocated"] = key("separate", "engines and learners on different or the same GPUs")
    offload_while_sampling: bool = key(True, "colocated: optimizer and reference leave the GPU while engines are awake")
    cpus_per_engine: PositiveFloat = key(0.5, "CPU cores reserved for each engine")
    rollout_workers: Literal["auto"] | NonNegativeInt = key(
        "auto",
        "Ray actors that play and grade rollouts, in all; 0: the driver's process does; auto: one per node with "
        "engines, at most one for 4 cores of the cluster, 0 below 8 cores",
    )

    @field_validator("rollout_workers", mode="before")
    @classmethod
    def _is_auto_or_a_number(cls, value: Any) -> Any:
        if value == "auto" or (type(value) is int and value >= 0):
            return value
        raise ValueError(f"cluster.rollout_workers={value}: set auto, or a whole number from 0.")


class PlanConfig(Section):
    """Measured or assumed numbers from which --plan estimates hours; a run does not read them."""

    resume: ClassVar[Resume | None] = "free"
    engine_tokens_per_second: PositiveFloat | None = key(None, "rollout/tokens_per_second / cluster.engines")
    learner_tokens_per_second: PositiveFloat | None = key(None, "learner/tokens_per_second / cluster.learners")
    network_gbit_per_second: PositiveFloat = key(100.0, "between learners and engines, for transfers")
    prompt_tokens: PositiveInt | None = key(None, "mean prompt length, tokens; null: data.max_prompt_tokens")
    response_tokens: PositiveInt | None = key(None, "mean tokens after the prompt; null: the most that may follow it")
