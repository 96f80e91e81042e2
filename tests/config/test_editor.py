"""What an editor marks in a config file is what the programs refuse, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlhf import command
from rlhf.config.cli import PROGRAMS
from rlhf.config.editor import editor_schema
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
Marks = Callable[[str], list[str]]

SMALL = "{run: {dir: r, steps: 9}, model: {path: m}, data: {train: a.jsonl}, rollout: {prompts_per_step: 8, "
SMALL += "samples_per_prompt: 4, max_response_tokens: 64}}"


@pytest.fixture
def marks() -> Marks:
    validator = jsonschema.Draft7Validator(editor_schema(GRPOConfig))
    return lambda text: [error.json_path for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the command has written them."""
    folder = tmp_path_factory.mktemp("schemas")
    command.main(["configs", "schema", str(folder)])
    return folder


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_no_key_of_a_config_of_the_repository_is_marked_by_the_schema_that_it_names(file: Path, schemas: Path) -> None:
    (named,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", file.read_text(), re.MULTILINE)
    schema = json.loads((schemas / named).read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    assert not list(jsonschema.Draft7Validator(schema).iter_errors(yaml.safe_load(file.read_text())))


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("data: {train: [a.jsonl, {path: b.jsonl}], eval: {path: c.jsonl}}", "data.eval=[]"),
        ("data: {eval: null}", ""),
        ("reward: [math, {name: length, max_tokens: 9}, 'mine.py:grade']", ""),
        ("reward: {parts: [f1], by_source: {a: [exact]}}", "data.train={path: a.jsonl}"),
        ("reward: [{name: math, tolerance: {relative: 0.001}}]", ""),
        ("reward: [{name: length, max_tokens: '${rollout.max_response_tokens}'}]", ""),
        ("algo: {policy_loss: 'mine.py:loss', advantage: 'mine:advantage'}", ""),
        ("tools: calculator", "rollout.max_rollout_tokens=128"),
        ("environment: 'mine.py:Game'", "tools=[]"),
        ("run: {seed: '${oc.env:A_SEED}'}", "run.seed=1"),
        ("model: {lora: {rank: 8, targets: [q_proj]}}", "cluster.tensor_parallel=1"),
        ("checkpoint: {every: auto}\nrollout: {engine: {block_size: 32}}", ""),
    ],
)
def test_a_valid_config_is_not_marked(
    text: str, override: str, tmp_path: Path, marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SEED", "1")
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "more.yaml").write_text(text)
    files = [str(tmp_path / name) for name in ("small.yaml", "more.yaml")]
    load_config(GRPOConfig, files, [override] if override else [], contradictions=lambda config: ())
    assert marks(text) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("run: {step: 3}", "$.run"),
        ("learner: {optimizer: {lr: fast}}", "$.learner.optimizer.lr"),
        ("learner: {optimizer: {variant: adam}}", "$.learner.optimizer.variant"),
        ("rollout: {samples_per_prompt: -1}", "$.rollout.samples_per_prompt"),
        ("data: {train: 3}", "$.data.train"),
        ("algo: {kl_estimator: k5}", "$.algo.kl_estimator"),
        ("algo: {policy_loss: pppo}", "$.algo.policy_loss"),
    ],
)
def test_a_mistake_is_marked_where_it_is(text: str, place: str, marks: Marks) -> None:
    assert marks(text) == [place]


def test_every_key_has_its_description() -> None:
    """An editor shows it where the cursor is; so does --help."""
    for program in PROGRAMS.values():
        if program.config is not None:
            schema: Any = editor_schema(program.config)
            for name, section in {**schema["$defs"], "": schema}.items():
                whole = section.get("anyOf", [section])[0]  # the short forms follow
                for key, field in whole["properties"].items():
                    assert "description" in field or "$ref" in field, f"{name}.{key}"
