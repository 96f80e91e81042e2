"""README.md of an exported model: base model, what was changed, use, license, evaluation, data, code and config."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.changed import changed_values
from rlhf.config.cli import PROGRAMS
from rlhf.config.load import as_yaml, validated
from rlhf.config.model_folder import local_model_folder, looks_local
from rlhf.config.printing import as_utf8
from rlhf.config.sections import UNRESTRICTED, LoraConfig
from rlhf.log.panels import metric_title
from rlhf.log.sinks import on_training_data
from rlhf.run.state import RunState

NEW_TOKENS = 512  # in the example, where the config says none
LICENSE_KEYS = ("license", "license_name", "license_link")  # of the hub's front matter
METHODS = {"grpo": "GRPO", "ppo": "PPO", "sft": "supervised fine-tuning", "reward_model": "training on preferences"}
SCORES = (
    "A reward model (one label): `reward_model: {path: FOLDER}` in the config of a run adds its score to the reward."
)


def model_card(state: RunState, *, merged: bool = False) -> str:
    """Markdown with the hub's front matter; `merged`: an adapter was added to the weights of its base."""
    config = state.config
    is_adapter = bool(config["model"].get("lora")) and not merged
    base, program = config["model"]["path"], state.program
    task = "text-classification" if program == "reward_model" else "text-generation"
    head = [
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        f"pipeline_tag: {task}",
        f"tags: [rlhf, {program}]",
    ]
    if not looks_local(base):
        head.append(f"base_model: {base}")
    stated = _license(base)
    head += [f"{key}: {value}" for key, value in stated.items()]
    named = stated.get("license_name") or stated.get("license") or "its folder does not name it"
    sources = state.stream.get("sources", {})
    rows = sum(source["rows"] for source in sources.values())
    trained = f"{state.account.trained:,} responses" if "rollout" in config else f"{rows:,} rows"
    sections = [
        "\n".join(["---", *head, "---"]),
        f"# {Path(config['run']['dir']).name}, step {state.step}{on_training_data(state.evaluations.values())}",
        f"`{base}` after {state.step} of {config['run']['steps']} steps of {METHODS.get(program, program)} with rlhf: "
        f"{state.updates_taken} optimizer steps on {trained}.",
        "## What was changed\n\nThe keys of the config that differ from the defaults.\n\n"
        f"```yaml\n{as_yaml(changed_values(config))}```",
        "## Use\n\n" + (SCORES if program == "reward_model" else _usage(config, is_adapter=is_adapter)),
        f"## License\n\nThat of the base model, `{base}`: {named}.",
        "## Evaluation\n\n" + _evaluation(state),
        "## Data\n\n" + _table("source", {name: {"rows": of["rows"], "fingerprint": of["fingerprint"]}
                                          for name, of in sources.items()}),
        "## Code\n\n" + _table("", {"value": state.code}),
        f"## Config\n\n<details><summary>Every key</summary>\n\n```yaml\n{as_yaml(config)}```\n\n</details>",
    ]  # fmt: skip
    return as_utf8("\n\n".join(section for section in sections if not section.endswith("\n\n")) + "\n")


def _license(base: str) -> dict[str, str]:
    """What the front matter of the base model's README says of its license; empty without one."""
    readme = local_model_folder(base) / "README.md"
    _, *rest = readme.read_text(errors="replace").split("---\n") if readme.is_file() else [""]
    try:
        values = yaml.safe_load(rest[0]) if rest else None
    except yaml.YAMLError:
        values = None
    return {key: str(values[key]) for key in LICENSE_KEYS if key in values} if isinstance(values, dict) else {}


def _usage(config: Mapping[str, Any], *, is_adapter: bool) -> str:
    """How to load and serve the model, with the prompt that it was trained with."""
    data, rollout = config["data"], config.get("rollout", {})
    content = "\n".join(filter(None, ["What is 17 + 25?", data.get("prompt_suffix")]))
    texts = {"system": data.get("system_prompt"), "user": content}
    messages = [{"role": role, "content": text} for role, text in texts.items() if text]
    longest, temperature = rollout.get("max_response_tokens", NEW_TOKENS), rollout.get("temperature", 1.0)
    sampling = {"max_new_tokens": longest, "temperature": temperature}
    sampling |= {name: rollout[name] for name, all_ in UNRESTRICTED.items() if rollout.get(name, all_) != all_}
    notes = "`vllm serve FOLDER` answers at an OpenAI endpoint."
    if is_adapter:
        base, rank = config["model"]["path"], LoraConfig(rank=config["model"]["lora"]["rank"]).slot_rank
        notes = (
            "This is an adapter: transformers loads it onto its base where `peft` is installed. `vllm serve "
            f"{base} --enable-lora --max-lora-rank {rank} --lora-modules adapter=FOLDER` answers at an OpenAI endpoint."
        )
    if data["template"] not in ("model", None):
        notes += f" Prompts were written with `data.template: {data['template']}`, not with the chat template."
    if arguments := data.get("chat_template_kwargs"):
        notes += f" The chat template was given {json.dumps(arguments)}: pass them as `chat_template_kwargs`."
    if stop := rollout.get("stop"):
        notes += f" Responses ended at the stop strings {json.dumps(list(stop))}: pass them as `stop`."
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")  # the folder of this file
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
messages = {json.dumps(messages, ensure_ascii=False)}
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
response = model.generate(**prompt, do_sample=True, **{json.dumps(sampling)})
print(tokenizer.decode(response[0][prompt["input_ids"].shape[1]:], skip_special_tokens=True))
```

{notes}"""


def _evaluation(state: RunState) -> str:
    """The values of each evaluation, and what their metric is called; "" without an evaluation."""
    title, table = "", _table("step", {str(step): values for step, values in state.evaluations.items()})
    schema = PROGRAMS[state.program.replace("_", "-")].config
    with contextlib.suppress(ValueError):  # of another version
        title = metric_title(validated(schema, state.config).metrics, state.evaluations.values()) if schema else ""
    return f"avg@k is {title}.\n\n{table}" if title and table else table


def _table(corner: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of {row name: {column name: value}}; "" without columns."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    if not columns:
        return ""
    lines = [[corner, *columns], ["---"] * (1 + len(columns))]
    for name, row in rows.items():
        cells = [row.get(column, "") for column in columns]
        lines.append([name, *(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
