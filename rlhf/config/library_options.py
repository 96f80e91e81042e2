"""Which options of vLLM and DeepSpeed a config may pass on.

Every argument of vLLM is decided here: the run sets it (OWN_KEYS), it may be given (ACCEPTED), or it is refused with a
reason (REFUSED). `learner.deepspeed` takes what changes the speed and the memory of an update: the result is a promise
of this program.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from rlhf.config.base import suggest
from rlhf.config.vllm_source import vllm_source

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


def _by_name(names_of: dict[str, str]) -> dict[str, str]:
    """Reason -> names, as name -> reason."""
    return {name: reason for reason, names in names_of.items() for name in names.split()}


# Options that change log-probs; all others are held to the bounds of an engine without options.
_NUMBERS = "log-probs, which the canary judges"
# What each option that is passed on can change. A new one belongs here once it is known that it changes neither what is
# sampled nor which weights and keys that is computed from.
ACCEPTED = _by_name(
    {
        _NUMBERS: """
        quantization quantization_config allow_deprecated_quantization kv_cache_dtype kv_cache_dtype_skip_layers
        attention_backend attention_config linear_backend moe_backend sparse_indexer_topk_backend ir_op_priority
        kernel_config compilation_config optimization_level model_impl gdn_prefill_backend kda_prefill_backend
        kda_decode_backend mamba_config mamba_backend mamba_ssu_algorithm mamba_cache_dtype mamba_ssm_cache_dtype
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds use_replayssm replayssm_buffer_len
        """,
        "how the files of model.path are read": """
        download_dir load_format safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size model_loader_extra_config pt_load_map_location use_tqdm_on_load
        max_parallel_loading_workers enable_ep_weight_filter
        """,
        "memory": """
        block_size num_gpu_blocks_override disable_hybrid_kv_cache_manager mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint prefix_match_unit prefix_caching_hash_algo
        prefix_cache_retention_interval swa_bounded_replay offload_backend cpu_offload_gb cpu_offload_params
        offload_group_size offload_num_in_group offload_prefetch_step offload_params sleep_mode_offload_cudagraph
        enable_cumem_allocator enable_nccl_comm_suspend
        """,
        "speed, and the order of requests": """
        max_num_batched_tokens max_num_scheduled_tokens max_num_active_seqs long_prefill_token_threshold
        long_prefill_token_threshold_adaptive enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl
        prefill_schedule_interval watermark async_scheduling stream_interval renderer_num_workers performance_mode
        cudagraph_capture_sizes max_cudagraph_capture_size disable_sliding_window disable_cascade_attn
        enable_flashinfer_autotune use_fp64_gumbel
        """,
        "how the GPUs of an engine share its work": """
        decode_context_parallel_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling all2all_backend
        expert_placement_strategy enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
        disable_custom_all_reduce enable_shm_tensor_arena numa_bind numa_bind_nodes numa_bind_cpus
        distributed_timeout_seconds cpu_distributed_timeout_seconds
        """,
        "what is logged and measured": """
        served_model_name max_logprobs aggregate_engine_logging enable_log_requests logging_config log_level
        log_config_file show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
        per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets
        cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
        jit_monitor_mode jit_monitor_verbose profiler_config ray_workers_use_nsight shutdown_timeout
        fail_on_environ_validation
        """,
    }
)
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
# Why an argument of vLLM is not passed on. Weights change after every step, which vLLM's users do not expect of it.
REFUSED = _by_name(
    {
        # A reset of vLLM's prefix cache does not reach every connector (vLLM issue 57970), and log-probs of prompts,
        # which the canary compares, never come from a cache.
        "keys and values of old weights could outlive an update there, and no check would see it": """
        kv_transfer_config kv_offloading_size kv_offloading_backend kv_events_config
        """,
        "it could change what is sampled, and the learner would not know of it": """
        logits_processors override_generation_config watermark_config reasoning_config enable_trace_replay
        diffusion_config
        """,
        "the learner needs the log-probs of the distribution that is sampled from": "logprobs_mode",
        # Measured with n-grams on vLLM 0.32's CPU engine: in 7 of 128 responses a log-prob was not finite.
        "vLLM's log-probs of speculated tokens are not always those of the sampled tokens": """
        speculative_config spec_method spec_model spec_tokens
        """,
        "with it vLLM gives no log-probs of prompts, which the canary compares": "kv_sharing_fast_prefill",
        "engine, learner and driver use one model, that of model.path": """
        hf_overrides hf_config_path config_format model_weights model_class_overrides revision code_revision tokenizer
        tokenizer_mode tokenizer_revision generation_config ignore_patterns
        """,
        "the learners send their weights in a way of their own": "weight_transfer_config",
        "the learners send all weights": "sleep_preserve_parameter_names engram_config",
        "vLLM would load new weights of experts where they were at the start": "enable_eplb eplb_config",
        "it receives the learners' weights": "worker_cls worker_extension_cls",
        "the canary must not wait behind the rollouts": "scheduling_policy scheduler_cls",
        "the run queues its requests itself": "max_num_queued_reqs max_num_queued_tokens",
        "an engine is one group of cluster.tensor_parallel GPUs": """
        distributed_executor_backend pipeline_parallel_size prefill_context_parallel_size nnodes node_rank master_addr
        master_port device_ids data_parallel_rank data_parallel_start_rank data_parallel_size_local
        data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb data_parallel_backend dp_sync_interval
        disable_nccl_for_dp_synchronization enable_elastic_ep elastic_ep_max_dp_size
        """,
        "the run itself sees to engines that fail": "enable_fault_tolerance fault_tolerance_config",
        "what the engines did is measured and logged by the run": "disable_log_stats",
        "an engine of a run samples": "runner convert pooler_config",
        "an engine of a run gets token ids": "enable_prompt_embeds io_processor_plugin",
        "stop strings and messages need the tokenizer": "skip_tokenizer_init tokens_only",
        "messages are read by the run, with rollout.tool_parser": """
        reasoning_parser reasoning_parser_plugin structured_outputs_config
        """,
        "only plugins of vLLM for other hardware read it": "additional_config",
        "config.yaml of the run would hold it, and the environment variable HF_TOKEN serves instead": "hf_token",
        "the run uses only the text part of a model that reads images": """
        language_model_only limit_mm_per_prompt allowed_local_media_path allowed_media_domains enable_mm_embeds
        interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
        mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize
        enable_mm_processor_stats ec_transfer_config ec_manager_config
        """,
    }
)


def check_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options as they are; ValueError for one that is not among ACCEPTED."""
    for name in options:
        given = f"rollout.engine.{name}"
        if name in OWN_KEYS:
            raise ValueError(f"{given}: the run sets it by {OWN_KEYS[name]}. Set that instead.")
        if name in REFUSED:
            raise ValueError(f"{given}: {REFUSED[name]}, so it is refused. Remove it.")
        if name in ACCEPTED:
            continue
        if name in vllm_arguments():
            raise ValueError(f"{given}: what it changes in this version of vLLM has not been examined. Remove it.")
        names = (*ACCEPTED, *OWN_KEYS, *REFUSED)
        raise ValueError(f"{given}: vLLM's engine has no such argument. {suggest(name, names, 'rollout.engine.')}")
    if options.get("load_format") == "dummy":
        raise ValueError("rollout.engine.load_format=dummy: the weights would be random. Remove it.")
    return options


def changes_numbers(options: dict[str, Any]) -> bool:
    """Whether an engine with these options may differ from the learner by more than the rounding of their type."""
    return any(ACCEPTED[name] == _NUMBERS for name in options)


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
