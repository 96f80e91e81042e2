"""Facts about a model before its weights are loaded: config.json, attention window, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.config.sections import ModelConfig, RolloutConfig

WINDOW_OF_LAYERS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
WINDOW_DEFAULT = dict.fromkeys(
    ["mistral", "ministral", "gemma2", "gemma3_text", "olmo3", "cohere2"], 4096
)  # of transformers
OFF_BY_DEFAULT = ("qwen", "smollm3")  # model types whose sliding_window counts only with use_sliding_window


def looks_local(path: str) -> bool:
    """Whether a model or data path is local; otherwise it is the name of a hub repository."""
    return path.startswith(("/", ".", "~")) or Path(path).exists() or path.count("/") > 1


def local_model_config(path: str) -> dict[str, Any] | None:
    """config.json of a local model or of a model in the hub's cache; None if it is in neither."""
    file = local_model_folder(path) / "config.json"
    if not file.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"model.path={path}: {file} is not JSON ({error}). Download or save the model again."
        ) from None
    return config


def local_model_folder(path: str) -> Path:
    """Where the files of a local model are, or of a model in the hub's cache; the folder may not exist."""
    folder = Path(path).expanduser()
    return folder if (folder / "config.json").is_file() or looks_local(path) else _cached_folder(path)


def _cached_folder(name: str) -> Path:
    """Where a model is in the hub's cache, if it is; the hub's own look-up imports an HTTP client."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    revision = reference.read_text().strip() if reference.is_file() else "main"
    return repository / "snapshots" / revision


def attention_window(model: Mapping[str, Any]) -> int | None:
    """The smallest attention window of a model's layers, tokens; None if all layers attend to the whole sequence."""
    text = model.get("text_config") or model
    model_type = str(text.get("model_type"))
    windows = {name: text.get(key) for name, key in WINDOW_OF_LAYERS.items()}
    if "sliding_window" not in text:
        windows["sliding_attention"] = WINDOW_DEFAULT.get(model_type)
    if not text.get("use_sliding_window", not model_type.startswith(OFF_BY_DEFAULT)):
        windows["sliding_attention"] = None
    layers = text.get("layer_types")
    if layers is None:
        full = model_type in ("qwen2", "qwen3") and text.get("max_window_layers", 0) >= text.get("num_hidden_layers", 1)
        layers = [] if full else ["sliding_attention"]
    return min((window for name in set(layers) if (window := windows.get(name)) is not None), default=None)


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the model's tokenizer.

    Raises:
        ValueError: neither the folder nor the hub has it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.path={model.path}: its tokenizer cannot be loaded ({reason}). Give a folder in Hugging Face format "
            "or the name of a hub model that this machine can reach."
        ) from None


def truncate_token_id(rollout: RolloutConfig, tokenizer: Any) -> int | None:
    """The id of rollout.truncate_token; None if it is not set.

    Raises:
        ValueError: the tokenizer does not encode it as one token.
    """
    if rollout.truncate_token is None:
        return None
    ids = tokenizer.encode(rollout.truncate_token, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(
            f"rollout.truncate_token={rollout.truncate_token!r}: the tokenizer encodes it as {len(ids)} tokens. "
            "Name one token, or use rollout.stop for a string."
        )
    return int(ids[0])
