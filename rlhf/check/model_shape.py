"""The shape of a model without torch: its parameters from the headers of its weight files, or else from config.json.

A formula counts the parameters of eleven families from config.json alone. Other families need the weight files of a
local or cached model. Often trained models need no files (`known_models`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.check.known_models import KNOWN_MODELS
from rlhf.config.model_folder import local_model_folder, looks_local, tensor_shapes, weight_files
from rlhf.data.model_files import EXPERT_KEYS, USUAL_MODEL_TYPES, local_model_config, text_config

KV_HEADS_DEFAULT = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}  # transformers' defaults
QWEN3_HEAD_DIM = 128  # if its config.json has no head_dim
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")  # norms of queries and keys
NORMS = {"gemma2": 4, "gemma3_text": 4}  # in a layer, where they are not two
TIED = ("gemma2", "gemma3_text", "smollm3")  # by default
EXPERT_SIZES = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}  # the key of I of an expert

WITHOUT_ATTENTION = ("linear_attention", "mamba", "conv", "mlp", "moe")  # kinds of layers
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
NOT_LOADED = re.compile(
    r"^(?:model\.)?(?:mtp|visual|(?:vision|audio)_tower|vision_model|multi_modal_projector|embed_(?:vision|audio))\."
)
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
    attention_layers: int  # in a hybrid not all
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int  # d of values, and of what attention returns, if it is another
    intermediate: int
    experts: int
    active_experts: int
    head_parameters: int  # 0 if the head is the input embedding, or if the files hold none
    qk_norm: bool
    latent_dim: int  # numbers that latent attention caches per token and layer; 0: keys and values are cached
    expert_intermediate: int = 0
    sparse_layers: int = 0  # of the families that the formula counts
    parameters: int = 0
    active_parameters: int = 0  # of the matrix products that one token goes through, without the head
    source: str = ""  # where the sizes come from

    @property
    def embedding_parameters(self) -> int:
        """V H of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def key_value_dim(self) -> int:
        """Numbers of a head's key and value together; of its query and output, as many."""
        return self.head_dim + self.value_dim

    def training_flops(
        self, lengths: Sequence[int], response_tokens: int, shared: Sequence[int], *, frozen: bool = False
    ) -> float:
        """Floating-point operations of forward and backward, without recomputation (model FLOPs).

        6 per computed token and parameter (2 forward, 4 backward), the head only at response tokens, and causal
        attention: half of 12 L^2 n d per layer and sequence of L tokens.

        Args:
            shared: first tokens of each of `lengths` that were computed with another sequence.
            frozen: the weights have no gradient (`model.lora`): 4 in place of 6; adapters are not counted.
        """
        each = 4 if frozen else 6
        squares = sum(length**2 for length in lengths) - sum(count**2 for count in shared)
        attention = 6 * self.attention_layers * self.heads * self.head_dim * squares
        head = each * self.embedding_parameters * response_tokens
        return float(each * self.active_parameters * (sum(lengths) - sum(shared)) + head + attention)


def config_at(path: str) -> dict[str, Any] | None:
    """config.json of a model, or its sizes from our own table; None if neither has it."""
    config = local_model_config(path)
    return KNOWN_MODELS.get(path) if config is None and not looks_local(path) else config


def shape_at(path: str) -> ModelShape | None:
    """The shape of a model; None where `read_shape` raises ValueError."""
    try:
        return read_shape(path)
    except ValueError:
        return None


def read_shape(path: str) -> ModelShape:
    """The shape of a model; ValueError if config.json is not on this machine or the parameters cannot be counted."""
    config = config_at(path)
    if config is None:
        alike = difflib.get_close_matches(path, KNOWN_MODELS, n=1) or ["Qwen/Qwen2.5-7B"]
        raise ValueError(
            f"config.json of model.path={path} is not on this machine. Give a folder in Hugging Face format, or fetch "
            f"it into the hub's cache with `hf download {path} config.json`, or for --plan alone name a model of the "
            f"same sizes that needs no download, such as model.path={alike[0]}."
        )
    stored = stored_tensors(path)
    source = "the weight files" if stored else "config.json"
    if local_model_config(path) is None:
        source = "rlhf's own table, as config.json is not on this machine"
    return replace(model_shape(config, stored), source=source)


