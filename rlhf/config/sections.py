"""The sections of the YAML, one model each. Every size is global; none is per device."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from rlhf.config.base import FilePath, Section

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


KLEstimator = Literal["k1", "k2", "k3", "k4"]  # of algo/kl.py


class ModelConfig(Section):
    path: FilePath = Field(description="folder or hub name of the model that is trained")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="type of weights and activations; master weights are float32 always"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    trust_remote_code: bool = Field(False, description="run code that the model's repository ships")


class AnyRunConfig(Section):
    """The `run` section of any program that trains."""

    dir: FilePath = Field(description="folder of the run: config, metrics, rollouts, checkpoints, final model")
    seed: NonNegativeInt = Field(0, description="seeds the order of the data, sampling and minibatches")
    deterministic: bool = Field(
        False,
        description="two runs of one config on one machine, and a resumed run, are equal bit for bit; samples slower",
    )
    export: bool = Field(True, description="write the final model in Hugging Face format")
    max_restarts: NonNegativeInt = Field(
        3,
        description="lost engines replaced between two transfers of weights; after other deaths, restarts in a "
        "row from one checkpoint; 0: a death ends the run",
    )
    grace_s: NonNegative = Field(
        120.0,
        description="seconds after SIGTERM or Ctrl-C to end the step and save it; then the run ends without",
    )


class RunConfig(AnyRunConfig):
    steps: PositiveInt = Field(
        description="training steps; one consumes prompts_per_step x samples_per_prompt rollouts"
    )
    max_useless_steps: PositiveInt | None = Field(
        20,
        description="steps in a row, or all of a shorter run, after which a run that learns nothing ends: nothing was "
        "trained on, all updates were skipped, or no group had a signal; null: never",
    )


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = Field(description="prompts of one training step, over all engines")
    samples_per_prompt: PositiveInt = Field(description="responses sampled for each prompt, the group size G")
    max_response_tokens: PositiveInt = Field(description="longest response, tokens")
    temperature: PositiveFloat = Field(
        1.0, description="sampling temperature; the learner divides its logits by it too"
    )
    stop: tuple[str, ...] = Field((), description="strings that end a response, in addition to the model's eos ids")
    truncate_token: str | None = Field(
        None, description="token that also ends a response: it is kept, and counts as a stop; null: none"
    )
    truncate_after: NonNegativeInt = Field(
        0, description="number of first tokens of a response in which truncate_token does not end it"
    )
    truncate: Literal["response", "graded_text"] = Field(
        "response",
        description="what ends at truncate_token: the response, or only the text that is graded (graded_text: every "
        "response has max_response_tokens tokens, whatever token is sampled, and all are trained)",
    )
    non_stop_reward: float | None = Field(
        None, description="reward that replaces the own reward of a response that did not stop; null: no replacement"
    )
    missing_eos_penalty: NonNegative = Field(
        0.0, description="subtracted from the reward of a response that did not stop"
    )
    dynamic_sampling: bool = Field(
        False,
        description="replace groups whose rewards are all equal by groups of other prompts (DAPO)",
    )
    dynamic_sampling_part: str | None = Field(
        None, description="part of the reward, such as math, that is compared for this; null: the whole reward"
    )
    max_replacements: NonNegativeInt = Field(
        64, description="groups that dynamic sampling may replace for one step; further equal groups are trained on"
    )
    max_policy_lag: NonNegativeInt = Field(
        0, description="maximum age of a rollout's oldest token, in training steps; 0 is synchronous"
    )
    on_stale: Literal["wait", "drop"] = Field(
        "wait",
        description="what a step does about running groups that would become older than max_policy_lag: wait for them, "
        "or go on and discard them, so that slow prompts are trained less often",
    )
    on_weight_update: Literal["recompute", "keep_kv"] = Field(
        "recompute", description="KV cache of running requests when weights change: recompute or keep it"
    )
    gpu_memory_utilization: Fraction = Field(0.85, description="share of a GPU that an engine takes")
    kv_cache_gib: PositiveFloat = Field(1.0, description="KV cache of an engine on CPU, GiB")
    max_concurrent_sequences: PositiveInt = Field(256, description="sequences that an engine runs at once")
    enforce_eager: bool = Field(False, description="no CUDA graphs in the engines; CPU never has them")


class AlgoConfig(Section):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = Field(
        "grpo",
        description="how rewards become advantages; grpo divides by the group's std; gae needs a critic: rlhf.ppo",
    )
    normalize_over: Literal["responses", "tokens"] = Field(
        "responses",
        description="what mean and std of reinforce_pp and reinforce_pp_baseline count: each response once, or each "
        "token, so that a long response weighs more",
    )
    policy_loss: Literal["ppo", "gspo", "cispo"] = Field("ppo", description="surrogate objective")
    clip_low: NonNegative = Field(0.2, description="the ratio is clipped below at 1 - clip_low")
    clip_high: NonNegative = Field(0.2, description="the ratio is clipped above at 1 + clip_high")
    dual_clip: float | None = Field(None, gt=1.0, description="bound of the loss for negative advantages; null is off")
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean",
        description="mean over all tokens; mean over rollouts of their token means; or sum divided by a fixed length",
    )
    constant_length: PositiveInt | None = Field(
        None, description="tokens, the fixed length of loss_aggregation=constant; null is max_response_tokens"
    )
    kl_estimator: KLEstimator = Field("k3", description="estimator of KL(policy || reference)")
    kl_place: Literal["loss", "reward"] = Field("loss", description="where the KL penalty goes")
    kl_coef: NonNegative = Field(0.0, description="beta; 0 loads no reference model")
    kl_ratio_weighted: bool = Field(
        False, description="multiply k3 in the loss by the ratio; its gradient is then that of the reverse KL"
    )
    ref_update: Literal["fixed", "replace", "average"] = Field(
        "fixed",
        description="reference: the fixed start model, replaced by the policy every ref_every steps, or an average",
    )
    ref_every: PositiveInt = Field(100, description="training steps between replacements (ref_update=replace)")
    ref_decay: float = Field(
        0.99, gt=0, lt=1, description="weight of the old average in each training step (ref_update=average)"
    )
    log_kl: bool = Field(False, description="load the reference and log the KL even when kl_coef is 0")
    entropy_coef: float = Field(0.0, description="bonus on the entropy of the policy, nats")
    importance_correction: Literal["none", "truncated", "masked"] = Field(
        "truncated",
        description="weight by the ratio of learner to engine probabilities: capped at importance_cap, or masked "
        "above it; none needs max_policy_lag=0",
    )
    importance_level: Literal["token", "sequence"] = Field("token", description="one weight per token or per sequence")
    importance_cap: float = Field(2.0, ge=1.0, description="upper bound of the importance weight")
    mask_truncated: bool = Field(False, description="leave responses that did not stop out of the loss")


class OptimizerConfig(Section):
    variant: Literal["torch", "tensorflow"] = Field(
        "torch", description="where Adam adds epsilon: outside the bias-corrected root, or inside (epsilon-hat)"
    )
    lr: NonNegative = Field(1e-6, description="peak learning rate")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="decay of the first and second moment")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon, used as variant says")
    weight_decay: NonNegative = Field(0.0, description="decoupled weight decay, on every parameter")


class ScheduleConfig(Section):
    name: Literal["constant", "linear", "cosine", "polynomial"] = Field("constant", description="shape after warm-up")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up")
    warmup_fraction: Fraction = Field(0.0, description="warm-up as a share of all optimizer steps")
    num_cycles: NonNegative = Field(0.5, description="cosine cycles; 0.5 is one monotone descent")
    min_lr: NonNegative = Field(0.0, description="learning rate at the last optimizer step")
    power: PositiveFloat = Field(1.0, description="exponent of polynomial")

    def warmup_updates(self, total_updates: int) -> int:
        """Optimizer steps of linear warm-up; a fraction of the total is rounded up."""
        return self.warmup_steps or math.ceil(self.warmup_fraction * total_updates)


class TrainedConfig(Section):
    """Settings that policy, critic and reward model each have: optimizer, schedule, ZeRO stage."""

    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage")
    offload_optimizer: bool = Field(False, description="keep the optimizer state in host memory")
    max_grad_norm: PositiveFloat | None = Field(1.0, description="global gradient norm is clipped to it; null is off")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()


class LearnerConfig(TrainedConfig):
    epochs_per_step: PositiveInt = Field(1, description="passes over the rollouts of a step (GRPO's mu)")
    minibatches_per_epoch: PositiveInt = Field(1, description="optimizer steps in a pass")
    max_tokens_per_microbatch: PositiveInt = Field(
        16384,
        description="tokens in one forward and backward pass of a learner; changes memory and speed, never the result",
    )
    router_balance_coef: NonNegative = Field(
        0.0, description="weight of the loss that balances a mixture of experts, per sequence, mean over sequences"
    )


class CheckpointConfig(Section):
    every: PositiveInt | Literal["auto"] | None = Field(
        "auto",
        description="training steps between checkpoints; auto is a tenth of run.steps, rounded up; null saves none",
    )
    keep: PositiveInt = Field(2, description="newest complete checkpoints that are kept")
    best: str | None = Field(
        None,
        description="metric of an evaluation, such as eval/math/avg@8: a checkpoint is written whenever it is highest, "
        "and the highest one is kept besides the newest; null: none",
    )
    mirror: FilePath | None = Field(
        None,
        min_length=1,
        description="address that each checkpoint is copied to, such as s3://bucket/run; --resume reads it; null: none",
    )

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
        """Checkpoints on the disk at once: those that stay, one being written, and one being copied to the mirror."""
        return self.kept + 1 + (self.mirror is not None)


class AnyEvaluationConfig(Section):
    """When a program evaluates."""

    every: PositiveInt | None = Field(None, description="training steps between evaluations; null is off")
    at_start: bool = Field(True, description="evaluate before the first step")
    at_end: bool = Field(True, description="evaluate after the last step")


class EvaluationConfig(AnyEvaluationConfig):
    samples_per_prompt: PositiveInt = Field(1, description="responses per prompt: the k of avg@k and pass@k")
    temperature: NonNegative = Field(1.0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the most probable tokens that have this probability together; 1: all"
    )
    max_response_tokens: PositiveInt | None = Field(None, description="tokens; null is rollout.max_response_tokens")


class WandbConfig(Section):
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto", description="auto: online if an API key is found, else offline"
    )
    project: str = Field("rlhf", description="project name")
    entity: str | None = Field(None, description="team or user")
    group: str | None = Field(None, description="group of runs")
    name: str | None = Field(None, description="run name; null is the run folder's name")
    tags: tuple[str, ...] = Field((), description="tags")
    run_id: str | None = Field(None, description="run id; null makes one, which --resume uses again")


class MlflowConfig(Section):
    uri: FilePath | None = Field(
        None, description="tracking server, or a database such as sqlite:///FILE; null logs nothing"
    )
    experiment: str = Field("rlhf", description="experiment name")


class AnyLoggingConfig(Section):
    """The `logging` section of any program that trains."""

    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = Field(False, description="write event files for TensorBoard to tensorboard/ in the run folder")
    mlflow: MlflowConfig = MlflowConfig()
    profile_steps: tuple[PositiveInt, ...] = Field(
        (), description="training steps of which learner 0 writes a torch profiler trace to profile/ in the run folder"
    )
    level: Literal["debug", "info", "warning"] = Field("warning", description="log level of the libraries")


class LoggingConfig(AnyLoggingConfig):
    rollouts: bool = Field(True, description="write every trained rollout, with text, reward parts and advantage")
    token_values: bool = Field(
        False,
        description="write each token of these rollouts with its advantage and learner minus engine log-prob, which "
        "the report shows as colours; rollouts/ becomes several times as large",
    )


class LearnersConfig(Section):
    """The `cluster` section of a program that trains without engines, and the part that all programs share."""

    device: Literal["cuda", "cpu"] = Field("cuda", description="where the models compute")
    learners: PositiveInt = Field(1, description="learner ranks, one GPU each")
    threads_per_learner: PositiveInt | None = Field(
        None, description="threads of a learner on CPU; null: the machine's cores divided by its learners"
    )
    ray_address: str | None = Field(None, description="address of a running Ray cluster; null starts one here")
    cpus_per_learner: PositiveFloat = Field(0.5, description="CPU cores reserved for each learner")
    start_deadline_s: PositiveFloat = Field(900.0, description="seconds that start-up may take before the run fails")
    step_deadline_s: PositiveFloat = Field(3600.0, description="seconds that one wait in the loop may take")


class ClusterConfig(LearnersConfig):
    engines: PositiveInt = Field(1, description="vLLM engines")
    tensor_parallel: PositiveInt = Field(1, description="GPUs of one engine")
    min_engines: PositiveInt = Field(
        1, description="sampling waits while fewer engines than this are running; lost engines are replaced meanwhile"
    )
    placement: Literal["separate", "colocated"] = Field(
        "separate", description="engines and learners on different GPUs, or on the same GPUs"
    )
    offload_while_sampling: bool = Field(
        True,
        description="on shared GPUs: keep optimizer state and reference in host memory while the engines are awake",
    )
    gpus_per_node: PositiveInt = Field(
        8, description="GPUs per node, for --plan, which takes this machine's if it is not set; a run asks Ray"
    )
    gpu_memory_gib: PositiveFloat = Field(
        79.0, description="memory of a GPU, GiB, for --plan, which takes this machine's if it is not set"
    )
    peak_tflops: PositiveFloat | None = Field(
        None,
        description="bf16 TFLOP/s of a learner's device, for learner/mfu; null: by the GPU's name, none on CPU",
    )
    cpus_per_engine: PositiveFloat = Field(0.5, description="CPU cores reserved for each engine")


class PlanConfig(Section):
    """Measured or assumed numbers from which --plan estimates hours; a run does not read them."""

    engine_tokens_per_second: PositiveFloat | None = Field(
        None, description="sampled tokens per second of one engine: rollout/tokens_per_second / cluster.engines"
    )
    learner_tokens_per_second: PositiveFloat | None = Field(
        None, description="tokens per second of one learner in an update: learner/tokens_per_second / cluster.learners"
    )
    prompt_tokens: PositiveInt | None = Field(
        None, description="mean prompt length, tokens; null: data.max_prompt_tokens"
    )
    response_tokens: PositiveInt | None = Field(
        None, description="mean response length, tokens; null: rollout.max_response_tokens"
    )
