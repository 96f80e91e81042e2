"""Parameter counts against transformers' own models, and the memory of a GPU by hand calculation."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.check.memory import (
    GIB,
    Part,
    adapter_product_bytes,
    critic_memory,
    engine_memory,
    kv_cache,
    layer_activation_bytes,
    learner_memory,
    reward_model_memory,
    scalar_parameters,
    selective_bytes,
    total,
)
from rlhf.check.model_shape import ModelShape, model_shape
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig

QWEN25_1B5 = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA31_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA31_70B = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 259, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


# --- parameters ---


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", **SMALL},
        {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True},
        {"model_type": "qwen3", **SMALL, "head_dim": 32},
        {"model_type": "qwen3", **SMALL},
        {"model_type": "qwen3", **SMALL, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
        {"model_type": "llama", **SMALL},
        {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}},
        {"model_type": "mistral", **SMALL, "head_dim": 8},
        {"model_type": "mistral", **SMALL, "head_dim": None},
        {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "qwen3_moe", **SMALL, "head_dim": 16, **QWEN3_MOE},
        {"model_type": "qwen3_moe", **SMALL, "head_dim": 16, **QWEN3_MOE, "mlp_only_layers": [1]},
        {"model_type": "qwen3_moe", **SMALL, "head_dim": 16, **QWEN3_MOE, "decoder_sparse_step": 2},
        QWEN25_1B5,
        LLAMA31_8B,
        LLAMA31_70B,
        QWEN3_8B,
    ],
    ids=lambda config: f"{config['model_type']}-{config['hidden_size']}",
)
def test_the_count_is_that_of_the_model_that_transformers_builds(config: dict[str, Any]) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {name: value for name, value in config.items() if name != "model_type"}
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **sizes))
    model.tie_weights()
    assert model_shape(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba", **SMALL}, "model_type='mamba'"),
        ({}, "model_type=None"),
        ({"model_type": "llama", "hidden_size": 64}, "no num_attention_heads"),
        ({"model_type": "mixtral", **SMALL}, "no num_experts"),
    ],
)
def test_a_model_that_cannot_be_counted_says_why(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        model_shape(config)
    assert message in str(caught.value)


# --- memory ---


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A config like the 8B example's: 2,048 + 2,048 tokens, budget 8,192, reference, ZeRO 2, checkpointing."""
    base = {
        "run": {"dir": "x", "steps": 1},
        "model": {"path": "x", "gradient_checkpointing": True},
        "data": {"train": "x.jsonl", "max_prompt_tokens": 2048},
        "rollout": {"prompts_per_step": 48, "samples_per_prompt": 16, "max_response_tokens": 2048},
        "algo": {"kl_coef": 0.03},
        "learner": {"max_tokens_per_microbatch": 8192},
        "cluster": {"engines": 1, "tensor_parallel": 2, "learners": 6, "gpu_memory_gib": 80.0},
    }
    file = tmp_path / "base.yaml"
    file.write_text(yaml.safe_dump(base))

    def build(*overrides: str, schema: type[GRPOConfig] = GRPOConfig) -> GRPOConfig:
        return load_config(schema, [str(file)], overrides)

    return build