def stored_tensors(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the weight files of a local or cached model, from their headers; empty if a file is missing.

    ValueError if a file is not a safetensors file but, for example, a pointer of git-lfs.
    """
    files = weight_files(local_model_folder(path))
    if not all(file.is_file() for file in files):
        return {}
    return {name: shape for file in files for name, shape in tensor_shapes(file).items()}


def model_shape(config: Mapping[str, Any], stored: Stored | None = None) -> ModelShape:
    """The shape that a config.json describes; parameters are counted in `stored`, else by a formula.

    ValueError for an architecture that no formula knows, without weight files, and for a missing size.
    """
    config = text_config(dict(config))
    kind = str(config.get("model_type"))
    if kind not in USUAL_MODEL_TYPES and not stored:
        raise ValueError(
            f"model_type={config.get('model_type')!r} is not one whose parameters the plan can count without the "
            f"model's weight files ({', '.join(USUAL_MODEL_TYPES)})."
        )
    try:
        shape = _sizes(kind, config, stored)
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}.") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"config.json has a size that is no number ({error}).") from None
    if stored:
        count, active = _count_in_files(stored, shape, _is_tied(config, stored))
    else:
        count, active = _count_by_formula(shape, config)
    return replace(shape, parameters=count, active_parameters=active)


def _sizes(kind: str, config: Mapping[str, Any], stored: Stored | None) -> ModelShape:
    """The sizes in config.json, without the parameters. Raises KeyError if a size is missing."""
    hidden, heads = _first_set(config, "hidden_size", "n_embd"), _first_set(config, "num_attention_heads", "n_head")
    layers, attention_layers = _count_layers(config)
    sparse = kind in EXPERT_SIZES
    active_keys = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    rotary = config.get("qk_rope_head_dim", 0)
    latent = config.get("qk_nope_head_dim", 0) + rotary
    head_dim = latent or config.get("head_dim") or (QWEN3_HEAD_DIM if kind == "qwen3" else hidden // heads)
    kv_heads = config.get("num_key_value_heads") or KV_HEADS_DEFAULT.get(kind, heads)
    has_head = not _is_tied(config, stored) and (not stored or any("lm_head" in name for name in stored))
    return ModelShape(
        model_type=kind,
        vocabulary=_first_set(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        attention_layers=attention_layers,
        heads=heads,
        kv_heads=heads if config.get("kv_lora_rank") else kv_heads,  # a latent becomes keys and values of every head
        head_dim=head_dim,
        value_dim=config.get("v_head_dim") or head_dim,
        intermediate=_first_set(
            config, "intermediate_size", missing=None if kind in USUAL_MODEL_TYPES and not sparse else 4 * hidden
        ),
        experts=_first_set(config, *EXPERT_KEYS, missing=None if sparse else 0),
        active_experts=_first_set(config, *active_keys, missing=None if sparse else 0),
        expert_intermediate=config[EXPERT_SIZES[kind]] if sparse else 0,
        sparse_layers=sum((i + 1) % every == 0 and i not in dense for i in range(layers)) if sparse else 0,
        head_parameters=has_head * config["vocab_size"] * hidden,
        qk_norm=kind in QK_NORM,
        latent_dim=config["kv_lora_rank"] + rotary if config.get("kv_lora_rank") else 0,
    )


def _first_set(config: Mapping[str, Any], *keys: str, missing: int | None = None) -> int:
    """The value of the first key that is set, else `missing`; KeyError if both are None, TypeError for no number."""
    value: int | None = next((config[key] for key in keys if config.get(key)), missing)
    if value is None:
        raise KeyError(keys[0])
    if not isinstance(value, int):
        raise TypeError(f"{keys[0]}={value!r}")
    return value


def _count_layers(config: Mapping[str, Any]) -> tuple[int, int]:
    """The number of layers, and the number of layers with attention."""
    kinds = config.get("layers_block_type") or config.get("layer_types") or ()
    layers = _first_set(config, "num_hidden_layers", "n_layer", missing=len(kinds) or None)
    if kinds:
        return layers, sum(kind not in WITHOUT_ATTENTION for kind in kinds)
    if interval := config.get("full_attention_interval"):
        return layers, layers // interval
    if linear := config.get("linear_attn_config"):
        return layers, len(linear["full_attn_layers"])
    if (indices := config.get("attn_layer_indices")) is not None:
        return layers, len(indices)
    if period := config.get("attn_layer_period"):
        return layers, sum(i % period == config.get("attn_layer_offset", 0) for i in range(layers))
    return layers, layers


def _is_tied(config: Mapping[str, Any], stored: Stored | None) -> bool:
    """Whether the head is the input embedding. If config.json has no such key, it is tied if the files have no head."""
    tied = config.get("tie_word_embeddings")
    if tied is None and stored:
        return not any("lm_head" in name for name in stored)
    return config.get("model_type") in TIED if tied is None else bool(tied)


def _count_by_formula(shape: ModelShape, config: Mapping[str, Any]) -> tuple[int, int]:
    """As `_count_in_files`, for usual families: 2 H n d + 2 H k d of attention, and 3 H I of each MLP and expert."""
    kind, hidden = shape.model_type, shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    bias = bool(config.get("attention_bias")) and kind not in ("mistral", "mixtral", "qwen2", "phi3")
    norms = queries + keys if kind == "olmo2" else 2 * shape.head_dim
    attention = 2 * hidden * (queries + keys) + shape.qk_norm * norms
    attention += (bias or kind == "qwen2") * (queries + 2 * keys) + bias * hidden
    mlp = 3 * hidden * shape.intermediate
    mlp += (kind in ("llama", "smollm3") and bool(config.get("mlp_bias"))) * (2 * shape.intermediate + hidden)
    expert, router = 3 * hidden * shape.expert_intermediate, shape.experts * hidden
    layers = shape.layers * attention + (shape.layers - shape.sparse_layers) * mlp + shape.sparse_layers * router
    ends = shape.embedding_parameters + shape.head_parameters + (NORMS.get(kind, 2) * shape.layers + 1) * hidden
    return (
        layers + shape.sparse_layers * shape.experts * expert + ends,
        layers + shape.sparse_layers * shape.active_experts * expert,
    )


def _count_in_files(stored: Stored, model: ModelShape, tied: bool) -> tuple[int, int]:
    """The number of parameters, and of parameters in the matrix products of one token, without the head.

    Weight files may hold more than the model that is trained: a second copy of tied embeddings, layers that predict
    further tokens, an image encoder, buffers.
    """
    total = active = 0
    for name, shape in stored.items():
        layer = LAYER.search(name)
        if NOT_LOADED.search(name) or STORED_BUFFERS.search(name) or (layer and int(layer[1]) >= model.layers):
            continue
        if tied and name.endswith("lm_head.weight"):
            continue
        count = math.prod(shape)
        total += count
        if len(shape) < 2 or LOOK_UPS.search(name):
            continue
        stacked = len(shape) == 3 and shape[0] == model.experts and shape[1] > 1
        is_expert = model.experts and (".experts." in name or stacked)
        active += count * model.active_experts // model.experts if is_expert else count
    return total, active
