"""The shape of a model without torch: its parameters from the headers of its weight files, or else from config.json.

A formula counts six families from config.json alone. Any family is counted from a local or cached model folder. Models
that configs/ names need neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config.model_folder import local_model_folder, looks_local
from rlhf.data.model_files import USUAL_MODEL_TYPES, local_model_config, tensor_shapes, weight_files
from rlhf.plan.known_models import known_model

KV_HEADS_DEFAULT = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}  # transformers' defaults
QWEN3_HEAD_DIM = 128  # if its config.json has no head_dim

WITHOUT_ATTENTION = ("linear_attention", "mamba", "conv", "mlp", "moe")  # kinds of layers
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
NOT_LOADED = re.compile(r"^(?:model\.)?(?:mtp|visual|vision_tower|vision_model|multi_modal_projector)\.")
STORED_BUFFERS = re.compile(  # in moe_statics the bias is a parameter
    r"(?:^|\.)(?:(?<!moe_statics\.)e_score_correction_bias|expert_bias|layer_scalar|slope_rate|\w+_decay|inv_freq|"
    r"act_fn\.(?:beta|eps)|attn\.(?:masked_)?bias)$"
)
LOOK_UPS = re.compile(r"(?:^|\.)(?:embed\w*|word_embeddings|wte|wpe|lm_head)\.")  # no matrix product, or the head's

Stored = Mapping[str, tuple[int, ...]]  # name -> shape


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with grouped-query attention and a gated MLP.

    Letters as in the docstrings below: H hidden, V vocabulary, n query heads, k key/value heads of d each.
    """

    model_type: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    parameters: int
    active_parameters: int  # of the matrix products that one token goes through, without the head
    head_parameters: int  # 0 if the head is the input embedding, or if the files hold none
    qk_norm: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    sparse_layers: int = 0
    attention_layers: int | None = None  # None: all
    latent_dim: int = 0  # what latent attention caches per token and layer, for all heads; 0: it caches keys and values

    @property
    def layers_with_attention(self) -> int:
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def embedding_parameters(self) -> int:
        """V H of the input embedding."""
        return self.vocabulary * self.hidden

    def training_flops(self, lengths: Sequence[int], response_tokens: int, shared: Sequence[int]) -> float:
        """Floating-point operations of forward and backward, without recomputation (model FLOPs).

        6 per computed token and parameter (2 forward, 4 backward), the head only at response tokens, and causal
        attention: half of 12 L^2 n d per layer and sequence of L tokens.

        Args:
            shared: first tokens of each of `lengths` that were computed with another sequence.
        """
        squares = sum(length**2 for length in lengths) - sum(count**2 for count in shared)
        attention = 6 * self.layers_with_attention * self.heads * self.head_dim * squares
        head = 6 * self.embedding_parameters * response_tokens
        return float(6 * self.active_parameters * (sum(lengths) - sum(shared)) + head + attention)


def config_at(path: str) -> dict[str, Any] | None:
    """config.json of a model, or its sizes from our own table; None if neither has it."""
    found = local_model_config(path)
    return known_model(path) if found is None and not looks_local(path) else found


def source_at(path: str) -> str:
    """Where the sizes of a model come from; "" if they are not known."""
    if local_model_config(path) is None:
        return "rlhf's own table, as config.json is not on this machine" if config_at(path) is not None else ""
    try:
        return "the weight files" if stored_tensors(path) else "config.json"
    except ValueError:
        return ""


def shape_at(path: str) -> ModelShape | None:
    """The shape of a model; None if its sizes are not known, or neither files nor formula count it."""
    model = config_at(path)
    try:
        return None if model is None else model_shape(model, stored_tensors(path))
    except ValueError:
        return None


