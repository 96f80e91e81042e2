"""The examination of every model of a run, before anything starts.

`model_problems` makes the checks that need no class of the model; --plan makes them too. They import no torch,
except where only transformers can tell which tokens it loads (`stored_vocabulary`).
`examine_models` adds the checks that need the class: transformers loads each model without its data. A hub model whose
files are not in the cache is examined when it is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from rlhf.check.model_shape import config_at, shape_at
from rlhf.check.resources import joins_a_cluster
from rlhf.config.base import error_text
from rlhf.config.grpo import GRPOConfig
from rlhf.config.model_folder import local_model_folder, looks_local, read_json
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.reward_model import reward_model_record
from rlhf.config.roles import ENGINE, REWARD_MODEL, Role
from rlhf.config.sections import ModelConfig
from rlhf.data.model_files import (
    EXPERT_KEYS,
    chat_template_text,
    check_weights,
    class_problem,
    embedding_rows,
    hub_silence,
    lacks_chat_template,
    load_tokenizer,
    local_model_config,
    reward_template,
    text_config,
)
from rlhf.data.vocabulary import check_vocabulary, lacks_tokenizer

WITH_TORCHVISION = "qwen3_5"  # the beginning of model types (Qwen 3.5 to 3.8) whose class in vLLM imports it
TOKENIZER = "tokenizer.json"
NAMED_TOKENS = ("bos_token", "eos_token")  # in tokenizer_config.json; config.json has their ids
PADDING = "pad_token"  # a row of the embedding by config.json; tokenizers may have another, since rows are not padded
# keys of config.json with a number of query heads: of all layers, of those with windows, of each one
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_sliding_attention_heads", "swa_num_attention_heads",
    "num_attention_heads_per_layer",
)  # fmt: skip
BY_THE_LONGEST = ("dynamic", "longrope", "su")  # rotary positions whose frequencies the longest sequence sets
QUANTIZED = ("quantization_config", "compression_config")  # keys of config.json
DEQUANTIZED = ("compressed-tensors", "fp8", "mxfp4")  # methods whose config in transformers has `dequantize`


@dataclass(frozen=True)
class RunModel:
    """A model that a run loads."""

    key: str  # the key that names the model; `path` is its value
    path: str
    scalar: bool = False  # the model gives one number, not logits
    template: str | None = None  # of the texts that it reads; None if it gets the policy's token ids
    is_trained: bool = False  # not frozen
    is_served: bool = False  # only engines load the model
    sharing: int = 1  # learners that share each of its sequences

    @property
    def label(self) -> str:
        return f"{self.key}={self.path}"


def run_models(config: TrainingProgramConfig, *, trains: bool = True) -> list[RunModel]:
    """Every model of the run, once for each way in which it is loaded."""
    models = [
        RunModel(
            role.model_key, role.model, role.scalar, template=_role_template(role, config),
            is_trained=role.training is not None, is_served=not trains,
            sharing=1 if role.training is None else config.cluster.sequence_parallel,
        )
        for role in config.roles(trains=trains)
    ]  # fmt: skip
    sharing = config.cluster.sequence_parallel
    models += [RunModel(key, path, sharing=sharing) for key, path in (config.further_models if trains else {}).items()]
    once: dict[tuple[str, bool, bool], RunModel] = {}
    for model in models:  # the learner comes before the engine of its model
        # a critic may start without a head, a reward model of the same path may not
        once.setdefault((model.path, model.scalar, model.scalar and model.is_trained), model)
    return list(once.values())


def _role_template(role: Role, config: TrainingProgramConfig) -> str | None:
    if role.name == REWARD_MODEL:
        reward_model = cast(GRPOConfig, config).reward_model
        assert reward_model is not None
        return reward_template(reward_model)
    if role.model_key != "model.path":
        return None
    template: str | None = cast(Any, config.data).template  # each program's data has one
    return template or "model"


def examine_models(config: TrainingProgramConfig, *, trains: bool = True) -> list[str]:
    """Check all files of the models. Returns the reasons to refuse the run."""
    models = run_models(config, trains=trains)
    problems = model_problems(config, trains=trains)
    refused: set[str] = set()
    for model in [m for m in models if not any(problem.startswith(f"{m.label}:") for problem in problems)]:
        if model.path not in refused and (refusals := collect_problems(partial(check_class, model, config.model))):
            refused.add(model.path)
            problems += refusals
    if not problems and trains and config.model.lora is not None and local_model_config(config.model.path) is not None:
        from rlhf.data.adapted_layers import adapted_layers  # imports torch and transformers

        problems += collect_problems(lambda: adapted_layers(config))
    absent = [m for m in models if not looks_local(m.path) and local_model_config(m.path) is None]
    if absent and (silence := hub_silence()):
        problems += [
            f"{m.label}: there is no such folder, the cache of this machine does not have it, and the hub cannot be "
            f"asked ({silence}). Name a local folder, or fetch it where the hub answers: hf download {m.path}"
            for m in absent
        ]
    return list(dict.fromkeys(problems))


def collect_problems(*checks: Callable[[], object]) -> list[str]:
    """The messages of all checks that raise ValueError."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems += str(error).splitlines()
    return problems


