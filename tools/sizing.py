"""The sizing table of docs/clusters.md: layouts of four models on 8 to 128 GPUs, from the arithmetic of --plan.

    python tools/sizing.py

Half of the GPUs train, half sample. Each row has the first that fits of ZeRO 2, ZeRO 3 and ZeRO 3 with the optimizer in
host memory, and the smallest engine whose KV cache holds 4 groups at full length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf.check.memory import GIB, engine_memory, kv_cache, learner_memory, total
from rlhf.check.model_shape import ModelShape, model_shape
from rlhf.config.grpo import GRPOConfig

GPUS_PER_NODE = 8
GPUS = (8, 16, 32, 64, 128)
GROUPS = 4  # in an engine at once, at full length
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5 1.5B": {
        "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Llama 3.1 8B": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    },
    "Qwen2.5 32B": {
        "model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064,
    },
    "Llama 3.1 70B": {
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
    },
}  # fmt: skip
ZERO = ((2, False), (3, False), (3, True))  # stage, optimizer in host memory


def config(*, learners: int, engines: int, tensor_parallel: int, stage: int, offload: bool) -> GRPOConfig:
    """1,024 + 3,072 tokens, 16 samples per prompt, microbatches of 8,192 tokens, a reference, checkpointing."""
    return GRPOConfig.model_validate(
        {
            "run": {"dir": "runs/x", "steps": 100},
            "model": {"path": "x/x", "gradient_checkpointing": True},
            "data": {"train": "x.jsonl", "max_prompt_tokens": 1024},
            "rollout": {"prompts_per_step": 128, "samples_per_prompt": 16, "max_response_tokens": 3072},
            "algo": {"kl_coef": 0.01},
            "learner": {"max_tokens_per_microbatch": 8192, "zero_stage": stage, "offload_optimizer": offload},
            "cluster": {"learners": learners, "engines": engines, "tensor_parallel": tensor_parallel},
        }
    )


def layout(shape: ModelShape, gpus: int) -> GRPOConfig | None:
    """The first layout that fits; None if there is none."""
    half = gpus // 2
    sampling = None
    for width in (1, 2, 4, 8):
        if width <= min(half, GPUS_PER_NODE):
            sampling = config(learners=half, engines=half // width, tensor_parallel=width, stage=2, offload=False)
            _, kv_tokens = kv_cache(shape, sampling)
            if kv_tokens >= GROUPS * sampling.rollout.samples_per_prompt * sampling.max_sequence_tokens:
                break
            sampling = None
    if sampling is None:
        return None
    cluster = sampling.cluster
    for stage, offload in ZERO:
        candidate = config(
            learners=half, engines=cluster.engines, tensor_parallel=cluster.tensor_parallel, stage=stage,
            offload=offload,
        )  # fmt: skip
        if total(learner_memory(shape, candidate)) <= cluster.gpu_memory_gib * GIB:
            return candidate
    return None


def table() -> Iterator[str]:
    yield "| model | GPUs | learners | of a learner, GiB | engines x GPUs | weights on each, GiB | KV cache, tokens |"
    yield "|---|---|---|---|---|---|---|"
    for name, sizes in MODELS.items():
        shape = model_shape(sizes)
        for gpus in GPUS:
            chosen = layout(shape, gpus)
            if chosen is None:
                yield f"| {name} | {gpus} | does not fit | | | | |"
                continue
            cluster, (weights, *_), (_, tokens) = chosen.cluster, engine_memory(shape, chosen), kv_cache(shape, chosen)
            zero = f"ZeRO {chosen.learner.zero_stage}" + ", offload" * chosen.learner.offload_optimizer
            yield (
                f"| {name} | {gpus} | {cluster.learners}, {zero} | {total(learner_memory(shape, chosen)) / GIB:.1f} "
                f"| {cluster.engines} x {cluster.tensor_parallel} | {weights.size / GIB:.1f} "
                f"| {tokens:,} |"
            )


if __name__ == "__main__":
    print("\n".join(table()))