def stored_tensors(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the weight files of a local or cached model, from their headers; empty if a file is missing.

    Raises:
        ValueError: a file is not a safetensors file but, for example, a pointer of git-lfs.
    """
    files = weight_files(local_model_folder(path))
    if not all(file.is_file() for file in files):
        return {}
    return {name: shape for file in files for name, shape in tensor_shapes(file).items()}


def model_shape(config: Mapping[str, Any], stored: Stored | None = None) -> ModelShape:
    """Read a config.json.

    Args:
        stored: of `stored_tensors`. Without it a formula counts the parameters.

    Raises:
        ValueError: an architecture that no formula knows, without weight files, or a size that is missing.
    """
    config = config.get("text_config") or config
    kind = str(config.get("model_type"))
    if kind not in USUAL_MODEL_TYPES and not stored:
        raise ValueError(
            f"model_type={config.get('model_type')!r} is not one whose parameters the plan can count without the "
            f"model's weight files ({', '.join(USUAL_MODEL_TYPES)})"
        )
    try:
        hidden, heads = _key(config, "hidden_size", "n_embd"), _key(config, "num_attention_heads", "n_head")
        layers, vocabulary = _layers(config), config["vocab_size"]
        experts = _experts(kind, config, layers)
        intermediate = config.get("intermediate_size") or 4 * hidden
        if kind in USUAL_MODEL_TYPES and not experts:
            intermediate = config["intermediate_size"]
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}") from None
    rotary = config.get("qk_rope_head_dim", 0)
    latent = config.get("qk_nope_head_dim", 0) + rotary
    has_head = not _is_tied(config, stored) and (not stored or any("lm_head" in name for name in stored))
    shape = ModelShape(
        model_type=kind,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or KV_HEADS_DEFAULT.get(kind, heads),
        head_dim=latent or config.get("head_dim") or (QWEN3_HEAD_DIM if kind == "qwen3" else hidden // heads),
        intermediate=intermediate,
        parameters=0,
        active_parameters=0,
        head_parameters=has_head * vocabulary * hidden,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        attention_layers=_attention_layers(config, layers),
        latent_dim=config["kv_lora_rank"] + rotary if config.get("kv_lora_rank") else 0,
        **experts,
    )
    counted, active = _count(stored, config, layers) if stored else _formula(shape, config)
    return replace(shape, parameters=counted, active_parameters=active)


def _formula(shape: ModelShape, config: Mapping[str, Any]) -> tuple[int, int]:
    """As `_count`, for the usual families: H n d twice and H k d twice of attention, 3 H I of each MLP and expert."""
    kind, hidden = shape.model_type, shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    bias = bool(config.get("attention_bias")) and kind in ("llama", "qwen3", "qwen3_moe")
    attention = 2 * hidden * (queries + keys) + shape.qk_norm * 2 * shape.head_dim
    attention += (bias or kind == "qwen2") * (queries + 2 * keys) + bias * hidden
    mlp = 3 * hidden * shape.intermediate
    mlp += (kind == "llama" and bool(config.get("mlp_bias"))) * (2 * shape.intermediate + hidden)
    expert, router = 3 * hidden * shape.expert_intermediate, shape.experts * hidden
    layers = shape.layers * attention + (shape.layers - shape.sparse_layers) * mlp + shape.sparse_layers * router
    ends = shape.embedding_parameters + shape.head_parameters + (2 * shape.layers + 1) * hidden  # and the norms
    return (
        layers + shape.sparse_layers * shape.experts * expert + ends,
        layers + shape.sparse_layers * shape.active_experts * expert,
    )


def _count(stored: Stored, config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """All parameters, and those of the matrix products of one token, without the head.

    Weight files may hold more than the model that is trained: a second copy of tied embeddings, layers that predict
    further tokens, an image encoder, buffers.
    """
    experts, active_experts = _expert_counts(config)
    tied = _is_tied(config, stored)
    total = active = 0
    for name, shape in stored.items():
        layer = LAYER.search(name)
        if NOT_LOADED.search(name) or STORED_BUFFERS.search(name) or (layer and int(layer[1]) >= layers):
            continue
        if tied and name.endswith("lm_head.weight"):
            continue
        count = math.prod(shape)
        total += count
        if len(shape) < 2 or LOOK_UPS.search(name):
            continue
        stacked = len(shape) == 3 and shape[0] == experts and shape[1] > 1
        is_expert = experts and (".experts." in name or stacked)
        active += count * active_experts // experts if is_expert else count
    return total, active


def _expert_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Experts of a layer, and those that a token goes to; zeros for a dense model."""
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    active = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
    return experts, active


def _first(config: Mapping[str, Any], *keys: str) -> int:
    return next((int(config[key]) for key in keys if config.get(key)), 0)


def _key(config: Mapping[str, Any], key: str, other: str) -> int:
    return int(config[key] if key in config or other not in config else config[other])


def _layers(config: Mapping[str, Any]) -> int:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds and "num_hidden_layers" not in config:
        return len(kinds)
    return _key(config, "num_hidden_layers", "n_layer")


def _attention_layers(config: Mapping[str, Any], layers: int) -> int | None:
    """The layers of a hybrid that have attention; None if all have."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds:
        return sum(kind not in WITHOUT_ATTENTION for kind in kinds)
    if linear := config.get("linear_attn_config"):
        return len(linear["full_attn_layers"])
    if config.get("attn_layer_indices") is not None:
        return len(config["attn_layer_indices"])
    if period := config.get("attn_layer_period"):
        return sum(i % period == config.get("attn_layer_offset", 0) for i in range(layers))
    return None


def _is_tied(config: Mapping[str, Any], stored: Stored | None) -> bool:
    """As config.json says. If the key is missing, the family may tie by default: then the files have no head."""
    tied = config.get("tie_word_embeddings")
    if tied is None and stored:
        return not any("lm_head" in name for name in stored)
    return bool(tied)


def _experts(kind: str, config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """The expert fields of ModelShape; empty for a dense model, and for a family that is counted from its files."""
    if kind not in ("mixtral", "qwen3_moe"):
        return {}
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    return {
        "experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        "active_experts": config["num_experts_per_tok"],
        "expert_intermediate": config["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"],
        "sparse_layers": sum((i + 1) % every == 0 and i not in dense for i in range(layers)),
    }
