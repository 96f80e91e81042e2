"""YAML files and dotted overrides -> one frozen config; every problem is a message with its key and remedy."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from rlhf.config.base import Section, file_problem, first_line, reads_as_another_type, short_value, suggest
from rlhf.config.describe import Key, describe_keys
from rlhf.config.limit import limited
from rlhf.config.printing import as_utf8
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.references import nodes, note_references, variables
from rlhf.config.secrets import HIDDEN, remember, with_references

if TYPE_CHECKING:
    import yaml
    from pydantic_core import ErrorDetails

C = TypeVar("C", bound=TrainingProgramConfig)
S = TypeVar("S", bound=Section)

MAX_YAML, MAX_DEPTH = 2**18, 50  # characters, with each alias written out, and levels

# Our keys -> their names in TRL; of several keys, the first that a program has. verl's names are nested and not listed.
NAMES_ELSEWHERE = {
    "model.path": "model_name_or_path",
    "model.lora.rank": "lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "lora_target_modules",
    "model.dtype": "torch_dtype",
    "data.train": "dataset_name",
    "data.template": "chat_template_path",
    "data.max_prompt_tokens": "max_prompt_length",
    "data.max_tokens": "max_length max_seq_length",
    "reward": "reward_funcs",
    "environment": "environment_factory",
    "rollout.prompts_per_step or learner.sequences_per_update or learner.pairs_per_update": (
        "batch_size per_device_train_batch_size"
    ),
    "rollout.samples_per_prompt": "num_generations",
    "rollout.max_response_tokens": "max_completion_length",
    "rollout.max_turns": "max_tool_calling_iterations",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "algo.advantage": "scale_rewards",
    "algo.clip_low and algo.clip_high": "epsilon",
    "algo.clip_high": "epsilon_high",
    "algo.loss_aggregation": "loss_type",
    "algo.mask_truncated": "mask_truncated_completions",
    "algo.kl_coef": "beta",
    "learner.optimizer.lr": "learning_rate",
    "learner.schedule.name": "lr_scheduler_type",
    "learner.schedule.warmup_fraction": "warmup_ratio",
    "learner.epochs_per_step": "num_iterations",
    "learner.minibatches_per_epoch": "steps_per_generation",
    "learner.max_tokens_per_microbatch": "gradient_accumulation_steps",
    "run.dir": "output_dir",
    "run.epochs or run.steps": "num_train_epochs",
    "run.steps": "max_steps",
    "checkpoint.every": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "evaluation.every": "eval_steps",
    "logging.wandb.mode": "report_to",
    "logging.wandb.name": "run_name",
    "cluster.tensor_parallel": "vllm_tensor_parallel_size",
}
OURS = {name: ours.split(" or ") for ours, names in NAMES_ELSEWHERE.items() for name in names.split()}

# Short forms: at these places a plain value stands for {key: value}. As an entry of a list it replaces the whole entry;
# as a section it replaces only the value of its key.
SHORT_SECTIONS: dict[tuple[str, ...], str] = {
    ("reward",): "parts",
    ("environment",): "name",
    ("environment", "by_name", "*"): "name",
}
DATA_SETS = ("data", "train"), ("data", "eval")
SHORT_ENTRIES: dict[tuple[str, ...], str] = {(*key, "*"): "path" for key in DATA_SETS}
SHORT_ENTRIES |= {("reward", "parts", "*"): "name", ("reward", "by_source", "*", "*"): "name"}


def load_config(
    schema: type[C],
    files: Sequence[str | Mapping[str, Any]],
    overrides: Sequence[str] = (),
    *,
    contradictions: Callable[[C], Iterable[str]] = lambda config: config.contradictions(),
    check: Callable[[C], Iterable[str]] = lambda config: (),
    complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values,
) -> C:
    """Read the YAML files in order (later ones win), then the overrides (`section.key=value`), and validate.

    A mapping may stand in place of a file: sections with keys, as Python values. `contradictions` between keys and the
    problems of `check`, such as a missing file, are refused. `complete` adds values for keys that the schema requires
    and the program does not read.
    """
    written = read_values(files, overrides)
    names = [str(file) for file in files if not isinstance(file, Mapping)]
    values = resolved(written, f"--config {' '.join(names)}" if names else "config")
    remember(values, variables(written))
    if unknown := [f"{key}={value}" for key, value in flat_keys(values).items() if HIDDEN in str(value)]:
        reason = "a secret stood here, which is stored nowhere. Set an environment variable to it, and write"
        raise ValueError("\n".join(f"{given}: {reason} ${{oc.env:VARIABLE}} in its place." for given in unknown))
    config = validated(schema, schema.completed(complete(values)))
    note_references(written, values, config.model_dump(mode="json"))
    if problems := [*contradictions(config), *check(config)]:
        raise ValueError("\n".join(problems))
    return config


def read_values(files: Sequence[str | Mapping[str, Any]], overrides: Sequence[str]) -> dict[str, Any]:
    """Files and overrides merged into one mapping. Does not validate, and leaves each `${...}` as it was written."""
    values: dict[str, Any] = {}
    layers = (dict(file) if isinstance(file, Mapping) else _read(file) for file in files)
    for layer in (*layers, *map(parse_override, overrides)):
        values = merged(values, layer)
    return values


def wrong_keys(schema: type[Section], values: dict[str, Any]) -> set[str]:
    """Names of the keys that a schema does not know, or whose values it refuses. Missing keys do not count."""
    try:
        schema.model_validate_json(json.dumps(values), context={})
    except ValidationError as error:
        return {".".join(map(str, problem["loc"])) for problem in error.errors() if problem["type"] != "missing"}
    return set()


def resolved(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The values with each `${...}` replaced by the key or variable that it names; `source` is for messages."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not any(isinstance(value, str) and "${" in value for _, value in nodes(values)):
        return values
    try:
        with limited(f"{source}: to follow the references ${{...}} {{}}. Write values in place of some."):
            return OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[return-value]
    except RecursionError:
        raise ValueError(f"{source}: a value has too many ${{...}} within another. Write values in place.") from None
    except OmegaConfBaseException as error:
        remedy = "In a value, ${...} stands for another key; write \\${...} where it is text."
        raise ValueError(f"{error.full_key}: {first_line(error)}. {remedy}") from None


def resolved_yaml(config: Section) -> str:
    """The whole config with every default, without secrets, as YAML that loads to the same config."""
    return as_yaml(with_references(json.loads(config.model_dump_json())))


def as_yaml(values: dict[str, Any]) -> str:
    """Stored values as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(values))


