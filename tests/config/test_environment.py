"""The sections `environment` and `tools`: their spellings, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.environment import EnvironmentConfig, EnvironmentPart
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config, resolved_yaml

BASE = (
    "run.dir=run", "run.steps=1", "model.path=model", "rollout.prompts_per_step=1", "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=8",
)  # fmt: skip
DATA = "data.train=a.jsonl"


def load(*overrides: str) -> GRPOConfig:
    return load_config(GRPOConfig, [], [*BASE, *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError, match=r".") as refused:
        load(*overrides)
    return str(refused.value)


def test_without_either_key_nothing_acts() -> None:
    config = load(DATA)
    assert not config.uses_environment_or_tools
    assert config.environment.parts == {}


@pytest.mark.parametrize("value", ["my.module:Game", "{name: my.module:Game}", "{name: my.module:Game, options: {}}"])
def test_an_environment_has_three_spellings(value: str) -> None:
    config = load(DATA, f"environment={value}")
    assert config.environment.parts == {"": EnvironmentPart(name="my.module:Game")}
    assert config.uses_environment_or_tools


def test_several_environments_are_chosen_by_the_row() -> None:
    config = load(DATA, "environment={by_name: {a: my.module:A, b: {name: b.py:B, options: {level: 3}}}}")
    assert {name: part.name for name, part in config.environment.parts.items()} == {"a": "my.module:A", "b": "b.py:B"}
    assert config.environment.parts["b"].options == {"level": 3}


def test_an_environment_of_a_package_is_one_line_and_brings_prompts_and_reward() -> None:
    config = load("environment={name: reasoning_gym, dataset: leg_counting, args: {size: 20}}")
    assert [source.is_environment for source in config.data.train] == [True]
    assert config.reward.parts == ()
    assert not config.environment.uses_endpoint
    (part,) = config.environment.parts.values()
    assert part.code == "rlhf.environments.adapters.reasoning_gym:ReasoningGym"
    assert part.arguments == {"dataset": "leg_counting", "args": {"size": 20}}
    (part,) = load("environment={name: openenv, url: 'http://localhost/maze'}").environment.parts.values()
    assert (part.arguments, part.reached_port) == (
        {"url": "http://localhost/maze", "app": None, "args": {}}, 80,
    )  # fmt: skip
    with_eval = load("environment={name: reasoning_gym, dataset: ab}", "data.eval=environment")
    assert with_eval.metrics == {"environment": "environment"}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["environment=reasoning_gym"], ["dataset is missing", "{name: reasoning_gym, dataset: leg_counting}"]),
        (
            ["environment={name: openenv, url: 'https://maze.example.com'}"],
            ["environment.url=https://maze.example.com", "environment.network=true", "IPv4 address"],
        ),
        (["environment={name: openenv, url: 'http://a:b@127.0.0.1'}"], ["environment.url", "no password"]),
        (["environment={name: openenv, url: 'http://localhost', app: 'a.b:app'}"], ["url with environment.app"]),
        (["environment={name: openenv, app: a.b}"], ["environment.app=a.b", "package.module:name"]),
        (["environment={name: openenv}"], ["url or app is missing", 'url: "http://127.0.0.1:8000"']),
        (["environment={name: my.module:Game, dataset: ab}"], ["dataset=ab", "environment.name=reasoning_gym"]),
        (["environment={name: reasoning_gym, dataset: ab, options: {size: 3}}"], ["options", "Put them into args"]),
        (["environment={by_name: {a: {name: reasoning_gym, dataset: ab}}}", DATA], ["by_name.a", "environment.name"]),
        (
            ["environment={name: reasoning_gym, dataset: ab}", "data.system_prompt=Be brief."],
            ["data.system_prompt=Be brief.", "environment.args", "Remove the key"],
        ),
        (["environment={name: reasoning_gym, dataset: ab}", "tools=[calculator]"], ["tools", "brings its own tools"]),
        (
            ["environment={name: reasoning_gym, dataset: ab}", DATA],
            ["data.train=a.jsonl", "environment.name=reasoning_gym", "{path: environment, rows: N}"],
        ),
    ],
)  # fmt: skip
def test_an_environment_of_a_package_that_cannot_be_is_refused(overrides: list[str], parts: list[str]) -> None:
    message = refusal(*overrides)
    assert all(part in message for part in parts), message


def test_tools_are_a_list_of_names_and_nothing_else_is_needed() -> None:
    config = load(DATA, "tools=[my.module:add, calculator]")
    assert config.tools == ("my.module:add", "calculator")
    assert config.uses_environment_or_tools


def test_without_data_the_environment_makes_the_prompts_and_the_resolved_config_says_so(tmp_path: Path) -> None:
    config = load("environment=my.module:Game", "reward=[]")
    assert [source.is_environment for source in config.data.train] == [True]
    written = tmp_path / "config.yaml"
    written.write_text(resolved_yaml(config))
    assert load_config(GRPOConfig, [str(written)]) == config
    held_out = load("environment=my.module:Game", "reward=[]", "data.eval={path: environment, rows: 7}")
    assert held_out.evaluations.keys() == {"environment"}
    assert "data.train: required and not set" in refusal("tools=[calculator]")


def test_the_reward_of_the_environment_may_be_the_only_one() -> None:
    assert load(DATA, "environment=my.module:Game", "reward=[]").reward.parts == ()
    assert "nothing would grade" in refusal(DATA, "tools=[calculator]", "reward=[]")
    part = ("rollout.dynamic_sampling=true", "rollout.dynamic_sampling_part=environment")
    assert load(DATA, "environment=my.module:Game", *part)
    assert "not in all of reward.parts" in refusal(DATA, *part)


def test_a_reward_that_compares_with_an_answer_cannot_judge_prompts_that_the_environment_makes() -> None:
    assert "reward name='math'" in refusal("environment=my.module:Game")
    assert "data.curriculum with prompts that the" in refusal("environment=my.module:Game", "data.curriculum={}")
    assert load("environment=my.module:Game", "reward=[my.module:score, format]")


def test_several_environments_need_rows_that_choose() -> None:
    by_name = "environment={by_name: {a: my.module:A}}"
    assert "in data.train: no row chooses an environment" in refusal(by_name)
    assert "in data.eval: no row chooses an environment" in refusal(DATA, by_name, "data.eval=environment")


def test_trained_sequences_are_all_or_some_and_the_resolved_config_says_which(tmp_path: Path) -> None:
    assert load(DATA, "environment={name: a:b}") == load(DATA, "environment={name: a:b, trained_sequences: all}")
    config = load(DATA, "environment={name: a:b, trained_sequences: [first, rewritten]}")
    assert config.environment.trained_sequences == ("first", "rewritten")
    (written := tmp_path / "config.yaml").write_text(resolved_yaml(config))
    assert load_config(GRPOConfig, [str(written)]) == config


def test_an_evaluation_needs_no_data_to_train_on() -> None:
    from rlhf.evaluate import complete

    how: dict[str, Any] = {"complete": complete, "contradictions": GRPOConfig.sampling_contradictions}
    overrides = ["model.path=model", "evaluation.max_response_tokens=8"]
    by_name = ["data.eval=a.jsonl", "environment={by_name: {a: my.module:A}}"]
    assert load_config(GRPOConfig, [], [*overrides, *by_name], **how).uses_environment_or_tools
    of_package = ["data.eval=environment", "environment={name: reasoning_gym, dataset: ab}"]
    assert load_config(GRPOConfig, [], [*overrides, *of_package], **how).metrics == {"environment": "environment"}
    with pytest.raises(ValueError, match=r"data\.eval=a\.jsonl: the prompts come from"):
        load_config(GRPOConfig, [], [*overrides, "data.eval=a.jsonl", of_package[1]], **how)


def test_one_of_several_environments_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"by_name\.chess\.name"):
        EnvironmentConfig.model_validate({"by_name": {"chess": {"options": {"level": 1}}}})


def test_a_key_at_the_wrong_level_is_named_with_the_level_where_it_is_read() -> None:
    entry = refusal(DATA, "environment={by_name: {a: {name: my.module:A, timeout_s: 9}}}")
    assert entry.startswith("environment.by_name.a.timeout_s=9.0: ")
    assert " environment.by_name.a.name=program or service." in entry
    of_all = refusal(DATA, "environment={by_name: {a: my.module:A}, gives_answer: true}")
    assert of_all.startswith(
        "environment.gives_answer=true with environment.by_name: this key has no effect here. Set it at"
    )


@pytest.mark.parametrize("key", ["max_rollout_tokens", "max_turns", "max_rollout_s"])
def test_a_limit_of_several_turns_is_refused_where_a_response_is_one_turn(key: str) -> None:
    assert f"rollout.{key}=9" in refusal(DATA, f"rollout.{key}=9")
    load(DATA, "tools=[calculator]", f"rollout.{key}=9")