# --- checks without the class of a model ---


def model_problems(config: TrainingProgramConfig, *, trains: bool = True) -> list[str]:
    """Check the files of the models without their classes. Returns the reasons to refuse the run."""
    models = run_models(config, trains=trains)
    problems = collect_problems(*(partial(check_files, model) for model in models))
    if not problems:
        problems += _mismatches(config, trains=trains)
    problems += collect_problems(*(partial(check_weights_and_tokenizer, model) for model in models))
    return list(dict.fromkeys(problems))


def check_files(model: RunModel) -> None:
    """Check that the local folder, or the copy in the hub's cache, is a model that a run can use; else ValueError."""
    label = model.label
    if looks_local(model.path):
        if not Path(model.path).is_dir():
            raise ValueError(f"{label}: there is no such folder. Give a folder in Hugging Face format, or a hub name.")
        is_adapter = (Path(model.path) / "adapter_config.json").is_file()
        if not (Path(model.path) / "config.json").is_file():
            if is_adapter:
                raise ValueError(f"{label}: it is an adapter. Make a whole model of it: rlhf export RUN DIR --merge.")
            raise ValueError(f"{label}: no config.json in it. Give a folder in Hugging Face format.")
        if is_adapter:
            raise ValueError(
                f"{label}: it has adapter_config.json next to config.json, and transformers would load the adapter's "
                "base model where peft is installed. Remove adapter_config.json if the weights are merged; else merge "
                "them: rlhf export RUN DIR --merge."
            )
    try:
        config = local_model_config(model.path)
        if config is None:
            return
        if not model.is_served:
            _check_unquantized(config)
        _check_token_ids(model, config)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def check_weights_and_tokenizer(model: RunModel) -> None:
    """Check that the weights, and the policy's tokenizer, are there and complete; else raise a ValueError."""
    try:
        if local_model_config(model.path) is None:
            return
        check_weights(model.path)
        if model.key == "model.path" and lacks_tokenizer(model.path):
            raise ValueError("the model has no tokenizer. Put its files into the folder, such as tokenizer.json.")
    except ValueError as error:
        raise ValueError(f"{model.label}: {error}") from None


def quantization_method(config: Mapping[str, Any]) -> str:
    """The method of a quantized model; an empty string if the model is not quantized."""
    settings = [c.get(key) for c in (config, text_config(dict(config))) for key in QUANTIZED]
    return next((str(s.get("quant_method") or ", ".join(s)) for s in settings if isinstance(s, dict)), "")


def _check_unquantized(config: Mapping[str, Any]) -> None:
    if method := quantization_method(config):
        raise ValueError(
            f"by config.json it is quantized ({method}), and there is no quantized training. Name the model in its "
            "unquantized form (bfloat16)"
            + (method in DEQUANTIZED)
            * ", or make one: load it in transformers with `dequantize=True` in its "
            "quantization config, and save it"
            + ". If its weights are unquantized already, remove quantization_config from config.json."
        )


