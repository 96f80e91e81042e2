"""What comes from `${oc.env:...}` is written as a reference in every file, by its key and whatever its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import flat_keys, load_config, resolved_yaml, stored_values
from rlhf.config.non_defaults import config_of_any_program, non_default_values
from rlhf.config.references import from_environment
from rlhf.config.secrets import hidden, hide
from rlhf.run.model_card import model_card
from rlhf.run.resume import changed_keys
from rlhf.run.state import RunState

BASE = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
VARIABLES = {
    "DATA": "/srv/private/rows.jsonl", "JUDGE_HOST": "judge.private.example", "PIN": "4711", "MODEL": "/srv/private/m",
    "RATE": "3.25e-4", "STOPS": '["</private>", "b"]', "STOP": "</halt>", "GPU": "NVIDIA H100 80GB HBM3",
    "HOMELY": "~/x", "REWARD": "private.module:grade", "NAME": "project-x",
}  # fmt: skip
PART = "reward=[{{name: '${{oc.env:REWARD}}', {}}}, math]"
WRITTEN: dict[str, tuple[str, str, str]] = {  # what is given; the key that has it; how it is stored
    "a path in its short form": ("data.train=${oc.env:DATA}", "data.train.0.path", "${oc.env:DATA}"),
    "one of a list": ("data.eval=[{path: '${oc.env:DATA}', rows: 3}]", "data.eval.0.path", "${oc.env:DATA}"),
    "a function": (PART.format("a: 1"), "reward.parts.0.name", "${oc.env:REWARD}"),
    "part of a text": (PART.format("url: 'http://${oc.env:JUDGE_HOST}/v1'"), "reward.parts.0.options.url",
                       "http://${oc.env:JUDGE_HOST}/v1"),
    "deep in options": (PART.format("deep: {a: ['${oc.env:PIN}', b]}"), "reward.parts.0.options.deep.a",
                        ["${oc.env:PIN}", "b"]),
    "another key": (PART.format("pin: '${oc.env:PIN}', same: 'x${.pin}'"), "reward.parts.0.options.same",
                    "x${oc.env:PIN}"),
    "a key of another section": ("logging.wandb.name=${model.path}-${oc.env:NAME}", "logging.wandb.name",
                                 "${oc.env:MODEL}-${oc.env:NAME}"),
    "a default": (PART.format("d: '${oc.env:UNSET,a default}'"), "reward.parts.0.options.d",
                  "${oc.env:UNSET,'a default'}"),
    "a default that is a number": (PART.format("d: '${oc.env:UNSET,1}'"), "reward.parts.0.options.d",
                                   "${oc.env:UNSET,1}"),
    "a default from a variable": (PART.format("d: '${oc.env:UNSET,${oc.env:PIN}}'"), "reward.parts.0.options.d",
                                  "${oc.env:UNSET,${oc.env:PIN}}"),
    "a mapping": (PART.format("d: '${oc.create:{a: [${oc.env:PIN}, 1]}}'"), "reward.parts.0.options.d",
                  "${oc.create:{a:[${oc.env:PIN},1]}}"),
    "a number": ("learner.optimizer.lr=${oc.decode:${oc.env:RATE}}", "learner.optimizer.lr",
                 "${oc.decode:${oc.env:RATE}}"),
    "a whole list": ("rollout.stop=${oc.decode:${oc.env:STOPS}}", "rollout.stop", "${oc.decode:${oc.env:STOPS}}"),
    "one text of a list": ("rollout.stop=['${oc.env:STOP}']", "rollout.stop", ["${oc.env:STOP}"]),
    "a value that is changed": ("cluster.gpu=${oc.env:GPU}", "cluster.gpu", "${oc.env:GPU}"),
    "a home folder": ("run.dir=${oc.env:HOMELY}", "run.dir", "${oc.env:HOMELY}"),
    "next to what is text": ("data.prompt_suffix=\\${x} ${oc.env:PIN}", "data.prompt_suffix", "\\${x} ${oc.env:PIN}"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def _load(*given: str) -> GRPOConfig:
    return load_config(GRPOConfig, [BASE], ["model.path=${oc.env:MODEL}", "evaluation.metric=math", *given])


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_a_value_of_the_environment_is_stored_as_its_reference_and_read_again(name: str, tmp_path: Path) -> None:
    given, key, stored = WRITTEN[name]
    config = _load(given)
    everywhere = [resolved_yaml(config), json.dumps(config.stored()), json.dumps(non_default_values(config.stored()))]
    assert flat_keys(config.stored())[key] == stored
    secret = [value for value in VARIABLES.values() if value != VARIABLES["STOP"]] + ["0.000325", "'H100'"]
    assert [(value, text) for value in secret for text in everywhere if value in text] == []
    (saved := tmp_path / "config.yaml").write_text(everywhere[0])
    assert stored_values(saved) == config.stored()
    assert load_config(GRPOConfig, [str(saved)]) == config == config_of_any_program(config.stored())
    assert resolved_yaml(load_config(GRPOConfig, [str(saved)])) == everywhere[0]


def test_a_stored_config_may_have_the_keys_of_version_0_1_0() -> None:
    config = _load()
    old: dict[str, Any] = config.stored()
    old["environment"] = {**(old["environment"] or {}), "accept_changed_code": False, "try_tools": True}
    old["logging"] |= {"mlflow": None}
    old["reward"] |= {"accept_changed_code": False}
    assert config_of_any_program(old) == config


def test_a_plain_value_is_not_stored_as_the_reference_of_an_earlier_config() -> None:
    _load("data.train=${oc.env:DATA}")
    assert _load(f"data.train={VARIABLES['DATA']}").stored()["data"]["train"][0]["path"] == VARIABLES["DATA"]


def test_a_resumed_run_compares_what_references_stand_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes(before: dict[str, Any], now: GRPOConfig) -> list[str]:
        return [key for key, *_ in changed_keys(GRPOConfig, hidden(from_environment(before)), now.shown())]

    began = _load("data.train=${oc.env:DATA}").stored()
    assert changes(began, _load("data.train=${oc.env:DATA}")) == []
    assert changes(began, _load(f"data.train={VARIABLES['DATA']}")) == []
    assert changes(began, _load("data.train=other.jsonl")) == ["data.train.0.path"]
    monkeypatch.delenv("DATA")
    assert changes(began, _load(f"data.train={VARIABLES['DATA']}")) == ["data.train.0.path"]


def test_a_model_card_shows_references(tmp_path: Path) -> None:
    config = _load(WRITTEN["part of a text"][0], "data.train=${oc.env:DATA}")
    card = model_card(RunState(step=1, program="grpo", config=config.stored()))
    assert [value for value in VARIABLES.values() if value in card] == []
    for stored in ("`${oc.env:MODEL}` after 1 of", "http://${oc.env:JUDGE_HOST}/v1", "path: ${oc.env:DATA}"):
        assert stored in card


def test_a_default_of_a_secret_is_not_stored() -> None:
    given = "{api_key: '${oc.env:UNSET,sk-default-1}', url: 'http://me:${oc.env:UNSET,sk-default-2}@h'}"
    options = _load(PART.format(f"nested: {given}")).stored()["reward"]["parts"][0]["options"]["nested"]
    assert options == {"api_key": "${oc.env:UNSET}", "url": "http://me:${oc.env:UNSET}@h"}


def test_output_names_the_variable_in_place_of_its_value_unless_that_is_short_or_a_path() -> None:
    _load(PART.format("a: '${oc.env:JUDGE_HOST}', pin: '${oc.env:PIN}'"))
    said = f"{VARIABLES['JUDGE_HOST']} refused 4711 of {VARIABLES['MODEL']}"
    assert hide(said) == f"${{oc.env:JUDGE_HOST}} refused 4711 of {VARIABLES['MODEL']}"
