"""The shape of a transformer from its config.json alone: parameter counts, without weights and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KV_HEADS_DEFAULT = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}  # transformers' own
QWEN3_HEAD_DIM = 128  # if its config.json has no head_dim
SUPPORTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


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
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    sparse_layers: int = 0

    @property
    def embedding_parameters(self) -> int:
        """V H of the input embedding; the head has as many more, unless the two are tied."""
        return self.vocabulary * self.hidden

    @property
    def attention_parameters(self) -> int:
        """Per layer: H n d for queries and output each, H k d for keys and values each, biases, norms of q and k."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = 2 * self.hidden * queries + 2 * self.hidden * keys
        biases = self.qkv_bias * (queries + 2 * keys) + self.output_bias * self.hidden
        return weights + biases + self.qk_norm * 2 * self.head_dim

    @property
    def dense_mlp_parameters(self) -> int:
        """Gate, up and down projection."""
        return 3 * self.hidden * self.intermediate + self.mlp_bias * (2 * self.intermediate + self.hidden)

    @property
    def sparse_mlp_parameters(self) -> int:
        """All experts of one layer, and the router."""
        return self.experts * 3 * self.hidden * self.expert_intermediate + self.experts * self.hidden

    @property
    def parameters(self) -> int:
        norms = 2 * self.hidden * self.layers + self.hidden
        mlps = self.sparse_layers * self.sparse_mlp_parameters
        mlps += (self.layers - self.sparse_layers) * self.dense_mlp_parameters
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * self.attention_parameters + mlps + norms

    @property
    def active_parameters(self) -> int:
        """Parameters of the matrix products that one token goes through, without the head."""
        sparse = self.active_experts * 3 * self.hidden * self.expert_intermediate + self.experts * self.hidden
        mlps = self.sparse_layers * sparse + (self.layers - self.sparse_layers) * self.dense_mlp_parameters
        return self.layers * self.attention_parameters + mlps

    def training_flops(self, lengths: Sequence[int], response_tokens: int, shared: Sequence[int]) -> float:
        """Floating-point operations of forward and backward, without recomputation (model FLOPs).

        6 per computed token and parameter (2 forward, 4 backward), the head at response tokens alone, and causal
        attention: half of 12 L^2 n d per layer and sequence of L tokens.

        Args:
            shared: first tokens of each of `lengths` that were computed with another sequence.
        """
        squares = sum(length**2 for length in lengths) - sum(count**2 for count in shared)
        attention = 6 * self.layers * self.heads * self.head_dim * squares
        head = 6 * self.embedding_parameters * response_tokens
        return float(6 * self.active_parameters * (sum(lengths) - sum(shared)) + head + attention)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a config.json.

    Raises:
        ValueError: an architecture that this file does not know, or a size that is missing.
    """
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise ValueError(f"model_type={kind!r} is not one whose parameters the plan can count ({', '.join(SUPPORTED)})")
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
        experts = _experts(kind, config, layers)
        intermediate = config.get("intermediate_size", 0) if experts else config["intermediate_size"]
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}") from None
    bias = bool(config.get("attention_bias")) and kind in ("llama", "qwen3", "qwen3_moe")
    return ModelShape(
        model_type=kind,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or KV_HEADS_DEFAULT.get(kind, heads),
        head_dim=config.get("head_dim") or (QWEN3_HEAD_DIM if kind == "qwen3" else hidden // heads),
        intermediate=intermediate,
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias,
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias")),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        **experts,
    )


def _experts(kind: str, config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """The expert fields of ModelShape; empty for a dense model."""
    if kind == "mixtral":
        return {
            "experts": config["num_local_experts"],
            "active_experts": config["num_experts_per_tok"],
            "expert_intermediate": config["intermediate_size"],
            "sparse_layers": layers,
        }
    if kind == "qwen3_moe":
        every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
        return {
            "experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            "active_experts": config["num_experts_per_tok"],
            "expert_intermediate": config["moe_intermediate_size"],
            "sparse_layers": sum((i + 1) % every == 0 and i not in dense for i in range(layers)),
        }
    return {}
