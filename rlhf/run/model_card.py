"""README.md of an exported model: base model, changed keys, use, license, evaluation, data, code and config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.load import as_yaml
from rlhf.config.model_folder import local_model_folder, looks_local
from rlhf.config.non_defaults import config_of_any_program, non_default_values
from rlhf.config.printing import as_utf8
from rlhf.config.references import from_environment
from rlhf.config.secrets import hide
from rlhf.config.sections import UNRESTRICTED, LoraConfig
from rlhf.log.panels import metric_title
from rlhf.log.sinks import training_data_note
from rlhf.run.state import RunState

NEW_TOKENS = 512  # in the example, if the config sets no longest response
LONGEST = 2000  # characters of a message in the example
LICENSE_KEYS = ("license", "license_name", "license_link")  # in the front matter that the hub reads
METHODS = {"grpo": "GRPO", "ppo": "PPO", "sft": "supervised fine-tuning", "reward_model": "training on preferences"}
SCORES = (
    "A reward model (one label): `reward_model: {path: FOLDER}` in the config of a run adds its score to the reward."
)


def model_card(state: RunState, *, merged: bool = False) -> str:
    """Markdown with the hub's front matter; `merged`: an adapter was added to the weights of its base."""
    config = state.config
    is_adapter = bool(config["model"].get("lora")) and not merged
    base, program = state.base or config["model"]["path"], state.program  # it may be a reference
    task = "text-classification" if program == "reward_model" else "text-generation"
    head = [
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        f"pipeline_tag: {task}",
        f"tags: [rlhf, {program}]",
    ]
    if state.base and not looks_local(base):
        head.append(f"base_model: {base}")
    stated = _license(from_environment(base))
    head += [f"{key}: {value}" for key, value in stated.items()]
    named = stated.get("license_name") or stated.get("license") or "its folder does not name it"
    sources = state.stream.get("sources", {})
    rows = sum(source["rows"] for source in sources.values())
    trained = f"{state.account.trained:,} responses" if "rollout" in config else f"{rows:,} rows"
    sections = [
        "\n".join(["---", *head, "---"]),
        f"# {Path(config['run']['dir']).name}, step {state.step}{training_data_note(state.evaluations.values())}",
        f"`{base}` after {state.step} of {config['run']['steps']} steps of {METHODS.get(program, program)} with rlhf: "
        f"{state.updates_taken} optimizer steps on {trained}.",
        "## What was changed\n\nThe keys of the config that differ from the defaults.\n\n"
        f"```yaml\n{as_yaml(non_default_values(config))}```",
        "## Use\n\n" + (SCORES if program == "reward_model" else _usage(state, base, is_adapter=is_adapter)),
        f"## License\n\nThat of the base model, `{base}`: {named}.",
        "## Evaluation\n\n" + _evaluation(state),
        "## Data\n\n" + _table("source", {name: {"rows": of["rows"], "fingerprint": of["fingerprint"]}
                                          for name, of in sources.items()}),
        "## Code\n\n" + _table("", {"value": state.code}),
        f"## Config\n\n<details><summary>Every key</summary>\n\n```yaml\n{as_yaml(config)}```\n\n</details>",
    ]  # fmt: skip
    return as_utf8("\n\n".join(section for section in sections if not section.endswith("\n\n")) + "\n")


def _license(base: str) -> dict[str, str]:
    """The license keys in the front matter of the base model's README; empty if there are none."""
    readme = local_model_folder(base) / "README.md"
    _, *rest = readme.read_text(errors="replace").split("---\n") if readme.is_file() else [""]
    try:
        values = yaml.safe_load(rest[0]) if rest else None
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    return {key: str(values[key]) for key in LICENSE_KEYS if key in values} if isinstance(values, dict) else {}


def _usage(state: RunState, base: str, *, is_adapter: bool) -> str:
    """How to serve and load the model, with the first prompt that it was trained with."""
    data, rollout = state.config["data"], state.config.get("rollout", {})
    longest, temperature = rollout.get("max_response_tokens", NEW_TOKENS), rollout.get("temperature", 1.0)
    sampling = {"max_new_tokens": longest, "temperature": temperature}
    sampling |= {name: rollout[name] for name, all_ in UNRESTRICTED.items() if rollout.get(name, all_) != all_}
    example: list[dict[str, Any]] | str = state.example or [{"role": "user", "content": "Your question."}]
    if isinstance(example, str):
        text = _shortened(example)
        code = f'text = {_literal(text)}\nprompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")'
    else:
        messages = [{**message, "content": _shortened(message.get("content"))} for message in example]
        template_arguments = {**data.get("chat_template_kwargs", {}), "add_generation_prompt": True}
        code = (
            f"messages = {_literal(messages)}\narguments = {_literal(template_arguments)}\n"
            'prompt = tokenizer.apply_chat_template(messages, **arguments, return_tensors="pt", return_dict=True)'
        )
    served = "vllm serve FOLDER"
    with_transformers = "With transformers:"
    if is_adapter:
        rank = LoraConfig(rank=from_environment(state.config["model"]["lora"]["rank"])).slot_rank
        served = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules adapter=FOLDER"
        with_transformers = "This is an adapter: transformers loads it onto its base where `peft` is installed."
    notes = ["FOLDER is the folder of this file."]
    if data["template"] not in ("model", None):
        notes.append(f"Prompts were written with `data.template: {data['template']}`, not with the chat template.")
    if arguments := data.get("chat_template_kwargs"):
        notes.append(f"The chat template was given {json.dumps(arguments)}: pass them as `chat_template_kwargs`.")
    if stop := rollout.get("stop"):
        notes.append(f"Responses ended at the stop strings {json.dumps(list(stop))}: pass them as `stop`.")
    return f"""An OpenAI endpoint:

```
{served}
```

{with_transformers}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
{code}
response = model.generate(**prompt, do_sample=True, **{json.dumps(sampling)})
print(tokenizer.decode(response[0][prompt["input_ids"].shape[1]:], skip_special_tokens=True))
```

{" ".join(notes)}"""


def _shortened(text: Any) -> Any:
    """A text without secrets, and without its middle part if it is long; other values are unchanged."""
    shown = hide(text) if isinstance(text, str) else text
    if not isinstance(shown, str) or len(shown) <= LONGEST:
        return shown
    return f"{shown[: LONGEST // 2]} [...] {shown[-LONGEST // 2 :]}"


def _literal(value: Any) -> str:
    """A value as Python source that cannot end a code block in Markdown."""
    return repr(value).replace("```", "\\x60\\x60\\x60")


def _evaluation(state: RunState) -> str:
    """A table of the evaluations, and the name of their metric; empty if there was no evaluation."""
    table = _table("step", {str(step): values for step, values in state.evaluations.items()})
    config = config_of_any_program(state.config)
    title = "" if config is None else metric_title(config.metrics, state.evaluations.values())
    return f"avg@k is {title}.\n\n{table}" if title and table else table


def _table(corner: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of {row name: {column name: value}}; empty if there are no columns."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    if not columns:
        return ""
    lines = [[corner, *columns], ["---"] * (1 + len(columns))]
    for name, row in rows.items():
        cells = [row.get(column, "") for column in columns]
        lines.append([name, *(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