def stored_values(file: Path) -> dict[str, Any]:
    """The values of a file that `resolved_yaml` wrote, with its references to variables; ValueError if it has none."""
    return _read(str(file), name=str(file))


def flat_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of a config by its full name, such as `reward.parts.0.name`."""
    if isinstance(values, list) and any(isinstance(item, dict) for item in values):
        values = {str(number): item for number, item in enumerate(values)}
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    flat = [flat_keys(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items()]
    return {key: value for part in flat for key, value in part.items()}


def _read(file: str, *, name: str = "") -> dict[str, Any]:
    """The values of a YAML file. `name`: its name in messages, if that is not `--config FILE`."""
    from omegaconf import OmegaConf

    remedy = "" if name else " Give the path of a YAML file; `rlhf configs` lists some."
    name = name or f"--config {file}"
    if problem := file_problem(Path(file)):
        raise ValueError(f"{name}: {problem}.{remedy}")
    try:
        _check_yaml(text := Path(file).read_text("utf-8"))
        content: Any = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        json.dumps(content)
    except Exception as error:  # the YAML parser raises many types, all about the file
        raise ValueError(f"{name}: not readable as YAML: {error}") from error
    if isinstance(content, dict):
        return content
    raise ValueError(f"{name}: holds a {type(content).__name__}. Write sections, such as `run:`, with keys.")


def _check_yaml(text: str) -> None:
    """Raise a ValueError for a text that is too long or too deep to be part of a config, also by its aliases."""
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader) if len(text) <= MAX_YAML else None
    if len(text) > MAX_YAML or (node and _length(node, {}, 0) > MAX_YAML):
        raise ValueError(f"longer than {MAX_YAML:,} characters, or deeper than {MAX_DEPTH} levels, aliases written out")


def _length(node: yaml.Node, known: dict[int, float], depth: int) -> float:
    """Size of a YAML node in characters and values, with aliases written out. Infinite for a cycle."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is known
        below = itertools.chain(*node.value) if node.id == "mapping" else node.value
        parts = len(below) if isinstance(below, str) else sum(_length(child, known, depth + 1) for child in below)
        known[id(node)] = 1 + parts if depth <= MAX_DEPTH else math.inf
    return known[id(node)]


