"""Groups through environments: their prompts, their sessions, what fails, and how they are judged."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from fake_environments import LocalSession, Templates, call, completion, prompt, text
from worlds import make_config

from rlhf.config.grpo import GRPOConfig
from rlhf.config.reward import RewardConfig
from rlhf.environments.rollouts import Environments, FailedEnvironments
from rlhf.environments.start import answer_columns
from rlhf.environments.turns import CallLimitError, FailedError
from rlhf.rewards.model_client import conversation
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.purpose import training_purpose
from rlhf.rollout.worker import RolloutWorker
from rlhf.run.rollout_log import rollout_metrics, rollout_rows
from rlhf.sampling.requests import Completion, Parsing, SamplingSettings
from rlhf.step.batch import make_batch
from rlhf.types import Outcome, Prompt, RolloutGroup, ScoredRollout

SETTINGS = SamplingSettings(1.0, 50)
PARSING = Parsing("hermes")


class Tokenizer:
    all_special_tokens = all_special_ids = ()
    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
    chat_template = None

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return text(np.array(token_ids))

    def __len__(self) -> int:
        return 2**16


class Hosts:
    """Opens these sessions, one after another; an exception in their place is raised."""

    def __init__(self, *sessions: LocalSession | Exception) -> None:
        self.sessions = list(sessions)
        self.rows: list[Mapping[str, Any]] = []
        self.seeds: list[Mapping[str, int]] = []

    async def open(self, row: Mapping[str, Any], seeds: Mapping[str, int]) -> Any:
        self.rows.append(row)
        self.seeds.append(seeds)
        session = self.sessions.pop(0)
        if isinstance(session, Exception):
            raise session
        return session


class Engine:
    """Says these turns to every rollout, and keeps what was asked of it."""

    def __init__(self, *turns: Any) -> None:
        self.turns, self.asked = turns, list[dict[str, Any]]()

    async def generate(self, token_ids: np.ndarray, settings: SamplingSettings, **how: Any) -> list[Completion]:
        turn = text(token_ids).count("a:") - 1
        self.asked.append({"ids": text(token_ids), "parsing": settings.parsing, **how})
        return [completion(self.turns[turn], settings.max_tokens, engine=3)]


def config_of(tmp_path: Path, **sections: Any) -> GRPOConfig:
    environment = {"name": "my.module:Game", **sections.pop("environment", {})}
    return make_config(tmp_path, environment=environment, reward={"parts": []}, **sections)


def play(config: GRPOConfig, hosts: Hosts, engine: Engine, of: Prompt) -> RolloutGroup:
    environments = Environments(config, hosts, Templates(), PARSING, Tokenizer())
    worker = RolloutWorker(config, Tokenizer(), cast(Any, engine.generate), cast(Scorer, Ungraded()), environments)
    return asyncio.run(worker.rollout_group(of, training_purpose(config, None)))


class Ungraded:
    """The scorer of an empty reward; `graded` has the texts that it was given."""

    async def score_group(
        self, _: Prompt, rollouts: Any, texts: Any, marks: Any, **options: Any
    ) -> tuple[ScoredRollout, ...]:
        return tuple(ScoredRollout(*each, "", None, {}, "not_judged") for each in zip(rollouts, texts, strict=True))


CALL = {"content": "add", "tool_calls": [call("add")]}


def test_a_group_is_played_with_the_prompt_that_reset_leaves(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 2})
    tools = [{"type": "function", "function": {"name": "add"}}]
    sessions = [LocalSession(outcome=Outcome(reward=float(i), parts={"x": 2.0}), text="!", tools=tools) for i in (1, 3)]
    hosts, engine = Hosts(*sessions), Engine(CALL, "end")
    group = play(config, hosts, engine, prompt("hi", level=4))
    assert hosts.rows[0] == {"level": 4, "prompt": [{"role": "user", "content": "hi"}]}
    assert [seeds["sample"] for seeds in hosts.seeds] == [0, 1]
    assert hosts.seeds[0]["group"] == hosts.seeds[1]["group"]
    assert group.prompt.messages[0]["content"] == "hi!"
    assert text(group.prompt.token_ids) == "[add]u:hi!|a:"
    assert [sample.reward for sample in group.samples] == [1.0, 3.0]
    assert group.samples[1].reward_parts == {"environment": 3.0, "environment/x": 2.0}
    assert [sample.text for sample in group.samples] == ["end", "end"]
    assert all(session.closed for session in sessions)
    later = [asked for asked in engine.asked if asked["ids"].count("a:") == 2]
    assert [asked["prefer"] for asked in later] == [3, 3]
    assert all(asked["parsing"] == PARSING for asked in engine.asked)


def test_a_prompt_that_reset_makes_has_the_system_prompt_of_the_config(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 2}, data={"system_prompt": "be brief"})
    sessions = [LocalSession(text="guess"), LocalSession(opening=[{"role": "user", "content": "guess"}])]
    group = play(config, Hosts(*sessions), Engine("end"), prompt(""))
    assert [message["content"] for message in group.prompt.messages] == ["be brief", "guess"]
    assert len({text(sample.rollout.sequences[0].token_ids) for sample in group.samples}) == 1


@pytest.mark.slow
def test_a_rollout_that_reset_began_otherwise_is_shown_and_graded_with_its_own_prompt(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 3})
    group = play(
        config, Hosts(*(LocalSession(text=t) for t in ("maze a", "maze b", "maze a"))), Engine("end"), prompt("")
    )
    assert [row["prompt"] for row in rollout_rows(1, [group], [0.0] * 3)] == ["maze a", "maze b", "maze a"]
    assert [sample.rollout.opening is None for sample in group.samples] == [True, False, True]
    (turn,) = conversation(group.prompt, "", group.samples[1].rollout.opening)[:-1]
    assert turn["content"] == "maze b"
    with Scorer(RewardConfig(parts=[f"{Path(__file__).parent / 'games.py'}:asked_for"], workers=1)) as scorer:
        rollouts = [sample.rollout for sample in group.samples]
        graded = asyncio.run(scorer.score_group(group.prompt, rollouts, ["end"] * 3))
    assert [sample.reward for sample in graded] == [0.0, 1.0, 0.0]


def test_a_prompt_that_could_never_fit_is_not_rendered(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 2})
    group = play(config, Hosts(*(LocalSession(text="x" * 10_000_000) for _ in range(2))), Engine("end"), prompt(""))
    assert {sample.status for sample in group.samples} == {"environment_failed"}
    assert "10,000,000 characters cannot fit" in group.samples[0].rollout.facts["error"]


def test_what_fails_costs_its_rollout_alone_and_is_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 5}, environment={"failed_reward": -2.0})

    def hang(_: Any) -> str:
        raise CallLimitError("over 2 CPU seconds")

    hosts = Hosts(
        LocalSession(outcome=Outcome(reward=1.0)),
        FailedError("open: ValueError: no board"),
        LocalSession(hang),
        LocalSession(text="x" * 10_000),
        LocalSession(outcome=Outcome()),
    )
    group = play(config, hosts, Engine(CALL, "end"), prompt("hi"))
    statuses = ["ok", "environment_failed", "call_limit", "environment_failed", "not_judged"]
    assert [sample.status for sample in group.samples] == statuses
    assert [sample.reward for sample in group.samples] == [1.0, None, -2.0, None, None]
    assert "data.max_prompt_tokens" in group.samples[3].rollout.facts["error"]
    batch = make_batch([group], mask_truncated=True)  # the call over a limit is trained on even so
    assert batch.trained.tolist() == [True, False, True, False, False]
    assert group.oldest_version == 0
    metrics = rollout_metrics([group], np.zeros(5), version=0, asynchronous=True)
    assert metrics["environment/ended_by/environment_failed"].value() == pytest.approx(0.4)
    assert metrics["environment/tool_calls"].value() == pytest.approx(3 / 5)


def test_an_error_of_an_engine_ends_the_group_and_closes_its_sessions(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 2})
    sessions = [LocalSession(), LocalSession()]

    async def lost(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no engine")

    with pytest.raises(ConnectionError):
        play(config, Hosts(*sessions), cast(Any, SimpleNamespace(generate=lost)), prompt())
    assert all(session.closed for session in sessions)


def test_the_environments_reward_is_added_with_its_weight(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 2}, environment={"weight": 0.5})
    hosts = Hosts(*(LocalSession(outcome=Outcome(reward=4.0)) for _ in range(2)))
    group = play(config, hosts, Engine("end"), prompt())
    assert [sample.reward for sample in group.samples] == [2.0, 2.0]


def test_a_rollout_that_did_not_stop_is_penalized_once_as_a_whole(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 2, "max_turns": 1, "missing_eos_penalty": 0.25})
    hosts = Hosts(LocalSession(outcome=Outcome(reward=1.0)), LocalSession(outcome=Outcome(reward=1.0), done_after=1))
    group = play(config, hosts, Engine(CALL), prompt())
    assert [sample.reward for sample in group.samples] == [0.75, 1.0]


def test_too_many_failures_of_a_step_end_the_run_with_their_errors(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 4})
    errors = [FailedError(f"open: ValueError: {name}") for name in ("a", "a", "b")]
    group = play(config, Hosts(*errors, LocalSession()), Engine("end"), prompt())
    rollouts = [sample.rollout for sample in group.samples]
    warnings, why = FailedEnvironments(0.5).check(rollouts)
    assert len(warnings) == 2
    assert "3 of 4 rollouts of a step failed" in why
    assert "2 x open: ValueError: a" in why
    tolerant = FailedEnvironments(1.0)
    assert tolerant.check(rollouts)[1] == ""
    assert tolerant.check(rollouts) == ([], "")  # told once


def test_a_fault_of_a_tool_is_told_once_and_its_rollouts_go_on(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout={"samples_per_prompt": 3})
    faults = ("find: t.py:3: NameError: x", "find: t.py:3: NameError: x", "add: t.py:9: KeyError: 1")
    hosts = Hosts(*(LocalSession(faults=(each,)) for each in faults))
    rollouts = [sample.rollout for sample in play(config, hosts, Engine(CALL, "end"), prompt()).samples]
    assert [rollout.facts["ended_by"] for rollout in rollouts] == ["answer"] * 3
    told = FailedEnvironments(0.0)
    warnings, why = told.check(rollouts)
    assert [warning.partition(". Repair the tool")[0] for warning in warnings] == [
        "environment: the tool find failed (2 x): t.py:3: NameError: x",
        "environment: the tool add failed (1 x): t.py:9: KeyError: 1",
    ]
    assert why == ""
    assert told.check(rollouts) == ([], "")


def test_seeds_follow_from_the_place_in_the_stream(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    hosts = Hosts(LocalSession(), LocalSession(), LocalSession())
    environments = Environments(config, cast(Any, hosts), Templates(), PARSING, Tokenizer())
    for of, sample in ((prompt(), 0), (dataclasses.replace(prompt(), epoch=1), 0), (prompt(), 1)):
        asyncio.run(environments.open(of, sample))
    first, of_next_epoch, second = hosts.seeds
    assert first["group"] != of_next_epoch["group"]
    assert second == {**first, "sample": 1}


def test_columns_with_answers_are_those_of_data_code_and_rubrics(tmp_path: Path) -> None:
    rubric = {"name": "rubric", "url": "http://host/v1/chat/completions", "model": "m", "criteria_column": "Grading"}
    data = {"train": {"path": "x.jsonl", "answer_column": "gold.value"}, "eval": "y.jsonl", "answer_column": "solved"}
    reward = {"parts": [{"name": "code", "tests": "checks"}, rubric]}
    columns = answer_columns(make_config(tmp_path, data=data, reward=reward))
    assert {"gold", "gold.value", "solved", "checks", "grading", "answer", "reward_model"} <= {*columns}
    assert not {"question", "prompt", "tests"} & {*columns}
