"""The loop over turns: what is sampled, what is said, which of it is trained, and how a rollout ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_environments import LocalSession, Script, Templates, call, prompt, text

from rlhf.environments.turns import CallLimitError, FailedError, Limits, play_turns
from rlhf.run.rollout_log import environment_metrics
from rlhf.types import Outcome, Rollout

CALL = {"content": "add", "tool_calls": [call("add", a=1, b=2)]}
ROOMY = Limits(max_response_tokens=50, max_rollout_tokens=500)


def play(turns: list[Any], session: LocalSession | None = None, limits: Limits = ROOMY) -> tuple[Rollout, Script]:
    script = Script(turns)
    played = play_turns(prompt(), 3, session or LocalSession(), generate=script, templates=Templates(), limits=limits)
    return asyncio.run(played), script


def test_the_engine_goes_on_from_the_ids_that_were_sampled_and_what_is_said_is_never_trained() -> None:
    session = LocalSession(lambda _: "3", Outcome(reward=0.5))
    rollout, script = play([CALL, "three"], session)
    assert script.asked == ["u:hi|a:", "u:hi|a:add|t:3|a:"]
    (sequence,) = rollout.sequences
    assert text(sequence.token_ids) == "u:hi|a:add|t:3|a:three|"
    assert text(sequence.token_ids[sequence.response_mask]) == "add|three|"
    sampled = sequence.rollout_logprobs[sequence.response_mask]
    assert sampled.tolist() == [-1, -2, -3, -4, -1, -2, -3, -4, -5, -6]
    assert not sequence.rollout_logprobs[~sequence.response_mask].any()
    assert [tuple(span) for span in sequence.version_spans] == [(7, 11, 0), (17, 23, 1)]
    assert [message["role"] for message in rollout.turns] == ["assistant", "tool", "assistant"]
    assert (rollout.sample, rollout.finish_reason, rollout.outcome) == (3, "stop", Outcome(reward=0.5))
    facts = {name: rollout.facts[name] for name in ("turns", "tool_calls", "tool_errors", "ended_by")}
    assert facts == {"turns": 2, "tool_calls": 1, "tool_errors": 0, "ended_by": "answer"}


def test_several_calls_of_a_turn_are_answered_together() -> None:
    both = {"content": "x", "tool_calls": [call("a"), call("b")]}
    rollout, script = play([both, "end"], LocalSession(lambda each: each["function"]["name"]))
    assert script.asked[1] == "u:hi|a:x|t:a|t:b|a:"
    assert rollout.facts["tool_calls"] == 2


def test_an_environment_that_says_so_ends_the_rollout() -> None:
    rollout, _ = play([CALL, CALL], LocalSession(done_after=2))
    assert (rollout.finish_reason, rollout.facts["ended_by"]) == ("stop", "done")
    assert text(rollout.sequences[0].token_ids).endswith("add|")  # its last answer is read by nobody
    assert rollout.turns[-1]["role"] == "tool"


@pytest.mark.parametrize(
    ("limits", "turns", "ended_by"),
    [
        (Limits(2, 500), [CALL], "max_response_tokens"),
        (Limits(50, 3), [CALL], "max_rollout_tokens"),
        (Limits(50, 11), [CALL], "max_rollout_tokens"),  # the answer has room, a token after it has none
        (Limits(50, 12), [CALL, CALL], "max_rollout_tokens"),
        (Limits(50, 500, max_turns=2), [CALL, CALL], "max_turns"),
        (Limits(50, 500, max_rollout_s=0.0), [CALL], "max_rollout_s"),
    ],
)
def test_a_limit_ends_the_rollout_by_its_name(limits: Limits, turns: list[Any], ended_by: str) -> None:
    rollout, script = play(list(turns), LocalSession(), limits)
    assert (rollout.finish_reason, rollout.facts["ended_by"]) == ("length", ended_by)
    assert script.turns == []
    assert rollout.sequences[0].token_ids.size - 7 <= limits.max_rollout_tokens


def test_a_call_of_the_last_turn_that_is_allowed_still_counts() -> None:
    """The sixth guess of six must reach the game, although nobody reads its answer."""
    session = LocalSession()
    play([CALL, CALL], session, Limits(50, 500, max_turns=2))
    assert session.calls == ["add", "add"]


def test_a_cut_turn_makes_no_calls() -> None:
    session = LocalSession()
    play([CALL], session, Limits(2, 500))
    assert session.calls == []


def test_a_call_over_a_limit_ends_the_rollout_and_it_counts_as_stopped() -> None:
    def hang(_: Any) -> str:
        raise CallLimitError("over 2 CPU seconds")

    rollout, _ = play([CALL], LocalSession(hang))
    assert rollout.facts["tool_calls"] == 1
    assert (rollout.finish_reason, rollout.facts["ended_by"], rollout.facts["error"]) == (
        "stop", "call_limit", "over 2 CPU seconds",
    )  # fmt: skip
    assert rollout.outcome is not None
    assert rollout.outcome.status == "call_limit"
    assert text(rollout.response_ids) == "add|"


def test_an_environment_that_fails_costs_its_rollout_by_name() -> None:
    def fail(_: Any) -> str:
        raise FailedError("the process died")

    rollout, _ = play([CALL], LocalSession(fail))
    assert rollout.outcome is not None
    assert (rollout.finish_reason, rollout.outcome.status) == ("abort", "environment_failed")
    assert np.count_nonzero(rollout.sequences[0].response_mask) == 4


def test_a_fact_of_the_class_does_not_replace_one_of_the_run() -> None:
    rollout, _ = play(["end"], LocalSession(outcome=Outcome(facts={"turns": "many", "ended_by": [], "level": 3})))
    assert (rollout.facts["turns"], rollout.facts["ended_by"], rollout.facts["level"]) == (1, "answer", 3)
    assert environment_metrics([rollout])["environment/turns"].value() == 1.0