def _check_token_ids(model: RunModel, config: dict[str, Any]) -> None:
    """Raise a ValueError if a token that the run needs has an id beyond the model's embedding.

    Tokenizers may have more tokens than their model, and models more rows than tokens. The tokens of rows are checked
    when these are read.
    """
    rows, folder = embedding_rows(model.path), local_model_folder(model.path)
    settings = {"config.json": config | text_config(config)}
    if model.template is not None and not model.scalar:
        settings["generation_config.json"] = read_json(folder / "generation_config.json")
    names = {"config.json": (PADDING, *NAMED_TOKENS) if model.template is not None else (PADDING,)}
    beyond = [
        f"{name}_id={number} ({file})"
        for file, values in settings.items()
        for name in names.get(file, NAMED_TOKENS)
        for number in _as_list(values.get(f"{name}_id"))
        if isinstance(number, int) and number >= rows
    ]
    if model.template is not None:
        beyond += [
            f"{content!r}={number} (tokenizer)"
            for content, number in needed_tokens(folder, model.template).items()
            if number >= rows
        ]
    if beyond:
        raise ValueError(
            f"the model has embeddings for {rows} tokens (vocab_size of config.json), but these tokens have higher "
            f"ids: {', '.join(beyond)}. Use the files that belong to the model, or enlarge it in transformers "
            "(resize_token_embeddings) and save it with its tokenizer."
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def needed_tokens(folder: Path, template: str) -> dict[str, int]:
    """The added tokens of a tokenizer that have a role or stand in the chat template, with their ids."""
    settings = read_json(folder / "tokenizer_config.json")
    roles = [settings.get(name) for name in NAMED_TOKENS]
    named = [role.get("content") if isinstance(role, dict) else role for role in roles]
    text = chat_template_text(folder) if template == "model" else ""
    added = added_tokens(folder)
    return {content: number for content, number in added.items() if content in named or content in text}


def added_tokens(folder: Path) -> dict[str, int]:
    """Content and id of each token that was added to the vocabulary, special or not, from the tokenizer's files."""
    settings, added = read_json(folder / "tokenizer_config.json"), read_json(folder / "added_tokens.json")
    file = folder / TOKENIZER
    try:
        decoder = settings.get("added_tokens_decoder") or {}
        added = {token["content"]: int(number) for number, token in decoder.items()} | added
        text = file.read_text() if file.is_file() else ""
        if (at := text.find('"added_tokens"')) >= 0:  # the rest of the file takes longer to parse
            tokens, _ = json.JSONDecoder().raw_decode(text, text.index("[", at))
            added |= {token["content"]: token["id"] for token in tokens}
        return {str(content): int(number) for content, number in added.items()}
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}). Download or save the tokenizer again.") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{folder}: the added tokens of its tokenizer cannot be read ({error!r}). Download or save it again."
        ) from None


# --- checks with the class of a model ---


def check_class(model: RunModel, of_policy: ModelConfig) -> None:
    """Check that transformers has a class for the model and can load its files; else raise a ValueError."""
    if problem := class_problem(model.path, model.key, generates=not model.scalar):
        raise ValueError(problem)
    config, folder = local_model_config(model.path), local_model_folder(model.path)
    from rlhf.learner.loading import has_weights  # imports torch and transformers

    loaded = of_policy.model_copy(update={"path": str(folder)})  # transformers would ask the hub for a name
    if config is None or not has_weights(folder) or ("auto_map" in config and loaded.trust_remote_code):
        return  # the same is checked when it is loaded
    try:
        _load_without_data(model, loaded)
    except ValueError as error:
        why = " ".join(str(error).split()).removeprefix(f"{model.key}={folder}: ")
        if not (model.is_served and quantization_method(config)):
            raise ValueError(f"{model.label}: {why}") from None
    except Exception as error:  # any type, if config.json does not suit the class
        raise ValueError(
            f"{model.label}: transformers cannot make a model of its config.json ({error_text(error)}). Correct it, or "
            "download or save the model again."
        ) from None
    else:
        if method := quantization_method(config):
            raise ValueError(
                f"{model.label}: config.json says that it is quantized ({method}), but its weights are not. Remove "
                "quantization_config from config.json."
            )


def _load_without_data(model: RunModel, loaded: ModelConfig) -> None:
    """Load the model without data, as the run does; `loaded.path` is its folder."""
    from rlhf.learner.loading import check_report, check_tied, load
    from rlhf.learner.packed_mixers import mixers_of, unshared
    from rlhf.learner.policy_model import load_language_model
    from rlhf.learner.text_model import language_model
    from rlhf.learner.tiles import dense_mlps
    from rlhf.learner.value_model import read_scalar_transformer

    path, key = loaded.path, model.key
    if not model.scalar:
        _check_generation_config(Path(path))
    if model.is_served:
        _, kind = language_model(path, trust_remote_code=loaded.trust_remote_code)
        # vLLM has its own attention, whatever config.json names
        transformer, report = load(kind, path, loaded, without_data=True, attn_implementation="eager")
        check_report(transformer, report, path, key=key)
        check_tied(transformer, path, key=key)
    elif model.scalar:
        needs_head = not model.is_trained
        transformer, _ = read_scalar_transformer(path, loaded, key=key, needs_head=needs_head, without_data=True)
    else:
        transformer = load_language_model(loaded, key=key, exported=model.is_trained, without_data=True)
    if model.sharing > 1 and (mixers := mixers_of(transformer)):
        raise ValueError(unshared(mixers[0]).of(model.sharing, key, path))
    if model.is_trained and loaded.gradient_checkpointing == "tiled":
        dense_mlps(transformer)


