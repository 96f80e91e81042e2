"""Which options of vLLM and DeepSpeed a config may pass on.

An argument of vLLM is set by the run (OWN_KEYS), passed on (CHANGE_NUMBERS, CHANGE_NO_NUMBERS), or refused.
`learner.deepspeed` takes options for the speed and the memory of an update; its result is decided by this program.
"""

from __future__ import annotations

from typing import Any

from rlhf.config.base import suggest

_LORA = """
enable_lora max_loras max_lora_rank lora_target_modules lora_dtype fully_sharded_loras default_mm_loras max_cpu_loras
enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
max_lora_cls_labels
"""
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
    "aux_output_config": "learner.router_replay",
    "return_sampling_mask": "rollout.top_p and rollout.top_k and rollout.min_p",
    **dict.fromkeys(_LORA.split(), "model.lora"),
}
# Options that may change log-probs: the canary judges them. All others have the bounds of an engine without options.
CHANGE_NUMBERS = """
quantization quantization_config allow_deprecated_quantization kv_cache_dtype kv_cache_dtype_skip_layers
attention_backend attention_config linear_backend moe_backend sparse_indexer_topk_backend ir_op_priority kernel_config
compilation_config optimization_level model_impl gdn_prefill_backend kda_prefill_backend kda_decode_backend
mamba_config mamba_backend mamba_ssu_algorithm mamba_cache_dtype mamba_ssm_cache_dtype
enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds use_replayssm replayssm_buffer_len
"""
# Options that change how files are read, memory, speed, the use of an engine's GPUs, or logs. A new one belongs here
# once it is known that it changes neither what is sampled nor the weights and keys that this is computed from.
CHANGE_NO_NUMBERS = """
download_dir load_format safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
model_loader_extra_config pt_load_map_location use_tqdm_on_load max_parallel_loading_workers enable_ep_weight_filter
block_size num_gpu_blocks_override disable_hybrid_kv_cache_manager mamba_block_size mamba_cache_mode
enable_mamba_shared_prefix_checkpoint prefix_match_unit prefix_caching_hash_algo prefix_cache_retention_interval
swa_bounded_replay offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group
offload_prefetch_step offload_params sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend
max_num_batched_tokens max_num_scheduled_tokens max_num_active_seqs long_prefill_token_threshold
long_prefill_token_threshold_adaptive enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl
prefill_schedule_interval watermark async_scheduling stream_interval renderer_num_workers performance_mode
cudagraph_capture_sizes max_cudagraph_capture_size disable_sliding_window disable_cascade_attn
enable_flashinfer_autotune use_fp64_gumbel decode_context_parallel_size dcp_comm_backend dcp_q_replicate
dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_hc_sp enable_expert_parallel
enable_batch_sharded_sampling all2all_backend expert_placement_strategy enable_dbo ubatch_size
dbo_decode_token_threshold dbo_prefill_token_threshold disable_custom_all_reduce enable_shm_tensor_arena numa_bind
numa_bind_nodes numa_bind_cpus distributed_timeout_seconds cpu_distributed_timeout_seconds served_model_name
max_logprobs aggregate_engine_logging enable_log_requests logging_config log_level log_config_file
show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose profiler_config
ray_workers_use_nsight shutdown_timeout fail_on_environ_validation
"""
# All others are refused; these for a reason of their own.
_OLD_KEYS = "keys and values of old weights could outlive an update there, and no check would see it"
REFUSED = {
    "kv_transfer_config": _OLD_KEYS,
    "kv_offloading_size": _OLD_KEYS,
    "speculative_config": "its log-probs were not always finite (n-grams on the CPU engine of vLLM 0.32)",
    "kv_sharing_fast_prefill": "it gives no log-probs of prompts",
    "enable_eplb": "vLLM would load new expert weights into the old places after it has moved experts",
    "override_generation_config": "it could change what is sampled, and the learner would not know of it",
    "hf_token": "config.yaml would hold it; set the environment variable HF_TOKEN",
}
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


def check_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options. Raise ValueError if one is not passed on to vLLM."""
    known = (*CHANGE_NUMBERS.split(), *CHANGE_NO_NUMBERS.split())
    for name in options:
        given = f"rollout.engine.{name}"
        if name in OWN_KEYS:
            raise ValueError(f"{given}: the run sets it by {OWN_KEYS[name]}. Set that instead.")
        if name not in known:
            unknown = "unknown, or it may change what is sampled or which weights are used"
            remedy = "Remove it." if name in REFUSED else suggest(name, known, "rollout.engine.", cutoff=0.8)
            raise ValueError(f"{given}: {REFUSED.get(name, unknown)}. {remedy}")
    if options.get("load_format") == "dummy":
        raise ValueError("rollout.engine.load_format=dummy: the weights would be random. Remove it.")
    return options


def changes_numbers(options: dict[str, Any]) -> bool:
    """True if these options may change log-probs by more than rounding."""
    return any(name in CHANGE_NUMBERS.split() for name in options)


def check_deepspeed_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options. Raise ValueError if one may change the result of an update."""
    zero = options.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f"zero_optimization={zero}: it is a section, such as {{overlap_comm: false}}.")
    for known, prefix, given in ((DEEPSPEED, "", options), (ZERO, "zero_optimization.", zero)):
        for name in given:
            if name in known:
                continue
            if own := DEEPSPEED_KEYS.get(prefix + name):
                raise ValueError(f"{prefix}{name}: the run sets it by {own} of the same section.")
            reason = "not an option that leaves the result of an update alone"
            raise ValueError(f"{prefix}{name}: {reason}. {suggest(name, known, prefix)}")
    return options
