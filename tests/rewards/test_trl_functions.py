"""Reward functions in TRL's signature: what they get in a grading process, and what None from them means."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.config.reward import RewardConfig
from rlhf.processes.attributes import said
from rlhf.rewards.scorer import Scorer
from rlhf.types import Outcome, Prompt, Rollout, ScoredRollout, TokenSequence, VersionSpan

pytestmark = pytest.mark.slow  # they start processes

FUNCTIONS = """
def length(completions, prompts, level, **kwargs):
    assert [len(prompt) for prompt in prompts] == [1, 1]
    assert level == [3, 3]
    kwargs["log_metric"]("calls", len(completions))
    kwargs["log_metric"]("calls", float("nan"))  # a number of no meaning is left out
    return [float(len(completion[-1]["content"])) for completion in completions]

def of_environments(environments, **kwargs):
    return [env._score for env in environments]

def not_mine(completions, **kwargs):
    return [None if completion[-1]["content"] == "four" else 1.0 for completion in completions]

async def waiting(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def turns(response, answer, columns, metadata):
    return len(metadata["turns"]) + metadata["facts"]["tool_calls"] + len(metadata["files"]["a.txt"])

def ours(completions, answer, columns, metadata):
    return [float(len(text)) for text in completions]
"""


class Game:
    def __init__(self, score: float) -> None:
        self._score = score


def rollout(sample: int, outcome: Outcome | None) -> Rollout:
    mask = np.array([False, True, True])
    sequence = TokenSequence(np.array([1, 2, 3], np.int32), mask, np.zeros(3, np.float32), (VersionSpan(1, 3, 0),))
    turns = ({"role": "assistant", "content": ("four", "sixsix")[sample]},) if outcome else ()
    return Rollout("p/1", 0, sample, (sequence,), "stop", turns, {"tool_calls": 4} if outcome else {}, outcome)


def grade(tmp_path: Path, *names: str, environment: bool = False, **options: Any) -> tuple[ScoredRollout, ...]:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    config = RewardConfig(parts=[{"name": f"{file}:{name}", **options} for name in names], workers=1)
    left = {"a.txt": "xy"}
    outcomes = [Outcome(attributes=said(Game(score)), files=left) if environment else None for score in (0.5, 0.25)]
    rollouts = [rollout(sample, outcome) for sample, outcome in enumerate(outcomes)]
    messages = ({"role": "user", "content": "q"},)
    prompt = Prompt("p/1", 0, np.array([1], np.int32), messages, "", "p", {"level": 3})
    with Scorer(config) as scorer:
        return asyncio.run(scorer.score_group(prompt, rollouts, ["four", "sixsix"]))


@pytest.mark.parametrize("environment", [False, True])
def test_a_function_gets_a_group_as_messages_with_every_column(tmp_path: Path, environment: bool) -> None:
    graded = grade(tmp_path, "length", environment=environment)
    assert [sample.reward for sample in graded] == [4.0, 6.0]
    assert graded[0].reward_parts[f"{tmp_path}/functions.py:length/calls"] == 2.0


def test_a_function_reads_private_attributes_of_the_environments(tmp_path: Path) -> None:
    assert [sample.reward for sample in grade(tmp_path, "of_environments", environment=True)] == [0.5, 0.25]


def test_a_coroutine_function_is_awaited(tmp_path: Path) -> None:
    assert [sample.reward for sample in grade(tmp_path, "waiting")] == [2.0, 2.0]


def test_none_says_that_others_judge(tmp_path: Path) -> None:
    both = grade(tmp_path, "not_mine", "waiting")
    assert [(sample.reward, sample.status) for sample in both] == [(2.0, "ok"), (3.0, "ok")]
    alone = grade(tmp_path, "not_mine")
    assert [(sample.reward, sample.status) for sample in alone] == [(None, "not_judged"), (1.0, "ok")]


def test_a_function_in_our_signature_reads_turns_facts_and_files(tmp_path: Path) -> None:
    assert [sample.reward for sample in grade(tmp_path, "turns", environment=True)] == [7.0, 7.0]


def test_a_function_in_our_own_signature_may_call_its_first_argument_completions(tmp_path: Path) -> None:
    assert [sample.reward for sample in grade(tmp_path, "ours", group=True)] == [4.0, 6.0]