def _check_generation_config(folder: Path) -> None:
    """Raise a ValueError for a generation_config.json that the learners could not load."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return
    try:
        ends = _as_list(GenerationConfig.from_pretrained(folder).eos_token_id)
    except Exception as error:  # any type
        raise ValueError(
            f"transformers does not take its generation_config.json ({error_text(error)}). Correct or remove it."
        ) from None
    if unknown := [end for end in ends if end is not None and not isinstance(end, int)]:
        raise ValueError(f"eos_token_id={unknown[0]!r} in generation_config.json is no id of a token. Write numbers.")


# --- checks against the run ---


def _mismatches(config: TrainingProgramConfig, *, trains: bool) -> Iterator[str]:
    """Contexts, vocabularies and attention heads that do not fit the run."""
    policy = text_config(config_at(config.model.path) or {})
    if config.max_sequence_tokens > (context := _context_tokens(policy)):
        yield (
            f"{config.sequence_keys}: {config.max_sequence_tokens} tokens exceed the context of model.path="
            f"{config.model.path}, which is {context}. Shorten the sequences."
        )
    kind = str(policy.get("model_type"))
    engines = any(role.name == ENGINE for role in config.roles(trains=trains)) and not joins_a_cluster(config)
    on_cpu = engines and config.cluster.device == "cpu"  # vLLM for GPUs brings it
    if on_cpu and kind.startswith(WITH_TORCHVISION) and find_spec("torchvision") is None:
        yield (
            f"model.path={config.model.path}: vLLM's class for model_type={kind!r} imports torchvision, which is not "
            "installed, so no engine would start. Install the build that fits the installed torch (docs/models.md); "
            "rlhf sft trains such a model without it."
        )
    replays = trains and isinstance(config, GRPOConfig) and config.learner.replays_experts
    if replays and policy and not any(policy.get(key) for key in EXPERT_KEYS):
        given = f"learner.router_replay=rollout with model.path={config.model.path}"
        yield f"{given}: the model has no experts. Set it to none."
    if trains and config.cluster.sequence_parallel > 1:
        yield from sharing_problems(config)
    heads = policy.get("num_attention_heads")
    if isinstance(config, GRPOConfig) and isinstance(heads, int) and heads % config.cluster.tensor_parallel:
        yield (
            f"cluster.tensor_parallel={config.cluster.tensor_parallel} does not divide the model's {heads} attention "
            "heads, so vLLM will refuse it. Use a divisor."
        )
    for key, path in config.further_models.items() if trains else ():
        if config.max_sequence_tokens > (context := _context_tokens(text_config(local_model_config(path) or {}))):
            yield (
                f"{key}={path}: its context is {context} tokens, but it reads sequences of "
                f"{config.max_sequence_tokens} ({config.sequence_keys}). Shorten them, or name another model."
            )
    for key, path in config.fed_models.items() if trains else ():
        size = embedding_rows(path)
        if size < (policy.get("vocab_size") or 0):
            yield (
                f"{key}={path}: its vocabulary of {size} tokens is smaller than the {policy['vocab_size']} of "
                f"model.path={config.model.path}, whose token ids it reads. Start it from a model with the same "
                "tokenizer."
            )
        yield from collect_problems(partial(check_stored_vocabulary, config.model, key, path))
    for role in config.roles(trains=trains):
        if role.name == REWARD_MODEL:
            yield from _template_problem(role, config)


def sharing_problems(config: TrainingProgramConfig) -> Iterator[str]:
    """Why learners cannot share sequences of these models: their heads, layers with a state, rotary positions."""
    cluster, own = config.cluster, {role.model_key: role.model for role, _ in config.trained_roles()}
    for key, path in (own | config.further_models).items():
        sizes, given = text_config(config_at(path) or {}), f"{cluster.sequence_parallel=!s} with {key}={path}"
        heads = {count for name in HEADS for count in _as_list(sizes.get(name)) if isinstance(count, int)}
        common = math.gcd(*heads)
        if common % cluster.sequence_parallel:
            fitting = [s for s in range(2, cluster.learners + 1) if not common % s and not cluster.learners % s]
            yield (
                f"{given}: it does not divide the model's {' and '.join(map(str, sorted(heads)))} attention heads, of "
                f"which each learner computes a part. With {cluster.learners=} use "
                f"{' or '.join(map(str, fitting)) or 1}."
            )
        shape = shape_at(path)
        if shape is not None and shape.attention_layers < shape.layers:
            yield (
                f"{key}={path}: {cluster.sequence_parallel} learners cannot share a sequence of this model, since "
                f"{shape.layers - shape.attention_layers} of its {shape.layers} layers have no attention and may carry "
                "a state along the sequence. Set cluster.sequence_parallel to 1."
            )
        rotary = sizes.get("rope_parameters") or sizes.get("rope_scaling") or {}
        by_layer_type = [each for each in rotary.values() if isinstance(each, dict)]
        for each in by_layer_type or [rotary]:
            original = each.get("original_max_position_embeddings") or sizes.get("original_max_position_embeddings")
            kind = each.get("rope_type") or each.get("type")
            if kind in BY_THE_LONGEST and (original or math.inf) < config.max_sequence_tokens:
                yield (
                    f"{given}: of sequences over {original} tokens its positions ({kind}) depend on the longest, and "
                    f"each learner sees another one. Shorten {config.sequence_keys}, or set it to 1."
                )
                break


def check_stored_vocabulary(policy: ModelConfig, key: str, path: str) -> None:
    """`check_vocabulary` of a model that is fed the policy's ids, if both have a tokenizer.json on this machine.

    Tokenizers in another form are compared when the run starts.
    """
    paths = {"model.path": policy.path, key: path}
    if all((local_model_folder(each) / TOKENIZER).is_file() for each in paths.values()):
        own, other = (stored_vocabulary(policy.model_copy(update={"path": p}), k) for k, p in paths.items())
        check_vocabulary(own, other, f"{key}={path}")


def stored_vocabulary(model: ModelConfig, key: str) -> dict[int, str]:
    """The tokens by id that transformers loads from a tokenizer.json.

    If tokenizer_config.json has an added_tokens_decoder without some of the added tokens, some classes of transformers
    drop these and number the others anew, so the tokenizer is loaded.
    """
    folder = local_model_folder(model.path)
    settings, added = read_json(folder / "tokenizer_config.json"), added_tokens(folder)
    try:
        kept = settings.get("added_tokens_decoder")
        if kept is not None and added.keys() - {token["content"] for token in kept.values()}:
            vocabulary = load_tokenizer(model.model_copy(update={"path": str(folder)}), key=key).get_vocab()
        else:
            words = read_json(folder / TOKENIZER)["model"]["vocab"]
            ids = words if isinstance(words, dict) else {word[0]: number for number, word in enumerate(words)}
            vocabulary = {**ids, **added}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{key}={model.path}: its {TOKENIZER} is not a tokenizer of Hugging Face ({error!r}). Download or save it "
            "again."
        ) from None
    return {number: token for token, number in vocabulary.items()}


def _context_tokens(config: Mapping[str, Any]) -> float:
    """The longest sequence that a model reads, tokens; infinite if config.json does not say."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")  # most; GPT-2 and its kin; MPT and DBRX
    return next((tokens for name in names if isinstance(tokens := config.get(name), int)), math.inf)


def _template_problem(role: Role, config: TrainingProgramConfig) -> Iterator[str]:
    """A problem if conversations cannot be written in the template that the reward model needs."""
    recorded, template = reward_model_record(role.model).get("template"), _role_template(role, config)
    if recorded not in (None, template):
        yield (
            f"reward_model.template={template}: {role.model_key}={role.model} was trained with "
            f"{recorded}. Remove the key, or train the model with that template (data.template of rlhf.reward_model)."
        )
    elif lacks_tokenizer(role.model):
        yield (
            f"{role.model_key}={role.model}: the model has no tokenizer, but a reward model reads texts. Put the "
            "tokenizer of its training into the folder."
        )
    elif template == "model" and lacks_chat_template(role.model):
        yield (
            f"{role.model_key}={role.model}: its tokenizer has no chat template. Set reward_model.template to the one "
            "it was trained with: raw (the response right after the prompt), qa, chatml, qwen-math or tulu."
        )
