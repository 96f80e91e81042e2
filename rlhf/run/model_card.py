"""README.md of an exported model: base model, evaluation, data, code and config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.config.model_folder import looks_local
from rlhf.config.secrets import with_references
from rlhf.log.sinks import read_rows
from rlhf.run.state import RunState

SHOWN = ("reward/mean", "policy/kl_k3", "policy/entropy", "rollout/response_length/mean", "learner/lr")


def model_card(state: RunState, metrics: Path) -> str:
    """Markdown with the hub's front matter.

    Args:
        metrics: metrics.jsonl of the run; without it the numbers of the last step are left out.
    """
    config = state.config
    base, program = config["model"]["path"], "ppo" if "critic" in config else "grpo"
    head = ["library_name: transformers", "pipeline_tag: text-generation", f"tags: [rlhf, {program}]"]
    if not looks_local(base):
        head.append(f"base_model: {base}")
    sources = state.stream.get("sources", {})
    sections = [
        "\n".join(["---", *head, "---"]),
        f"# {Path(config['run']['dir']).name}, step {state.step}",
        f"`{base}` after {state.step} of {config['run']['steps']} steps of {program.upper()} with rlhf: "
        f"{state.updates_taken} optimizer steps on {state.account.trained:,} responses.",
        "## Evaluation\n\n" + _table("step", {str(step): values for step, values in state.evaluations.items()}),
        "## Training\n\n" + _table("step", _row_of(metrics, state.step)),
        "## Data\n\n" + _table("source", {name: {"prompts": of["rows"], "fingerprint": of["fingerprint"]}
                                          for name, of in sources.items()}),
        "## Code\n\n" + _table("", {"value": state.code}),
        "## Config\n\n```yaml\n" + _yaml(config) + "```",
    ]  # fmt: skip
    return "\n\n".join(section for section in sections if not section.endswith("\n\n")) + "\n"


def _table(corner: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of {row name: {column name: value}}; "" without columns."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    if not columns:
        return ""
    lines = [[corner, *columns], ["---"] * (1 + len(columns))]
    lines += [[name, *(_shown(row.get(column, "")) for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row_of(metrics: Path, step: int) -> dict[str, dict[str, Any]]:
    """The main metrics of a training step, if the file has them."""
    rows = read_rows(metrics) if metrics.is_file() else ()
    row = next((row for row in rows if row["step"] == step and "time/step" in row), {})
    return {str(step): {name: row[name] for name in SHOWN if name in row}}


def _yaml(config: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(with_references(config)))
