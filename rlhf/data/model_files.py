"""Reads facts about a model before its weights are loaded: config.json, tokenizer, headers of its weight files."""

from __future__ import annotations

import hashlib
import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.base import first_line
from rlhf.config.data import NamedTemplate
from rlhf.config.model_folder import (
    INDEX,
    SINGLE,
    local_model_folder,
    looks_local,
    read_json,
    tensor_shapes,
    torch_files,
    weight_files,
    weight_index,
)
from rlhf.config.reward_model import RewardModelConfig, reward_model_record
from rlhf.config.sections import ModelConfig, RolloutConfig
from rlhf.log.reachable import connection_problem

if TYPE_CHECKING:
    import numpy as np

SAMPLES, SAMPLE_BYTES = 64, 4096  # parts read of each weight file; few suffice, since training changes every tensor
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
CHAT_TEMPLATE_FILES = ("chat_template.*", "additional_chat_templates/*", "tekken.json")
WEIGHT_FILES = ("*.safetensors", "*.bin")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".msgpack", ".h5")
SAVE_AGAIN = "Download or save the model again, with save_pretrained of transformers."
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # the number of experts
SIZES = {
    "vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head", "num_hidden_layers", "n_layer", "head_dim",
    "num_key_value_heads", "intermediate_size", "max_position_embeddings", "decoder_sparse_step", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "full_attention_interval", "attn_layer_period",
    "attn_layer_offset", "moe_intermediate_size", "num_experts_per_tok", *EXPERT_KEYS,
}  # fmt: skip
MAX_SIZE, MAX_LAYERS = 2**32, 10_000
USUAL_MODEL_TYPES = (  # known without a look
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo2", "phi3", "smollm3",
)  # fmt: skip


def local_model_config(path: str) -> dict[str, Any] | None:
    """config.json of a local or cached model, or None; ValueError if it is damaged, or a size is no whole number."""
    file = local_model_folder(path) / "config.json"
    if not file.exists():
        return None
    config = read_json(file)
    for values in (config, config.get("text_config", {})):
        if not isinstance(values, dict):
            raise ValueError(f"{file}: text_config={values!r:.80} is no object. {SAVE_AGAIN}")
        if not isinstance(kind := values.get("model_type") or "", str):
            raise ValueError(f"{file}: model_type={kind!r:.80} is no text. {SAVE_AGAIN}")
        for key in SIZES & values.keys():
            size = values[key]
            most = MAX_LAYERS if key in ("num_hidden_layers", "n_layer") else MAX_SIZE
            each_layer = isinstance(size, list) and key.endswith("intermediate_size")  # as in Gemma 3n
            by_layer = size if each_layer else [size]
            if not all(
                each is None or (type(each) in (int, float) and 0 <= each <= most and each % 1 == 0)
                for each in by_layer
            ):
                raise ValueError(f"{file}: {key}={size!r:.80} is not a whole number from 0 to {most:,}. {SAVE_AGAIN}")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json about the text model, which may be wrapped next to image encoders."""
    if "text_config" not in config:
        return config
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # what transformers reads
    return config["text_config"] | tied


def class_problem(path: str, key: str, *, generates: bool = True) -> str:
    """Why transformers has no class for a model, by its config.json. Empty if it has one or the file is not here."""
    config = local_model_config(path)
    if config is None or "auto_map" in config or config.get("model_type") in USUAL_MODEL_TYPES:
        return ""  # auto_map: the model brings its own class
    kind, named = config.get("model_type"), f"{key}={path}: its config.json has model_type={config.get('model_type')!r}"
    from transformers.models.auto import configuration_auto, modeling_auto  # takes seconds: torch

    if kind not in configuration_auto.CONFIG_MAPPING_NAMES:
        return (
            f"{named}, which transformers {version('transformers')} does not know. Use another model, or a newer "
            "release of rlhf; a newer transformers alone does not help, since engine and learner need this one."
        )
    wraps = "text_config" in config and kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if generates and not wraps and kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"{named}, which is no language model in transformers. Use one that is (AutoModelForCausalLM)."
    return ""


def hub_silence() -> str:
    """Why the hub cannot be reached, within seconds; its own client would try for minutes. Empty if it answers."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reason = connection_problem(constants.ENDPOINT)
    return reason and f"{constants.ENDPOINT}: {reason}"


def use_cache_if_hub_is_silent() -> None:
    """If the hub does not answer, use only its cache, in this process and in its children."""
    from huggingface_hub import constants

    if hub_silence():
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


def lacks_chat_template(path: str) -> bool:
    """True if a model's tokenizer is on this machine and has no chat template."""
    folder = local_model_folder(path)
    return bool(_files(folder, TOKENIZER_FILES)) and not chat_template_text(folder)


def chat_template_text(folder: Path) -> str:
    """All chat templates of a tokenizer, joined; Mistral's own format stores none as text."""
    in_settings = read_json(folder / "tokenizer_config.json").get("chat_template") or ""
    files = "".join(file.read_text(errors="replace") for file in _files(folder, CHAT_TEMPLATE_FILES))
    return f"{in_settings}{files}"  # several are a list


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def reward_template(config: RewardModelConfig) -> NamedTemplate:
    """The template of a reward model's input: of the config, else as recorded with the model, else `model`."""
    assert config.path is not None, "an endpoint writes them itself"
    recorded: NamedTemplate | None = reward_model_record(config.path).get("template")
    return config.template or recorded or "model"


