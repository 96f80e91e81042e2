"""What a model folder says before any weight is loaded: does it exist, its context, its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.config.ppo import PPOConfig
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.run import GRPOConfig
from rlhf.config.sections import ModelConfig, RolloutConfig

WINDOW_OF_LAYERS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
WINDOW_DEFAULT = dict.fromkeys(
    ["mistral", "ministral", "gemma2", "gemma3_text", "olmo3", "cohere2"], 4096
)  # of transformers
OFF_BY_DEFAULT = ("qwen", "smollm3")  # model types whose sliding_window counts only with use_sliding_window


def looks_local(path: str) -> bool:
    """Whether a model or data path means this machine rather than the hub."""
    return path.startswith(("/", ".", "~")) or Path(path).exists() or path.count("/") > 1


def check_model(path: str, *, key: str = "model.path") -> None:
    """Refuse a local model path that holds no model; a hub name is checked when its tokenizer is loaded.

    Raises:
        ValueError: no such folder, or no config.json in it.
    """
    if not looks_local(path):
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{key}={path}: there is no such folder. Give a folder in Hugging Face format or a hub name.")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}={path}: no config.json in it. Give a folder in Hugging Face format.")


def check_models(config: GRPOConfig) -> None:
    """Refuse paths without a model, and a critic that reads other token ids than the policy writes.

    Raises:
        ValueError: with the key of the path.
    """
    check_model(config.model.path)
    if config.reward_model is not None and config.reward_model.path is not None:
        check_model(config.reward_model.path, key="reward_model.path")
    if not isinstance(config, PPOConfig) or config.critic.path is None:
        return
    check_model(config.critic.path, key="critic.path")
    policy, critic = (
        (local_model_config(path) or {}).get("vocab_size") for path in (config.model.path, config.critic.path)
    )
    if policy is not None and critic is not None and critic < policy:
        raise ValueError(
            f"critic.path={config.critic.path}: its vocabulary of {critic} tokens is smaller than the {policy} of "
            f"model.path={config.model.path}, whose token ids it reads. Start it from a model with the same tokenizer."
        )


def local_model_config(path: str) -> dict[str, Any] | None:
    """config.json of a local model or of one in the hub's cache; None where it is not at hand."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file() and not looks_local(path):
        file = _cached_config(path)
    if not file.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"model.path={path}: {file} is not JSON ({error}). Fetch or save the model anew.") from None
    return config


def _cached_config(name: str) -> Path:
    """Where the hub's cache has config.json of a model, if anywhere; the hub's own look-up imports an HTTP client."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    revision = reference.read_text().strip() if reference.is_file() else "main"
    return repository / "snapshots" / revision / "config.json"


def check_context(config: GRPOConfig) -> None:
    """Refuse sequences that the model's context cannot hold.

    Raises:
        ValueError: prompt and response together exceed max_position_embeddings.
    """
    context = (local_model_config(config.model.path) or {}).get("max_position_embeddings")
    if context is not None and config.max_sequence_tokens > context:
        raise ValueError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}: {config.max_sequence_tokens} tokens exceed the context of "
            f"model.path={config.model.path}, which is {context}. Shorten one of them."
        )


def attention_window(model: Mapping[str, Any]) -> int | None:
    """How many tokens some layer of a model attends to, from its config.json; None where all layers see everything."""
    text = model.get("text_config") or model
    kind = str(text.get("model_type"))
    windows = {name: text.get(key) for name, key in WINDOW_OF_LAYERS.items()}
    if "sliding_window" not in text:
        windows["sliding_attention"] = WINDOW_DEFAULT.get(kind)
    if not text.get("use_sliding_window", not kind.startswith(OFF_BY_DEFAULT)):
        windows["sliding_attention"] = None
    layers = text.get("layer_types")
    if layers is None:
        full = kind in ("qwen2", "qwen3") and text.get("max_window_layers", 0) >= text.get("num_hidden_layers", 1)
        layers = [] if full else ["sliding_attention"]
    return min((window for name in set(layers) if (window := windows.get(name)) is not None), default=None)


def window_problems(config: GRPOConfig, model: Mapping[str, Any] | None) -> list[str]:
    """One message for each model of a run whose window is shorter than its sequences; the learner computes no windows.

    Args:
        model: config.json of model.path, where it is at hand.
    """
    data, rollout = config.data, config.rollout
    asked = (
        f"data.max_prompt_tokens={data.max_prompt_tokens} + rollout.max_response_tokens={rollout.max_response_tokens}"
    )
    problems = [_window_problem("model.path", config.model.path, model, config.max_sequence_tokens, asked)]
    if isinstance(config, PPOConfig) and config.critic.path is not None:
        path = config.critic.path
        problems.append(
            _window_problem("critic.path", path, local_model_config(path), config.max_sequence_tokens, asked)
        )
    if config.reward_model is not None and config.reward_model.path is not None:
        path, longest = config.reward_model.path, config.reward_model.max_tokens_per_batch
        judge = local_model_config(path) or {}
        longest_fitting = min(longest, judge.get("max_position_embeddings", longest))
        asked = f"reward_model.max_tokens_per_batch={longest}"
        problems.append(_window_problem("reward_model.path", path, judge, longest_fitting, asked))
    return [problem for problem in problems if problem]


def check_windows(config: GRPOConfig | RewardTrainingConfig) -> None:
    """Refuse models whose attention window is shorter than the longest sequence that the learners may be given.

    Raises:
        ValueError: with the key of the path, the window and the keys that bound sequences.
    """
    path, model = config.model.path, local_model_config(config.model.path)
    if isinstance(config, RewardTrainingConfig):
        longest = config.data.max_tokens
        problems = [_window_problem("model.path", path, model, longest, f"data.max_tokens={longest}")]
    else:
        problems = window_problems(config, model)
    if any(problems):
        raise ValueError("\n".join(problem for problem in problems if problem))


def _window_problem(key: str, path: str, model: Mapping[str, Any] | None, longest: int, asked: str) -> str:
    window = attention_window(model or {})
    if window is None or longest <= window:
        return ""
    return (
        f"{key}={path}: some layers attend to the last {window} tokens alone (a sliding window), which the learner "
        f"does not compute, and {asked} allows sequences of {longest}. Use a model without a window, such as Qwen2, "
        f"Qwen3 or Llama, or allow at most {window} tokens."
    )


def load_tokenizer(model: ModelConfig) -> Any:
    """The model's tokenizer.

    Raises:
        ValueError: it cannot be loaded, from the folder or from the hub.
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
    """The id of rollout.truncate_token; None without one.

    Raises:
        ValueError: the tokenizer makes none or several tokens of it.
    """
    if rollout.truncate_token is None:
        return None
    ids = tokenizer.encode(rollout.truncate_token, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(
            f"rollout.truncate_token={rollout.truncate_token!r}: the model's tokenizer makes {len(ids)} tokens of it. "
            "Name one token, or use rollout.stop for a string."
        )
    return int(ids[0])
