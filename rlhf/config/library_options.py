"""Which options of vLLM and DeepSpeed a config may pass on.

`rollout.engine` takes all arguments that vLLM has, but those that the run sets itself. `learner.deepspeed` takes what
changes the speed and the memory of an update: the result is a promise of this program.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from rlhf.config.base import suggest
from rlhf.config.vllm_source import vllm_source

_LORA = (
    "enable_lora", "max_loras", "max_lora_rank", "lora_target_modules", "lora_dtype", "fully_sharded_loras",
    "default_mm_loras",
)  # fmt: skip
# Argument -> the key that sets it, for the learner and --plan too.
OWN_KEYS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "run.seed",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "rollout.max_concurrent_sequences",
    "tensor_parallel_size": "cluster.tensor_parallel",
    "data_parallel_size": "cluster.engines",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "rollout.on_weight_update",
    "enable_sleep_mode": "cluster.placement",
    "enable_return_routed_experts": "learner.router_replay",
    "return_sampling_mask": "rollout.top_p and rollout.top_k and rollout.min_p",
    **dict.fromkeys(_LORA, "model.lora"),
}
# Options that change log-probs; all others are held to the bounds of an engine without options.
NUMERIC = frozenset((
    "quantization", "quantization_config", "kv_cache_dtype", "attention_backend", "attention_config", "linear_backend",
    "moe_backend", "kernel_config", "mamba_config", "compilation_config",
))  # fmt: skip
# Sections and switches of DeepSpeed's config, and the fields of its zero_optimization.
DEEPSPEED = ("zero_optimization", "aio", "comms_logger", "flops_profiler", "memory_breakdown", "wall_clock_breakdown")
ZERO = (
    "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "overlap_comm",
    "allgather_partitions", "allgather_bucket_size", "sub_group_size", "round_robin_gradients",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    "memory_efficient_linear", "log_trace_cache_warnings", "enable_sanity_checks",
)  # fmt: skip
DEEPSPEED_KEYS = {
    "gradient_clipping": "max_grad_norm",
    "communication_data_type": "reduce_dtype",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer": "offload_optimizer",
}
_ENGINE_IS_ONE_GROUP = "an engine is one group of cluster.tensor_parallel GPUs"
# Measured with n-grams on vLLM 0.32's CPU engine: in 7 of 128 responses a log-prob was not finite.
_SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_ONE_MODEL = "engine, learner and driver use one model, that of model.path"
REFUSED = {
    "logprobs_mode": "the learner needs the log-probs of the distribution that is sampled from",
    "scheduling_policy": "the canary must not wait behind the rollouts",
    "distributed_executor_backend": _ENGINE_IS_ONE_GROUP,
    "pipeline_parallel_size": _ENGINE_IS_ONE_GROUP,
    "nnodes": _ENGINE_IS_ONE_GROUP,
    "weight_transfer_config": "the learners send their weights in a way of their own",
    "worker_extension_cls": "it receives the learners' weights",
    "disable_log_stats": "what the engines did is measured and logged by the run",
    "runner": "an engine of a run samples",
    "convert": "an engine of a run samples",
    "hf_overrides": _ONE_MODEL,
    "revision": _ONE_MODEL,
    "code_revision": _ONE_MODEL,
    "tokenizer": _ONE_MODEL,
    "tokenizer_revision": _ONE_MODEL,
    "generation_config": _ONE_MODEL,
    **dict.fromkeys(("language_model_only", "limit_mm_per_prompt"), "of a model that reads images only the text runs"),
    "skip_tokenizer_init": "stop strings and messages need the tokenizer",
    **dict.fromkeys(_SPECULATION, "vLLM's log-probs of speculated tokens are not always those of the sampled tokens"),
}


def check_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options as they are; ValueError for one that the run sets itself, or that vLLM does not have."""
    known = vllm_arguments()
    for name in options:
        given = f"rollout.engine.{name}"
        if name in OWN_KEYS:
            raise ValueError(f"{given}: the run sets it by {OWN_KEYS[name]}. Set that instead.")
        if name in REFUSED:
            raise ValueError(f"{given}: {REFUSED[name]}, so it cannot be changed. Remove it.")
        if known and name not in known:
            raise ValueError(f"{given}: vLLM's engine has no such argument. {suggest(name, known, 'rollout.engine.')}")
    return options


def changes_numbers(options: dict[str, Any]) -> bool:
    """Whether an engine with these options may differ from the learner by more than the rounding of their type."""
    return not NUMERIC.isdisjoint(options)


def check_deepspeed_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options as they are; ValueError for one that is not among those that leave the result of an update alone."""
    zero = options.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f"zero_optimization={zero}: it is a section, such as {{overlap_comm: false}}.")
    for known, prefix, given in ((DEEPSPEED, "", options), (ZERO, "zero_optimization.", zero)):
        for name in given:
            if name in known:
                continue
            if own := DEEPSPEED_KEYS.get(prefix + name):
                raise ValueError(f"{prefix}{name}: the run sets it by {own} of the same section.")
            raise ValueError(
                f"{prefix}{name}: not an option that leaves the result of an update alone. "
                f"{suggest(name, known, prefix)}"
            )
    return options


@cache
def vllm_arguments() -> tuple[str, ...]:
    """The names of the arguments of vLLM's engine, in its order; () if vLLM is not installed."""
    return tuple(
        field.target.id
        for node in vllm_source("engine/arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    )