def parse_override(override: str) -> dict[str, Any]:
    """`section.key=value` as nested values."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, separator, text = override.partition("=")
    if not separator or not key or any(not part for part in key.split(".")) or key.count(".") > MAX_DEPTH:
        raise ValueError(f"{override!r}: not an override. Write section.key=value, such as run.steps=10.")
    try:
        _check_yaml(text)
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
        json.dumps(values)
    except OmegaConfBaseException as error:
        raise ValueError(f"{override!r}: {first_line(error)}") from error
    except Exception as error:  # the YAML parser, about the value
        raise ValueError(
            f"{override!r}: the value is not readable as YAML ({first_line(error)}). Quote it: {key}='\"...\"'."
        ) from error
    return values


def merged(base: Any, overlay: Any, path: tuple[str, ...] = ()) -> Any:
    """Merge mappings key by key, and `{"1": value}` into the second entry of a list; replace anything else as a whole.

    A short form counts as the mapping that it stands for. `path`: the keys that lead to both. ValueError for an entry
    that is not in the list, or a key that does not say which data set it is of.
    """
    base, overlay = _in_long_form(base, overlay, path)
    if isinstance(base, list) and _names_entries(overlay):
        entries = dict(enumerate(base))
        for name, value in overlay.items():
            if int(name) not in entries:
                reason = f"no such entry ({len(base)} in all, counted from 0). Name another, or write the whole list"
                raise ValueError(f"{'.'.join(path)}.{name}: {reason}.")
            entries[int(name)] = merged(entries[int(name)], value, (*path, str(name)))
        return [*entries.values()]
    if not (isinstance(base, dict) and isinstance(overlay, dict)):
        return overlay
    return base | {name: merged(base.get(name), value, (*path, str(name))) for name, value in overlay.items()}


def _in_long_form(base: Any, overlay: Any, path: tuple[str, ...]) -> tuple[Any, Any]:
    """Both values, in forms that can be merged."""
    if base is None or overlay is None:
        return base, overlay
    if path in DATA_SETS and isinstance(overlay, dict):  # one data set may stand without the list
        listed = base if isinstance(base, list) else [base]
        if _names_entries(overlay):
            return listed, overlay
        if len(listed) == 1:
            return listed, {"0": overlay}
        if "path" not in overlay:
            data, name = ".".join(path), next(iter(flat_keys(overlay)))
            reason = f"there are {len(listed)} data sets. Name one by its number: {data}.0.{name.rpartition('.')[2]}"
            raise ValueError(f"{data}.{name}: {reason}.")
    elif (key := _key_of(path, SHORT_SECTIONS)) is not None:
        base, overlay = (
            each if isinstance(each, dict) and not _names_entries(each) else {key: each} for each in (base, overlay)
        )
    elif (key := _key_of(path, SHORT_ENTRIES)) is not None and isinstance(base, str) and isinstance(overlay, dict):
        base = {key: base}
    return base, overlay


def _names_entries(value: Any) -> bool:
    """True for a mapping whose keys number the entries of a list, as in `reward.0.weight=2`."""
    return isinstance(value, dict) and bool(value) and all(str(name).isdecimal() for name in value)


def _key_of(path: tuple[str, ...], keys: Mapping[tuple[str, ...], str]) -> str | None:
    """The key that a short form at this path stands for, or None."""
    for at, key in keys.items():
        if len(at) == len(path) and all(name in ("*", here) for name, here in zip(at, path, strict=True)):
            return key
    return None


def validated(schema: type[S], values: dict[str, Any], *, section: str = "") -> S:
    """Validate the values of a whole config, or of the section of this name. Does not check contradictions."""
    reason = "it is not UTF-8 (a lone surrogate). Write the whole character, or rename the file"
    pairs = {f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in flat_keys(values).items()}
    if broken := [f"{pair}: {reason}." for pair in sorted(pairs) if pair != as_utf8(pair)]:
        raise ValueError("\n".join(broken))
    try:
        return schema.model_validate_json(json.dumps(values), context={})
    except ValidationError as error:
        keys = {key.name: key for key in describe_keys(schema, _key_pattern(f"{section}.") if section else "")}
        problems = error.errors()
        if any(problem["type"] == "extra_forbidden" for problem in problems):  # what is missing may be spelled wrongly
            problems = [problem for problem in problems if problem["type"] != "missing"]
        lines = dict.fromkeys(line for problem in problems for line in _messages(problem, keys, section))
        raise ValueError("\n".join(lines)) from None


def _messages(problem: ErrorDetails, keys: Mapping[str, Key], section: str) -> Iterator[str]:
    """The messages about one problem; `keys` are all keys of the schema by name, `section` as in `validated`."""
    key = ".".join(map(str, (section, *problem["loc"]) if section else problem["loc"]))
    given, described = f"{key}={short_value(problem['input'])}", keys.get(_key_pattern(key))
    message = problem["msg"].removeprefix("Value error, ")
    match problem["type"]:
        case "extra_forbidden":
            yield f"{given}: there is no such key. {nearest_key(key, keys)}"
        case "missing" if isinstance(problem["loc"][-1], int):
            name = key.rpartition(".")[0]
            yield f"{name}: too few entries, its type is {keys[name].kind}."
        case "missing":
            below = [name for name in keys if f"{name}.".startswith(f"{key}.") and keys[name].default is None]
            below = [name for name in below if "[]" not in name]  # keys of a list that is not there
            for missing in below or [key]:
                yield f"{missing}: required and not set. Set it in the YAML or as {missing}=VALUE."
        case "value_error":
            path = [*([section] if section else []), *map(str, problem["loc"])]
            top = path[0] if path else ""
            if not message.startswith(top):
                yield f"{key}: {message}"
            elif path[1:2] == ["by_name"]:  # one of several speaks as if it were the only one
                yield re.sub(rf"(?<!\S){top}\.", f"{'.'.join(path[:3])}.", message)
            else:
                yield message
        case "string_type" if isinstance(problem["input"], bool | int | float):
            text = json.dumps(problem["input"])
            yield f"{given}: text is expected, and YAML reads this as another type. Quote it: {key}='\"{text}\"'."
        case "model_type" | "model_attributes_type":
            example = next((f"{name}=VALUE" for name in keys if name.startswith(f"{key}.")), f"{key}.KEY=VALUE")
            example = "reward=[{name: math}]" if key == "reward" else example
            yield f"{given}: a section is expected. Set a key in it, such as {example}."
        case "literal_error" if described is not None:
            yield f"{given}: it has to be {problem['ctx']['expected']} ({described.description})."
        case "int_type" | "float_type" | "bool_type" if reads_as_another_type(problem["input"]):
            yield f"{given}: the quotes make it text. Write {key}={problem['input']}."
        case _:
            meaning = f" ({described.kind}: {described.description})" if described is not None else ""
            yield f"{given}: {message[0].lower()}{message[1:]}{meaning or '. See --help for this key'}."


def nearest_key(key: str, keys: Iterable[str]) -> str:
    """`Did you mean KEY?`: the same name in another section, our key for TRL's name, or the most similar key."""
    section, _, name = key.rpartition(".")
    paths = dict.fromkeys(known[: dot.start()] for known in keys for dot in re.finditer(r"\.|$", known))  # and sections
    ours = [each for each in OURS.get(name, ()) if paths.keys() >= set(each.split(" and "))][:1]
    if moved := [path for path in paths if f".{path}".endswith(f".{name}") and "[]" not in path] + ours:
        return f"Did you mean {' or '.join(moved)}?"
    prefix, general = (f"{section}.", f"{_key_pattern(section)}.") if section else ("", "")
    names = [re.split(r"[.[]", path.removeprefix(general))[0] for path in paths if path.startswith(general)]
    return suggest(name, dict.fromkeys(names), prefix)


def _key_pattern(key: str) -> str:
    """`data.train.0.path` -> `data.train[].path`, as the list of keys names it."""
    return re.sub(r"\.\d+", "[]", key)
