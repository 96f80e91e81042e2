"""Secrets: what counts as one, and that no file, message or other output of a program has one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhf.config.cli import PROGRAMS, run_program
from rlhf.config.describe import describe_keys
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config, resolved_yaml, stored_values
from rlhf.config.reward import OPTIONS_OF_REWARD
from rlhf.config.secrets import HIDDEN, hidden, hide, hide_in_output, is_secret_name, remember
from rlhf.run.resume import changed_keys

JUDGE, PASSWORD, IN_ARGUMENT = "fake-judge-key-31", "fake-password-41", "fake-argument-59"
REWARD = f"reward=[{{name: 'a.b:c', api_key: {IN_ARGUMENT}, threshold: 3}}, {{name: math}}]"
ENDPOINT = f"reward_model.endpoint=http://me:{PASSWORD}@127.0.0.1:1/score"
BASE = str(Path(__file__).parents[2] / "configs/quickstart.yaml")


@pytest.mark.parametrize(
    "name",
    ["OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "PGPASSWORD", "api_key", "DB_PASS", "AWS_SECRET_ACCESS_KEY",
     "AWS_ACCESS_KEY_ID", "Authorization", "TOKEN_2", "credentials", "client_secret", "apikey", "accessKey", "token",
     "key", "access_tokens", "TOKENS", "EOS_TOKEN", "DB_PASS_2"],
)  # fmt: skip
def test_a_name_with_such_a_word_is_that_of_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "RAY_AUTH_TOKEN_PATH", "keyboard", "answer_key", "truncate_token", "passes",
     "stop_tokens", "end_token", "eos_token", "pad_token_id", "think_token", "special_tokens", "tokens", "label_key",
     "id_key", "by_key", "pass_threshold", "monkey", "hockey"],
)  # fmt: skip
def test_other_names_are_not_those_of_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_no_key_of_a_config_is_taken_for_a_secret() -> None:
    config = load_config(GRPOConfig, [BASE], ["rollout.truncate_token=</answer>"])
    assert hidden(config.model_dump(mode="json")) == config.model_dump(mode="json")
    schemas = (*(program.config for program in PROGRAMS.values() if program.config), *OPTIONS_OF_REWARD.values())
    names = {name for schema in schemas for key in describe_keys(schema) for name in key.name.split(".")}
    assert [name for name in names if is_secret_name(name)] == []


def test_a_password_of_digits_is_hidden_and_an_empty_one_and_another_number_are_not() -> None:
    values = {"db_password": 12345678, "secret": True, "api_key": "", "key": 7, "top": {"passphrase": [1]}}
    assert hidden(values) == {**values, "db_password": HIDDEN}
    remember({"db_password": 87654321})
    assert hide("refused 87654321") == f"refused {HIDDEN}"


def test_a_secret_of_the_environment_is_stored_as_a_reference_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_JUDGE_KEY", JUDGE)
    monkeypatch.setenv("FAKE_PASSWORD", PASSWORD)
    monkeypatch.setenv("PLAIN", IN_ARGUMENT)  # no secret by its own name, but by that of the config key
    overrides = [
        "evaluation.metric=a.b:c",
        "reward=[{name: 'a.b:c', headers: {Authorization: 'Bearer ${oc.env:FAKE_JUDGE_KEY}'}, "
        "api_key: '${oc.env:PLAIN}'}]",
        ENDPOINT,
        "data.prompt_suffix=\\${not a reference}",
    ]
    config = load_config(GRPOConfig, [BASE], overrides)
    assert config.reward.parts[0].options["headers"]["Authorization"] == f"Bearer {JUDGE}"
    text = resolved_yaml(config)
    assert not any(secret in text for secret in (JUDGE, PASSWORD, IN_ARGUMENT))
    assert "api_key: ${oc.env:PLAIN}" in text
    assert "http://me:${oc.env:FAKE_PASSWORD}@127.0.0.1:1/score" in text
    saved = tmp_path / "config.yaml"
    saved.write_text(text)
    again = load_config(GRPOConfig, [str(saved)])
    assert (again.reward_model, again.data) == (config.reward_model, config.data)
    assert again.reward.parts[0].options["api_key"] == IN_ARGUMENT


def test_a_secret_written_out_in_the_config_is_stored_nowhere_and_asked_for_by_name(tmp_path: Path) -> None:
    config = load_config(GRPOConfig, [BASE], [REWARD, ENDPOINT])
    assert config.reward.parts[0].options["api_key"] == IN_ARGUMENT  # the reward itself gets it
    text = resolved_yaml(config) + json.dumps(hidden(config.model_dump(mode="json")))
    assert IN_ARGUMENT not in text
    assert PASSWORD not in text
    saved = tmp_path / "config.yaml"
    saved.write_text(resolved_yaml(config))
    with pytest.raises(ValueError, match=r"reward\.parts\.0\.options\.api_key=<secret>: .*\$\{oc.env:VARIABLE\}"):
        load_config(GRPOConfig, [str(saved)])
    assert stored_values(saved)["reward_model"]["endpoint"] == f"http://me:{HIDDEN}@127.0.0.1:1/score"


def test_a_stored_config_can_be_read_when_its_variable_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_JUDGE_KEY", JUDGE)
    config = load_config(GRPOConfig, [BASE], ["reward=[{name: 'a.b:c', key: '${oc.env:FAKE_JUDGE_KEY}'}]"])
    saved = tmp_path / "config.yaml"
    saved.write_text(resolved_yaml(config))
    monkeypatch.delenv("FAKE_JUDGE_KEY")
    assert stored_values(saved)["reward"]["parts"][0]["options"] == {"key": "${oc.env:FAKE_JUDGE_KEY}"}


def test_a_run_may_go_on_with_another_key() -> None:
    first, second = (
        load_config(GRPOConfig, [BASE], [f"reward=[{{name: 'a.b:c', api_key: {key}, threshold: {bound}}}]"])
        for key, bound in (("fake-key-number-1", 3), ("fake-key-number-2", 4))
    )
    before, now = (hidden(config.model_dump(mode="json")) for config in (first, second))
    hidden_key = {"api_key": "<secret>"}
    changes = [change[:3] for change in changed_keys(GRPOConfig, before, now)]
    assert changes == [("reward.parts.0.options", hidden_key | {"threshold": 3}, hidden_key | {"threshold": 4})]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:pw@bucket/run", "s3://me:<secret>@bucket/run"),
        ("https://ghp_0123456789abcdefghij@github.com/a/b", "https://<secret>@github.com/a/b"),
        ("http://host/score?model=a&api_key=1234", "http://host/score?model=a&api_key=<secret>"),
        ("git+https://ghp_0123456789abcdefghij@github.com/a", "git+https://<secret>@github.com/a"),
        ("abfss://my-training-container-01@a.net/run", "abfss://my-training-container-01@a.net/run"),
        ("ssh://git@host/a http://127.0.0.1:80/x@y", "ssh://git@host/a http://127.0.0.1:80/x@y"),
    ],
)
def test_an_address_keeps_all_but_its_secret(text: str, shown: str) -> None:
    assert hide(text) == shown


def test_errors_and_tracebacks_show_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_JUDGE_KEY", JUDGE)
    remember({"password": PASSWORD})

    def refuses() -> None:
        raise ValueError(f"the judge refused {JUDGE} and {PASSWORD}")

    def fails() -> None:
        print("printed", PASSWORD)
        raise KeyError(JUDGE)

    assert (run_program(refuses), run_program(fails)) == (2, 1)
    out, err = capsys.readouterr()
    assert f"error: the judge refused {HIDDEN} and {HIDDEN}" in err
    assert f"KeyError: '{HIDDEN}'" in err
    assert out == f"printed {HIDDEN}\n"
    with hide_in_output():
        assert sys.stdout.isatty() is False
    assert not hasattr(sys.stdout, "_stream")