def learner_state(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """What a learner holds between updates."""
    return tuple(part for part in learner_memory(shape, config) if part.use != "work")


def gigabytes(parts: tuple[Part, ...]) -> dict[str, float]:
    """Bytes / 10^9 by name, rounded to 10 MB."""
    return {part.name: round(part.size / 1e9, 2) for part in parts}


def test_8b_on_6_learners_at_zero_2_keeps_whole_weights_and_a_sixth_of_the_rest(make: Any) -> None:
    config, shape = make(), model_shape(LLAMA31_8B)  # 8.03 billion parameters
    assert gigabytes(learner_state(shape, config)) == {
        "weights, bfloat16": 16.06,
        "master weights, float32": 5.35,
        "Adam's two moments, float32": 10.71,
        "reference, bfloat16": 16.06,
    }
    work = gigabytes(learner_memory(shape, config))
    assert work["gradients, float32"] == 5.35
    # two buckets of a quarter of a billion, and the embedding of 0.53 billion, flattened
    assert work["gradients, added and reduced"] == 7.40
    assert total(learner_memory(shape, config)) / GIB == pytest.approx(64, abs=1)


@pytest.mark.parametrize(
    ("device", "dtype", "stage", "held"),
    [("cuda", "bfloat16", 2, 1.0), ("cuda", "bfloat16", 1, 0.0), ("cpu", "float32", 2, 0.0)],
)
def test_the_reduction_buffers_of_a_tiny_model_have_full_size_on_a_gpu(
    make: Any, device: str, dtype: str, stage: int, held: float
) -> None:
    tiny = model_shape({"model_type": "qwen2", **SMALL})
    config = make(f"cluster.device={device}", f"model.dtype={dtype}", f"learner.zero_stage={stage}")
    assert gigabytes(learner_memory(tiny, config))["gradients, added and reduced"] == held


@pytest.mark.parametrize(
    ("stage", "learners", "reduced", "held"),
    [
        (2, 6, "bfloat16", 0.5e9 * 2 + 0.525e9 * 2),  # two buckets; the embedding, larger than one, flattened
        (2, 6, "float32", 0.5e9 * 2 + 0.525e9 * (2 + 4)),  # and cast
        (1, 6, "bfloat16", 1.025e9 * (4 + 2)),  # half a billion and the embedding, flattened in float32 and cast
        (1, 6, "float32", 1.025e9 * 4),
        (1, 1, "bfloat16", 1.025e9 * 4),
        (2, 1, "bfloat16", 0.0),  # nothing is copied
    ],
)
def test_what_is_flattened_and_cast_for_a_reduction_is_counted(
    make: Any, stage: int, learners: int, reduced: str, held: float
) -> None:
    shape = model_shape(LLAMA31_8B)
    keys = [f"learner.zero_stage={stage}", f"learner.reduce_dtype={reduced}", f"cluster.learners={learners}"]
    parts = {part.name: part for part in learner_memory(shape, make(*keys))}
    added = parts["gradients, added and reduced"].size - 4 * shape.parameters / learners
    assert added == pytest.approx(held, rel=1e-3, abs=1)


def test_gradients_of_the_embedding_count_where_they_are_more_than_the_activations(make: Any) -> None:
    few = make("learner.max_tokens_per_microbatch=256", "data.max_prompt_tokens=64", "rollout.max_response_tokens=64")
    parts = {part.name: part.size for part in learner_memory(model_shape(QWEN25_1B5), few)}
    ends = 2 * 2 * 151_936 * 1536  # of the tied head and the embedding
    before = parts["activations, checkpointed"] + parts["head: tiles of logits, gradients"]
    assert parts["embedding gradients"] == pytest.approx(ends - before)
    assert parts["embedding gradients"] > 0
    parts = {part.name: part.size for part in learner_memory(model_shape(QWEN25_1B5), make())}
    assert "embedding gradients" not in parts


def test_70b_on_64_learners_at_zero_3_divides_everything(make: Any) -> None:
    config = make("learner.zero_stage=3", "cluster.learners=64", "cluster.engines=8", "cluster.tensor_parallel=8")
    shape = model_shape(LLAMA31_70B)
    assert gigabytes(learner_state(shape, config)) == {
        "weights, bfloat16": 2.20,
        "master weights, float32": 4.41,
        "Adam's two moments, float32": 8.82,
        "reference, bfloat16": 2.20,
    }
    work = gigabytes(learner_memory(shape, config))
    assert (work["gradients, float32"], work["gathered weights"]) == (4.41, 2.0)
    assert work["activations, checkpointed"] == 14.09
    assert gigabytes(engine_memory(shape, config))["weights, bfloat16"] == 17.64
    assert kv_cache(shape, config)[0] == 40_960  # keys and values of 80 layers, one of the 8 heads on each GPU


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "master", "moments"),
    [(1, 16.06, 32.12, 5.35, 10.71), (2, 16.06, 5.35, 5.35, 10.71), (3, 2.68, 5.35, 5.35, 10.71)],
)
def test_zero_stages_divide_optimizer_then_gradients_then_weights(
    make: Any, stage: int, weights: float, gradients: float, master: float, moments: float
) -> None:
    parts = gigabytes(learner_memory(model_shape(LLAMA31_8B), make(f"learner.zero_stage={stage}")))
    assert parts["weights, bfloat16"] == weights
    assert parts["gradients, float32"] == gradients
    assert (parts["master weights, float32"], parts["Adam's two moments, float32"]) == (master, moments)


