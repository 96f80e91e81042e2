"""The README of an exported model, from the state of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds import make_config

from rlhf.run.model_card import model_card
from rlhf.run.state import RunState


def test_the_license_is_that_which_the_folder_of_the_base_model_states(tmp_path: Path) -> None:
    base = tmp_path / "model"
    base.mkdir()
    state = RunState(step=2, program="grpo", config=make_config(base).model_dump(mode="json"))
    assert f"`{base}`: its folder does not name it." in model_card(state)
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: qwen\ntags: [a]\n---\n# Base\n---\n")
    card = model_card(state)
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["license"], head["license_name"]) == ("other", "qwen")
    assert f"That of the base model, `{base}`: qwen." in card
    (base / "README.md").write_text("---\n{ no yaml\n---\n")
    assert "license" not in model_card(state).split("---\n")[1]


def test_a_card_can_be_written_whatever_the_names_of_its_sources_hold(tmp_path: Path) -> None:
    sources = {"half \ud83d": {"rows": 2, "fingerprint": "0"}}
    state = RunState(step=2, program="grpo", config=make_config(tmp_path).model_dump(mode="json"))
    state.stream = {"sources": sources}
    assert "half \\ud83d" in model_card(state).encode().decode()


def test_the_card_says_what_the_evaluated_metric_is(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        data={"eval": "test.jsonl"},
        reward={"parts": ["format", "own.py:f"]},
        evaluation={"metric": "own.py:f"},
    )
    state = RunState(step=2, program="grpo", config=config.model_dump(mode="json"))
    assert "## Evaluation" not in model_card(state)
    state.evaluations = {0: {"eval/test/avg@1": 0.5}}
    assert "## Evaluation\n\navg@k is accuracy (own.py:f).\n\n| step | eval/test/avg@1 |" in model_card(state)
    state.evaluations[2] = {"eval/test/avg@1": 1.1, "eval/test/outside_fraction": 0.5}
    assert "avg@k is own.py:f." in model_card(state)
    state.config["reward"] = {"of": "another version"}
    assert "## Evaluation\n\n| step" in model_card(state)


@pytest.mark.slow
def test_the_code_of_the_card_loads_the_model_and_asks_it_as_it_was_trained(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model_dir / "model"
    config = make_config(folder, rollout={"max_response_tokens": 8, "stop": ["#"]})
    values = config.model_dump(mode="json")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "```\n2 + 3\n```" + "x" * 3000}]
    card = model_card(RunState(step=2, program="grpo", config=values, example=asked))
    assert "\nvllm serve FOLDER\n" in card
    assert 'the stop strings ["#"]' in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("FOLDER", str(folder)), names)
    system, user = (message["content"] for message in names["messages"])
    assert (system, user[:15], len(user) < 2100) == ("Be brief.", "```\n2 + 3\n```xx", True)
    assert 0 < names["response"].shape[1] - names["prompt"]["input_ids"].shape[1] <= 8
    assert capsys.readouterr().out.endswith("\n")
    text = model_card(RunState(step=2, program="grpo", config=values, example="Q: 2 + 3\nA:"))
    exec(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0].replace("FOLDER", str(folder)), names)
    assert names["text"] == "Q: 2 + 3\nA:"
