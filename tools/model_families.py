"""Tiny random models of the families that people train, in the Hugging Face format.

    python tools/model_families.py FOLDER TYPE...

Writes FOLDER/TYPE for each of the given types of transformers (all of MODEL_TYPES without one): the quickstart's
tokenizer and a float32 model of a few layers, in which every kind of layer of its family occurs. Windows are 16 tokens,
so that short sequences exceed them. All tensors are random, norms and biases too, so that a tensor that is lost or old
shows in the log-probabilities.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.learner.tiny_model import INITIAL_WEIGHT_STD, make_tokenizer

WINDOW = 16
CONSTANT_NOISE_STD = 0.1  # added to tensors that are initialized to a constant
FIXED = (".eps", ".beta")  # constants of an activation function, which a checkpoint holds too
SCALES = {"gemma4_text": "q_norm.weight"}  # where attention divides scores by nothing: this norm has learned to

# A family takes those of these keys that its config has, under its own name for them.
BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on CPU refuses 16
    "max_position_embeddings": 256,
    "initializer_range": INITIAL_WEIGHT_STD,
    "sliding_window": WINDOW,
    # experts
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # mixers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # the only size that vLLM takes on CPU
    "linear_value_head_dim": 128,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
    "n_mamba_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "mamba_d_ssm": 256,
    "ssm_state_size": 32,
    "n_groups": 1,
    "chunk_size": 16,
}

MAMBA_AND_ATTENTION = ["linear_attention", "full_attention"] * 2
CONV_AND_ATTENTION = ["conv", "full_attention"] * 2
WINDOW_AND_FULL = ["sliding_attention", "full_attention"] * 2
SCALED = {  # Granite's factors, of the size that real models have
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}

# What a family needs apart from BASE. A list of layer types stands where the default would have one kind only. vLLM
# reads keys that transformers does not know: they are in the family's checkpoints.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
    },
    "mistral": {},
    "ministral": {"layer_types": WINDOW_AND_FULL},
    "mixtral": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    "gemma3_text": {"layer_types": WINDOW_AND_FULL, "query_pre_attn_scalar": 32},
    "gemma4_text": {
        "layer_types": WINDOW_AND_FULL,
        "final_logit_softcapping": 2.0,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 2,
        "num_experts": None,
    },
    "phi3": {},
    "phimoe": {"sliding_window": None, "lm_head_bias": True, "attention_bias": True},
    "olmo2": {},
    "olmo3": {"layer_types": WINDOW_AND_FULL},
    "olmo_hybrid": {},
    "olmoe": {},
    "granite": SCALED,
    "granitemoe": SCALED,
    "granitemoehybrid": {**SCALED, "layer_types": MAMBA_AND_ATTENTION},
    "nemotron": {},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "sliding_window": None},
    "kimi_linear": {"layer_types": MAMBA_AND_ATTENTION, "q_lora_rank": None, "num_key_value_heads": 4},
    "lfm2": {"layer_types": CONV_AND_ATTENTION, "block_auto_adjust_ff_dim": False, "block_dim": 128, "conv_dim": 128},
    "lfm2_moe": {"layer_types": CONV_AND_ATTENTION, "num_dense_layers": 1},
    "falcon_h1": {},
    "gpt_oss": {},
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True, "head_dim": 32},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "smollm3": {},
    "cohere2": {"layer_types": WINDOW_AND_FULL, "logit_scale": 0.5},
    "exaone4": {"layer_types": WINDOW_AND_FULL},
    "minimax": {"sliding_window": None, "block_size": 16},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4, "head_dim": 64},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "apertus": {},
    "dots1": {},
    "arcee": {},
}
PATCHES = {"patch_size": 4, "hidden_size": 32, "intermediate_size": 32}
TOWER = PATCHES | {"image_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
QWEN_TOWER = PATCHES | {"depth": 1, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 128}
LLAMA_TOWER = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
QWEN_3_5: dict[str, Any] = {
    "head_dim": 64,
    "rope_parameters": SECTIONS | {"partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
    "mtp_num_hidden_layers": 1,
    "full_attention_interval": 4,
}
# Checkpoints that wrap a text model: the type of their text model, what it needs apart from its family's keys, and the
# sizes of the vision encoder.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", QWEN_3_5 | {"tie_word_embeddings": True}, QWEN_TOWER),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN_3_5, QWEN_TOWER),
    "gemma3": ("gemma3_text", {}, TOWER),
    "gemma4": ("gemma4_text", {}, {key: value for key, value in TOWER.items() if key != "image_size"}),
    "mistral3": ("mistral", {"tie_word_embeddings": False}, TOWER),
    "llama4": ("llama4_text", {}, TOWER | LLAMA_TOWER),
    "qwen3_vl": (
        "qwen3_vl_text",
        {"rope_parameters": SECTIONS | {"mrope_section": [6, 5, 5]}},
        QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    ),
}
# Files have tensors that transformers does not load: as released, Qwen 3.5 to 3.8 predict a second token.
NOT_LOADED = {name: {"mtp.fc.weight": (128, 256), "mtp.norm.weight": (128,)} for name in ("qwen3_5", "qwen3_5_moe")}
MODEL_TYPES = (*FAMILIES, *WRAPPERS)
HUB_CLASSES = {"phimoe": "PhiMoEForCausalLM"}  # where checkpoints on the hub do not name the class of transformers


def family_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of a family; `changes` overrule its keys."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    if model_type in WRAPPERS:
        text_type, keys, tower = WRAPPERS[model_type]
        text = family_config(text_type, **(keys | changes)).to_dict()
        tied = text.get("tie_word_embeddings", True)
        return kind(text_config=text, vision_config=tower, tie_word_embeddings=tied, dtype="float32")
    known = vars(kind()).keys() | kind.attribute_map.keys()
    tokenizer = make_tokenizer()
    tokens = {
        "vocab_size": len(tokenizer),
        "vocab_size_per_layer_input": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    keys = {key: value for key, value in (BASE | tokens).items() if key in known}
    return kind(**(keys | FAMILIES.get(model_type, {}) | changes), dtype="float32")


def make_family(model_type: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model; `changes` overrule keys of its config."""
    import torch
    from transformers import GenerationConfig

    from rlhf.learner.text_model import language_model_class

    config, text_type = family_config(model_type, **changes), WRAPPERS.get(model_type, (model_type,))[0]
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = language_model_class(config).from_config(config, dtype=torch.float32)
        tensors = {tensor.data_ptr(): tensor for name, tensor in model.state_dict().items() if not name.endswith(FIXED)}
        for tensor in tensors.values():  # tied ones once
            if tensor.is_floating_point() and (tensor == tensor.view(-1)[0]).all():
                tensor.add_(CONSTANT_NOISE_STD * torch.randn_like(tensor))
        for name, tensor in model.named_parameters():
            if text_type in SCALES and name.endswith(SCALES[text_type]) and ".encoder." not in name:
                tensor.mul_(len(tensor) ** -0.5)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def write_family(model_type: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write model and tokenizer; returns the folder."""
    model = make_family(model_type, seed=seed, **changes)
    model.save_pretrained(folder)
    if model_type in NOT_LOADED:
        add_tensors(folder / "model.safetensors", NOT_LOADED[model_type], seed)
    if model_type in HUB_CLASSES:
        model.config.architectures = [HUB_CLASSES[model_type]]
        model.config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def add_tensors(file: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Add random float32 tensors to a safetensors file."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    more = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(load_file(file) | more, file, {"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    for name in sys.argv[2:] or MODEL_TYPES:
        print(write_family(name, Path(sys.argv[1]) / name))