def test_without_zero_every_learner_holds_everything(make: Any) -> None:
    config = make("learner.zero_stage=0", "model.dtype=float32", "cluster.device=cpu")
    parts = gigabytes(learner_memory(model_shape(LLAMA31_8B), config))
    assert parts["Adam's two moments, float32"] == 64.24
    assert "master weights, float32" not in parts  # the weights are the master weights


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_learner_has_the_same_state_at_every_stage_and_more_learners_never_need_more(make: Any, stage: int) -> None:
    shape = model_shape(LLAMA31_8B)
    configs = [make(f"learner.zero_stage={stage}", f"cluster.learners={count}") for count in (1, 2, 4, 64)]
    assert learner_state(shape, configs[0]) == learner_state(shape, make("cluster.learners=1"))
    memory = [total(learner_memory(shape, config)) for config in configs]
    assert memory == sorted(memory, reverse=True)


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_of_a_critic_has_as_many_parameters_as_the_one_that_transformers_builds(tied: bool) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {**SMALL, "tie_word_embeddings": tied}
    with init_empty_weights():
        config = AutoConfig.for_model("llama", **sizes, num_labels=1)
        model = AutoModelForSequenceClassification.from_config(config)
    shape = model_shape({"model_type": "llama", **sizes})
    assert scalar_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_a_critic_has_its_own_zero_stage_and_no_reference(make: Any) -> None:
    config = make("critic.zero_stage=3", schema=PPOConfig)
    parts = gigabytes(critic_memory(model_shape(LLAMA31_8B), config))  # 7.50 billion parameters
    assert parts["weights, bfloat16"] == 2.50
    assert parts["Adam's two moments, float32"] == 10.01
    assert parts["gradients, float32"] == 5.0
    assert "reference, bfloat16" not in parts


def test_a_reward_model_holds_weights_and_the_activations_of_one_layer(make: Any) -> None:
    shape = model_shape(LLAMA31_8B)
    parts = gigabytes(reward_model_memory(shape, make("reward_model={path: r, max_tokens_per_batch: 1000}")))
    assert parts["weights, bfloat16"] == 15.01
    assert parts["activations of one layer"] == 0.20


def test_no_reference_is_counted_where_none_is_loaded(make: Any) -> None:
    shape = model_shape(LLAMA31_8B)
    assert "reference, bfloat16" not in gigabytes(learner_state(shape, make("algo.kl_coef=0")))
    assert "reference, bfloat16" in gigabytes(learner_state(shape, make("algo.kl_coef=0", "algo.log_kl=true")))


def test_a_teacher_is_counted_by_its_own_shape_and_divided_at_zero_3(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = model_shape(LLAMA31_8B)
    monkeypatch.setattr("rlhf.check.memory.shape_at", lambda path: shape if path == "large" else None)
    teacher = "algo.teacher={path: large}"
    assert gigabytes(learner_state(shape, make(teacher)))["algo.teacher.path, bfloat16"] == 16.06
    shared = make(teacher, "learner.zero_stage=3", "cluster.learners=4")
    assert gigabytes(learner_memory(shape, shared))["algo.teacher.path, bfloat16"] == pytest.approx(16.06 / 4, abs=0.01)
    (unknown,) = (
        part for part in learner_memory(shape, make("algo.teacher={path: org/other}")) if "teacher" in part.name
    )
    assert (unknown.size, unknown.name) == (0, "algo.teacher.path, not counted: size not known")


def test_products_of_adapters_are_kept_by_selective_checkpointing_too(make: Any) -> None:
    shape = model_shape(LLAMA31_8B)
    assert adapter_product_bytes(shape, 8, b=2) == 2 * (4096 + 2 * 1024 + 2 * 4096 + 2 * 14336 + 7 * 8)
    keys = ("model.gradient_checkpointing=selective", "cluster.tensor_parallel=1")
    plain, adapted = (
        next(part.size for part in learner_memory(shape, make(*keys, *more)) if part.name == "activations, selective")
        for more in ((), ("model.lora={rank: 8}",))
    )
    assert adapted - plain == 8192 * 32 * adapter_product_bytes(shape, 8, b=2)


def test_an_offloaded_optimizer_takes_no_gpu_memory(make: Any) -> None:
    parts = gigabytes(learner_memory(model_shape(LLAMA31_8B), make("learner.offload_optimizer=true")))
    assert parts["optimizer, in host memory"] == 0
    assert "master weights, float32" not in parts


def test_without_checkpointing_every_layer_keeps_its_activations(make: Any) -> None:
    shape = model_shape(LLAMA31_8B)
    checkpointed = gigabytes(learner_memory(shape, make()))["activations, checkpointed"]
    plain = gigabytes(learner_memory(shape, make("model.gradient_checkpointing=false")))["activations"]
    kept = gigabytes(learner_memory(shape, make("model.gradient_checkpointing=selective")))["activations, selective"]
    tiled = gigabytes(learner_memory(shape, make("model.gradient_checkpointing=tiled")))["activations, tiled"]
    # 8,192 tokens x 32 layers x 208 KiB, or x (32 inputs of 8 KiB + 208 KiB), or x (32 layers of 100.1 KiB + 208 KiB);
    # a tile is half of them, and half of the MLP's 112 KiB is not kept
    assert (plain, checkpointed, kept, tiled) == (55.83, 3.89, 28.62, 3.42)


def test_the_kv_cache_of_8b_at_tensor_parallel_2(make: Any) -> None:
    shape, config = model_shape(LLAMA31_8B), make("rollout.gpu_memory_utilization=0.9")
    # 0.9 x 80 GiB - 8.03 GB of weights - 3 GiB
    assert gigabytes(engine_memory(shape, config))["KV cache"] == 66.06
    # keys and values of 32 layers, 4 of the 8 heads on each GPU
    assert kv_cache(shape, config) == (65_536, 1_007_963)


def test_fewer_kv_heads_than_gpus_are_held_by_each_of_them(make: Any) -> None:
    shape = model_shape(QWEN25_1B5)  # 2 heads
    for gpus in (2, 4):
        assert kv_cache(shape, make(f"cluster.tensor_parallel={gpus}"))[0] == 14_336


def test_latent_attention_caches_one_latent_per_token_and_layer_whole_on_each_gpu(make: Any) -> None:
    # DeepSeek-V3; arXiv:2505.09343, table 1: 70.272 KB per token
    sizes = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "vocab_size": 129280}
    shape = model_shape({"model_type": "deepseek_v3", **sizes, **latent}, {"model.norm.weight": (7168,)})
    for gpus in (1, 8):
        assert kv_cache(shape, make(f"cluster.tensor_parallel={gpus}"))[0] == 70_272