def load_tokenizer(model: ModelConfig, *, key: str = "model.path") -> Any:
    """The model's tokenizer; ValueError if neither the folder nor the hub has it."""
    if not looks_local(model.path):
        use_cache_if_hub_is_silent()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # of any type: a damaged file ends in KeyError, TypeError, ...
        raise ValueError(
            f"{key}={model.path}: its tokenizer cannot be loaded ({first_line(error)}). Give a folder in "
            "Hugging Face format or the name of a hub model that this machine can reach."
        ) from None
    if problem := class_problem(model.path, key, generates=False):  # of a hub model's config.json, now fetched
        raise ValueError(problem)
    if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder) + 1:  # transformers makes an empty one
        raise ValueError(
            f"{key}={model.path}: its tokenizer has no vocabulary, so it would turn texts into nothing. A file of it "
            "is missing: tokenizer.json, or vocab.json with merges.txt, or tokenizer.model. Put it there."
        )
    template, length = tokenizer.chat_template, tokenizer.model_max_length
    sources = [*template.values()] if isinstance(template, dict) else [template or ""]
    if not (all(isinstance(source, str) for source in sources) and isinstance(length, int | float)):
        given = f"chat_template={template!r:.80} and model_max_length={length!r:.80}, which are no text and number"
        raise ValueError(f"{key}={model.path}: its tokenizer has {given}. {SAVE_AGAIN}")
    end, rows = tokenizer.eos_token_id, embedding_rows(model.path)
    if end is not None and end >= rows:
        raise ValueError(
            f"{key}={model.path}: the end of a turn, {tokenizer.eos_token!r} (eos_token of the tokenizer), has the id "
            f"{end}, but the model has embeddings for {rows} tokens (vocab_size of config.json). Use the tokenizer "
            "that belongs to the model, or name its own token as eos_token in tokenizer_config.json."
        )
    return tokenizer


def truncate_token_id(rollout: RolloutConfig, tokenizer: Any) -> int | None:
    """The id of rollout.truncate_token, None if it is not set; ValueError unless the tokenizer has one for it."""
    if rollout.truncate_token is None:
        return None
    ids = tokenizer.encode(rollout.truncate_token, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(
            f"rollout.truncate_token={rollout.truncate_token!r}: the tokenizer encodes it as {len(ids)} tokens. "
            "Name one token, or use rollout.stop for a string."
        )
    return int(ids[0])


def model_fingerprint(path: str) -> dict[str, str]:
    """Digests of a model's config, tokenizer and weights; empty for files that are not on this machine.

    Of weights only sizes and SAMPLES parts are read: this tells models apart, but does not find damage.
    """
    folder = local_model_folder(path)
    return {
        "config": _digest(folder, ("config.json",)),
        "tokenizer": _digest(folder, TOKENIZER_FILES),
        "weights": _digest(folder, WEIGHT_FILES, sampled=True),
    }


def _digest(folder: Path, patterns: tuple[str, ...], *, sampled: bool = False) -> str:
    files = _files(folder, patterns)
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            if not sampled:
                digest.update(content.read())
                continue
            for offset in range(0, file.stat().st_size, max(SAMPLE_BYTES, file.stat().st_size // SAMPLES)):
                content.seek(offset)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def check_weights(path: str) -> None:
    """Raise a ValueError unless all weight files exist, are whole, and hold each tensor once, by their headers."""
    folder = local_model_folder(path)
    of_torch = torch_files(folder)
    files = of_torch or weight_files(folder)
    if missing := [file.name for file in files if not file.is_file()]:
        if not looks_local(path):
            return  # the hub has them
        there = ", ".join(sorted(file.name for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES))
        kind = "" if folder / SINGLE not in files else f", and no {INDEX} that names others"
        others = there and f" It has {there}, which transformers does not look for."
        raise ValueError(f"{', '.join(missing)}: no such file{kind}.{others if kind else ''} {SAVE_AGAIN}")
    if of_torch:
        return  # they have no headers
    headers = {file.name: tensor_shapes(file) for file in files}
    if absent := [f"{name} in {file}" for name, file in weight_index(folder).items() if name not in headers[file]]:
        more = f" and {len(absent) - 1} more tensors" if len(absent) > 1 else ""
        raise ValueError(
            f"{INDEX} names tensors that are missing: {absent[0]}{more}. Download or save the model again."
        )
    if SINGLE not in headers and (folder / SINGLE).is_file():
        reason = "transformers reads the one, vLLM the other. Remove the one that is not the model."
        raise ValueError(f"it holds {SINGLE} and {INDEX}, which does not name it: {reason}")
    file_of: dict[str, str] = {}
    for file, names in headers.items():
        for name in names:
            if (other := file_of.setdefault(name, file)) != file:
                raise ValueError(f"{other} and {file} both hold {name}. Download or save the model again.")


def embedding_rows(path: str) -> float:
    """The number of token ids with an embedding in a model on this machine; infinite if unknown."""
    rows = text_config(local_model_config(path) or {}).get("vocab_size")
    return rows if isinstance(rows, int) else math.inf


def check_ids(token_ids: np.ndarray, vocab_size: float) -> None:
    """Raise a ValueError if one of the ids [L] has no row in an embedding of this size."""
    if len(token_ids) and (last := int(token_ids.max())) >= vocab_size:
        raise ValueError(
            f"it has a token with the id {last}, but the model has embeddings for {vocab_size} (vocab_size). Use the "
            "tokenizer that belongs to the model, or enlarge the model in transformers (resize_token_embeddings)."
        )