def test_on_cpu_the_kv_cache_is_what_the_config_says(make: Any) -> None:
    config = make("cluster.device=cpu", "rollout.kv_cache_gib=2", "model.dtype=float32", "cluster.tensor_parallel=1")
    assert kv_cache(model_shape(QWEN25_1B5), config) == (56 * 1024, 37_449)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "b"), [("bfloat16", 2), ("float32", 4)])
def test_the_activations_of_a_layer_are_what_autograd_saves_for_it(kind: str, dtype: str, b: int) -> None:
    sizes = {**SMALL, "hidden_size": 256, "intermediate_size": 704, "head_dim": 64}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    tokens = 128
    two_layers = saved_bytes(kind, {**sizes, "num_hidden_layers": 3}, dtype, tokens)
    two_layers -= saved_bytes(kind, {**sizes, "num_hidden_layers": 1}, dtype, tokens)
    estimate = layer_activation_bytes(model_shape({"model_type": kind, **sizes}), b=b)
    assert estimate == pytest.approx(two_layers / 2 / tokens, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "b"), [("bfloat16", 2), ("float32", 4)])
def test_the_peak_of_selective_checkpointing_is_what_all_layers_keep_and_the_recomputation_of_one(
    kind: str, dtype: str, b: int
) -> None:
    sizes = {**SMALL, "hidden_size": 256, "intermediate_size": 704, "head_dim": 64}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    tokens = 512
    two, six = (peak_bytes(kind, {**sizes, "num_hidden_layers": count}, dtype, tokens) / tokens for count in (2, 6))
    shape = model_shape({"model_type": kind, **sizes})
    kept, layer = selective_bytes(shape, b=b), layer_activation_bytes(shape, b=b)
    assert kept == pytest.approx((six - two) / 4, rel=0.03)
    assert 2 * kept + layer == pytest.approx(two, rel=0.1)


def peak_bytes(kind: str, sizes: dict[str, Any], dtype: str, tokens: int) -> int:
    """The most memory that forward and backward of one sequence allocate, with gradients in place."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf.learner.packed_attention import PACKED
    from rlhf.learner.policy_model import prepare_transformer
    from rlhf.learner.segments import row_of, segments_of

    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=PACKED)
    prepare_transformer(model, gradient_checkpointing="selective")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids, positions = torch.ones(1, tokens, dtype=torch.long), torch.arange(tokens)[None]
    segments = segments_of(np.array([0, tokens]), np.zeros(1, np.int64), torch.device("cpu"))
    gc.collect()  # models of tests before this one would be freed in the middle, and count as less
    with torch.profiler.profile(profile_memory=True) as profile, row_of(segments):
        out = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, segments=segments)
        out.last_hidden_state.backward(torch.ones_like(out.last_hidden_state))
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def saved_bytes(kind: str, sizes: dict[str, Any], dtype: str, tokens: int) -> int:
    """Memory that autograd keeps in a forward pass over one sequence, parameters not counted."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in parameters:
            kept[pointer] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
