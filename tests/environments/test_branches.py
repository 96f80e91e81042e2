"""The rollout of a coroutine: which contexts go on in one log, and which begin a sequence of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from documented import check_documented
from fake_environments import Script, Templates, prompt, text

from rlhf.config.environment import KINDS
from rlhf.environments.branches import Branches, play_coroutine
from rlhf.environments.turns import FailedError, Limits
from rlhf.run.rollout_log import environment_metrics
from rlhf.sampling.requests import Completion
from rlhf.types import Outcome, Rollout

ROOMY = Limits(max_response_tokens=50, max_rollout_tokens=500)
USER = {"role": "user", "content": "q"}
Answer = Callable[[Any], Awaitable[dict[str, Any]]]


def play(
    coroutine: Callable[[Answer], Awaitable[Outcome]], turns: list[Any], limits: Limits = ROOMY, **how: Any
) -> tuple[Rollout, Script]:
    script = Script(turns)
    played = play_coroutine(
        prompt(), 0, lambda branches: coroutine(branches.answer),
        generate=script, templates=Templates(), limits=limits, **how,
    )  # fmt: skip
    return asyncio.run(played), script


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def contexts(rollout: Rollout) -> list[tuple[str, str]]:
    """Of each sequence: its text, and what of it is trained."""
    return [(text(each.token_ids), text(each.token_ids[each.response_mask])) for each in rollout.sequences]


def test_a_conversation_that_goes_on_is_one_sequence() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        first = await answer({"messages": [USER]})
        message = {"role": "assistant", "content": first["content"]}
        await answer({"messages": [USER, message, {"role": "user", "content": "more"}]})
        return Outcome(reward=1.0)

    rollout, script = play(coroutine, ["one", "two"])
    assert script.asked == ["u:q|a:", "u:q|a:one|u:more|a:"]
    assert contexts(rollout) == [("u:q|a:one|u:more|a:two|", "one|two|")]
    assert [message["content"] for message in rollout.turns] == ["q", "one", "more", "two"]


def test_a_branch_has_the_ids_of_its_beginning_and_trains_them_once() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [USER]})
        for question in ("a", "b"):
            await answer({"messages": [USER, said("one"), {"role": "user", "content": question}]})
        return Outcome()

    rollout, script = play(coroutine, ["one", "x", "y"])
    assert script.asked[2] == "u:q|a:one|u:b|a:"
    assert contexts(rollout) == [("u:q|a:one|u:a|a:x|", "one|x|"), ("u:q|a:one|u:b|a:y|", "y|")]


async def work_with_a_title_and_a_retry(answer: Answer) -> Outcome:
    for question, turn in (("title?", None), ("q", "one"), ("q", None)):
        asked = [{"role": "user", "content": question}]
        await answer({"messages": asked})
        if turn is not None or question == "title?":
            more = {"role": "user", "content": "more"}
            await answer({"messages": [*asked, said(turn or "title"), more]})
    return Outcome(reward=1.0)


@pytest.mark.parametrize(
    ("trained", "sampled"),
    [
        (KINDS, ["title|longer|", "one|two|", "three|"]),
        (("first",), ["title|longer|"]),
        (("separate",), ["one|two|"]),
        (("separate", "retried"), ["one|two|", "three|"]),
        (("rewritten",), [""]),
    ],
)
def test_sequences_of_some_kinds_are_trained_and_the_others_are_sampled_all_the_same(
    trained: tuple[str, ...], sampled: list[str]
) -> None:
    turns = ["title", "longer", "one", "two", "three"]
    rollout, script = play(work_with_a_title_and_a_retry, [*turns], trained=trained)
    assert [text(each.token_ids[each.response_mask]) for each in rollout.sequences] == sampled
    assert rollout.facts["calls"] == {"first": 1, "continued": 2, "separate": 1, "retried": 1}
    assert [turn["content"] for turn in rollout.turns if turn["role"] == "assistant"] == turns
    assert rollout.outcome == Outcome(reward=1.0)
    assert len(script.asked) == 5
    left_out = len("title|longer|one|two|three|") - rollout.response_length
    assert rollout.facts.get("untrained_tokens", 0) == left_out
    metrics = {name: value for name, value in environment_metrics([rollout]).items() if "untrained" in name}
    assert bool(metrics) == (left_out > 0)
    if left_out:
        check_documented([metrics], logged={"environment.trained_sequences"})


def test_turns_asked_for_at_the_same_time_are_branches() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [USER]})
        history = [USER, said("one"), {"role": "user", "content": "more"}]
        await asyncio.gather(*(answer({"messages": history}) for _ in range(2)))
        return Outcome()

    rollout, _ = play(coroutine, ["one", "x", "y"])
    assert contexts(rollout) == [("u:q|a:one|u:more|a:x|", "one|x|"), ("u:q|a:one|u:more|a:y|", "y|")]


def test_a_context_that_was_rewritten_begins_anew() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [USER]})
        await answer({"messages": [USER, said("ONE"), {"role": "user", "content": "more"}]})
        return Outcome()

    rollout, _ = play(coroutine, ["one", "two"])
    assert contexts(rollout) == [("u:q|a:one|", "one|"), ("u:q|a:ONE|u:more|a:two|", "two|")]


def test_ids_go_on_too() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        first = await answer({"token_ids": [65, 66]})
        for _ in range(2):
            await answer({"token_ids": [65, 66, *first["token_ids"], 67]})
        await answer({"token_ids": [65, 67]})
        return Outcome()

    rollout, _ = play(coroutine, ["one", "two", "again", "three"])
    assert contexts(rollout) == [("ABone|Ctwo|", "one|two|"), ("ABone|Cagain|", "again|"), ("ACthree|", "three|")]
    assert rollout.facts["calls"] == {"first": 1, "continued": 1, "retried": 1, "separate": 1}


@pytest.mark.parametrize(("asked", "ends"), [(3, ("stop", "answer")), (None, ("length", "max_response_tokens"))])
def test_a_turn_that_ends_where_the_coroutine_wants_it_to_leaves_the_rollout_stopped(
    asked: int | None, ends: tuple[str, str]
) -> None:
    async def coroutine(answer: Answer) -> Outcome:
        turn = await answer({"messages": [USER], "max_tokens": asked})
        assert turn["finish_reason"] == "length"
        return Outcome(reward=1.0)

    rollout, _ = play(coroutine, ["abcdef"], Limits(max_response_tokens=asked or 4, max_rollout_tokens=500))
    assert (rollout.finish_reason, rollout.facts["ended_by"]) == ends


def test_turns_asked_for_at_the_same_time_are_together_no_longer_than_the_whole() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        turns = await asyncio.gather(*(answer({"messages": [USER]}) for _ in range(4)))
        assert [len(turn["token_ids"]) for turn in turns] == [3, 3, 2, 0]
        return Outcome()

    rollout, _ = play(coroutine, ["ab", "cd", "efgh"], Limits(max_response_tokens=4, max_rollout_tokens=8))
    assert rollout.facts["ended_by"] == "max_rollout_tokens"
    assert rollout.response_length == 8


def test_a_turn_past_a_limit_is_not_sampled() -> None:
    answers = []

    async def coroutine(answer: Answer) -> Outcome:
        answers.extend([await answer({"messages": [USER]}), await answer({"messages": [USER]})])
        return Outcome(reward=2.0)

    rollout, _ = play(coroutine, ["one"], Limits(50, 500, max_turns=1))
    assert [answer["finish_reason"] for answer in answers] == ["stop", "length"]
    assert (rollout.finish_reason, rollout.facts["ended_by"]) == ("length", "max_turns")


@pytest.mark.parametrize("request_", [{"messages": [{"content": "no role"}]}, {"messages": 3}, {"token_ids": ["x"]}])
def test_a_context_that_cannot_be_read_costs_the_rollout(request_: Any) -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer(request_)
        return Outcome()

    rollout, _ = play(coroutine, [])
    assert rollout.outcome is not None
    assert rollout.outcome.status == "environment_failed"


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [USER], "max_tokens": -1},
        {"messages": [USER], "max_tokens": "8"},
        {"messages": [USER], "max_tokens": 2.5},
        {"token_ids": [65, -1]},
        {"token_ids": [65, 200]},
        {"token_ids": []},
        {"messages": [{"role": "user", "content": "x" * 60}]},
    ],
)
def test_what_the_engine_would_refuse_costs_the_rollout_and_never_reaches_it(request_: Any) -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer(request_)
        return Outcome()

    rollout, script = play(coroutine, ["one"], Limits(50, 500, max_sequence_tokens=60, vocabulary=128))
    assert script.asked == []
    assert rollout.outcome is not None
    assert rollout.outcome.status == "environment_failed"
    assert "`generate` was called with" in rollout.facts["error"]


def test_a_context_that_has_grown_to_the_whole_sequence_gets_no_further_turn() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [USER]})
        later = await answer({"messages": [USER, said("one"), {"role": "user", "content": "x" * 60}]})
        assert later["finish_reason"] == "length"
        await answer({"messages": [USER, said("one"), {"role": "user", "content": "more"}]})
        return Outcome(reward=1.0)

    rollout, script = play(coroutine, ["one", "two"], Limits(50, 500, max_sequence_tokens=22))
    assert contexts(rollout) == [("u:q|a:one|u:more|a:two", "one|two")]
    assert script.budgets == [16, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_turns_that_the_coroutine_does_not_wait_for_end_before_the_rollout_does(fails: bool) -> None:
    class Slow(Script):
        async def __call__(self, token_ids: np.ndarray, *, max_tokens: int, turn: int, recorded: int) -> Completion:
            completed = await super().__call__(token_ids, max_tokens=max_tokens, turn=turn, recorded=recorded)
            await asyncio.sleep(0.01 * turn)
            return completed

    async def coroutine(answer: Answer) -> Outcome:
        first, _ = (asyncio.ensure_future(answer({"messages": [USER]})) for _ in range(2))
        await first
        if fails:
            raise FailedError("play: ValueError: no")
        return Outcome(reward=1.0)

    async def play_to_its_end() -> tuple[Rollout, int]:
        how: Any = {"generate": Slow(["one", "two"]), "templates": Templates(), "limits": ROOMY}
        rollout = await play_coroutine(prompt(), 0, lambda branches: coroutine(branches.answer), **how)
        return rollout, len(asyncio.all_tasks())

    rollout, tasks = asyncio.run(play_to_its_end())
    assert contexts(rollout) == [("u:q|a:one|", "one|"), ("u:q|a:two|", "two|")]
    assert tasks == 1


def test_a_coroutine_that_ignores_a_limit_for_ever_is_ended() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        while True:
            await answer({"messages": [USER]})

    rollout, _ = play(coroutine, ["one"], Limits(50, 500, max_turns=1))
    assert rollout.outcome is not None
    assert rollout.outcome.status == "environment_failed"
    assert "finish_reason" in rollout.facts["error"]


def test_more_new_messages_than_a_template_writes_in_a_short_time_are_refused() -> None:
    many, short = [USER] * 1000, Limits(50, 100_000)

    async def coroutine(answer: Answer) -> Outcome:
        for asked in ([*many, USER], [USER, said("one"), *many, USER]):
            with pytest.raises(FailedError, match="new messages, but at most 1000"):
                await answer({"messages": asked})
        await answer({"messages": many})
        await answer({"messages": [*many, said("one"), *many]})
        return Outcome(reward=1.0)

    rollout, _ = play(coroutine, ["one", "two"], short)
    assert rollout.outcome == Outcome(reward=1.0)


def test_a_coroutine_that_fails_before_its_first_turn_needs_no_prompt() -> None:
    async def fails(_: Answer) -> Outcome:
        raise FailedError("play: ValueError: no")

    played = play_coroutine(prompt(""), 0, fails, generate=Script([]), templates=Templates(), limits=ROOMY)
    (sequence,) = asyncio.run(played).sequences
    assert sequence.prompt_length == 1


def test_a_coroutine_that_asks_for_nothing_or_fails_costs_its_rollout() -> None:
    async def nothing(_: Answer) -> Outcome:
        return Outcome(reward=1.0)

    async def fails(answer: Answer) -> Outcome:
        await answer({"messages": [USER]})
        raise FailedError("play: ValueError: no")

    for coroutine, error in ((nothing, "the model was asked for nothing"), (fails, "ValueError")):
        rollout, _ = play(coroutine, ["one"])
        assert rollout.outcome is not None
        assert rollout.outcome.status == "environment_failed"
        assert error in rollout.facts["error"]
        assert rollout.oldest_version >= 0


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("turn", "history"),
    [
        ("one ", [USER, said("one")]),  # spaces at the end are cut
        ({"content": "one", "reasoning_content": "hm"}, [USER, said("one")]),  # thoughts are left out
        ("one", [{"role": "user", "content": ["q"]}, {"role": "assistant", "content": "one", "refusal": None}]),
        ({"content": "", "tool_calls": [CALL]}, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]),
        (  # a call is known by its id
            {"content": "", "tool_calls": [CALL]},
            [USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}],
        ),
        (  # or by what it calls
            {"content": "", "tool_calls": [CALL]},
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}],
        ),
    ],
)
def test_a_history_that_a_client_has_changed_still_goes_on(turn: Any, history: list[dict[str, Any]]) -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [USER]})
        await answer({"messages": [*history, {"role": "user", "content": "more"}]})
        return Outcome()

    rollout, _ = play(coroutine, [turn, "two"])
    assert len(rollout.sequences) == 1
    assert rollout.facts["calls"] == {"first": 1, "continued": 1}


def test_messages_of_a_user_that_a_client_has_joined_still_go_on() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [USER, {"role": "user", "content": "b"}]})
        joined = {"role": "user", "content": ["q", "b"]}
        await answer({"messages": [joined, said("one"), {"role": "user", "content": ["c", "d"]}]})
        return Outcome()

    rollout, script = play(coroutine, ["one", "two"])
    assert script.asked[1] == "u:q|u:b|a:one|u:c\nd|a:"
    assert len(rollout.sequences) == 1


def test_every_request_is_counted_by_what_it_is_to_those_before_it() -> None:
    system = {"role": "system", "content": "1"}
    history = [system, USER, said("one"), {"role": "user", "content": "more"}]

    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [system, USER]})
        await answer({"messages": history})
        await answer({"messages": history})
        await answer({"messages": [*history[:-1], {"role": "user", "content": "less"}]})
        await answer({"messages": [{"role": "system", "content": "2"}, USER, said("one"), history[-1]]})
        await answer({"messages": [{"role": "user", "content": "a title, please"}]})
        await asyncio.gather(*(answer({"messages": [{"role": "user", "content": name}]}) for name in "xy"))
        return Outcome()

    class Slow(Script):
        async def __call__(self, *arguments: Any, **how: Any) -> Completion:
            await asyncio.sleep(0)
            return await super().__call__(*arguments, **how)

    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    script = Slow([*words])
    how: Any = {"generate": script, "templates": Templates(), "limits": ROOMY}
    rollout = asyncio.run(play_coroutine(prompt(), 0, lambda branches: coroutine(branches.answer), **how))
    assert rollout.facts["calls"] == {
        "first": 1, "continued": 1, "retried": 1, "branched": 1, "rewritten": 1, "separate": 2, "parallel": 1,
    }  # fmt: skip
    assert rollout.response_length == sum(len(word) + 1 for word in words)


def test_facts_with_the_names_of_our_own_are_dropped() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [USER]})
        return Outcome(facts={"tool_calls": 3, "calls": 5, "untrained_tokens": "x", "moves": 7})

    rollout, _ = play(coroutine, ["one"])
    assert rollout.facts["calls"] == {"first": 1}
    assert rollout.facts["moves"] == 7
    assert not rollout.facts.keys() & {"tool_calls", "untrained_tokens"}
    assert "environment/turns" in environment_metrics([rollout])


def test_the_time_of_a_rollout_begins_with_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    async def coroutine(answer: Answer) -> Outcome:
        now[0] += 300.0  # for a place, or for imports
        assert (await answer({"messages": [USER]}))["finish_reason"] == "stop"
        return Outcome()

    rollout, _ = play(coroutine, ["one"], Limits(50, 500, max_rollout_s=200.0))
    assert rollout.facts["ended_by"] == "answer"


def test_a_conversation_after_a_turn_that_was_cut_is_another_sequence() -> None:
    async def coroutine(answer: Answer) -> Outcome:
        cut = await answer({"messages": [USER]})
        await answer({"messages": [USER, said(cut["content"]), {"role": "user", "content": "more"}]})
        return Outcome()

    rollout, _ = play(coroutine, ["abcdef", "two"], Limits(max_response_tokens=4, max_rollout_tokens=500))
    assert contexts(rollout) == [("u:q|a:abcd", "abcd"), ("u:q|a:abcdef|u:more|a:two|", "two|")]
    assert rollout.facts["calls"] == {"first": 1, "rewritten": 1}


@pytest.mark.parametrize(
    ("second", "shown", "trained"), [("abcdef", "abcd", "abcd"), ("two", "2", "two|")], ids=["cut", "changed"]
)
def test_a_later_turn_that_was_cut_or_changed_is_text_of_another_sequence(
    second: str, shown: str, trained: str
) -> None:
    more = {"role": "user", "content": "more"}

    async def coroutine(answer: Answer) -> Outcome:
        asked = [USER]
        for turn in ("one", shown):
            await answer({"messages": asked})
            asked = [*asked, said(turn), more]
        await answer({"messages": asked})
        return Outcome()

    rollout, _ = play(coroutine, ["one", second, "x"], Limits(max_response_tokens=4, max_rollout_tokens=500))
    assert contexts(rollout) == [
        (f"u:q|a:one|u:more|a:{trained}", f"one|{trained}"),
        (f"u:q|a:one|u:more|a:{shown}|u:more|a:x|", "x|"),
    ]
    assert rollout.facts["calls"] == {"first": 1, "continued": 1, "rewritten": 1}


def test_blocks_of_text_are_given_to_the_template_as_text() -> None:
    blocks = [{"type": "text", "text": "q"}]
    given = []

    class Reads(Templates):
        def prompt(self, messages: Any, tools: Any = None) -> np.ndarray:
            given.extend(message["content"] for message in messages)
            return super().prompt([USER], tools)

    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [{"role": "user", "content": blocks}]})
        return Outcome(reward=1.0)

    how: Any = {"generate": Script(["one"]), "templates": Reads(), "limits": ROOMY}
    rollout = asyncio.run(play_coroutine(prompt(), 0, lambda branches: coroutine(branches.answer), **how))
    assert rollout.outcome == Outcome(reward=1.0)
    assert given == ["q"]


def test_tools_that_a_program_does_not_offer_are_not_called() -> None:
    offers = []

    class Offered(Script):
        async def __call__(
            self, token_ids: np.ndarray, *, max_tokens: int, turn: int, recorded: int, **how: Any
        ) -> Completion:
            offers.append(how)
            return await super().__call__(token_ids, max_tokens=max_tokens, turn=turn, recorded=recorded)

    async def coroutine(answer: Answer) -> Outcome:
        await answer({"messages": [USER], "offered": []})
        await answer({"messages": [USER]})
        return Outcome()

    how: Any = {"generate": Offered(["one", "two"]), "templates": Templates(), "limits": ROOMY}
    asyncio.run(play_coroutine(prompt(), 0, lambda branches: coroutine(branches.answer), **how))
    assert offers == [{"offered": []}, {}]


def test_contexts_of_a_rollout_that_take_long_to_read_hold_up_no_other_rollout() -> None:
    ticked, ticks, read_s = [0], list[int](), list[float]()

    class Long(Templates):
        def prompt(self, *arguments: Any, **how: Any) -> Any:
            began = time.monotonic()
            time.sleep(0.05)
            ticks.append(ticked[0])
            read_s.append(time.monotonic() - began)
            return super().prompt(*arguments, **how)

    async def seconds() -> float:
        nothing: Any = None
        hostile = Branches(nothing, Long(), ROOMY, ())
        counts = [asyncio.ensure_future(hostile.count([USER], [])) for _ in range(8)]
        began = time.monotonic()
        while not all(task.done() for task in counts):
            await asyncio.sleep(0.01)
            ticked[0] += 1
        return time.monotonic() - began

    assert asyncio.run(seconds()) > 0.99 * (sum(read_s) + sum(read_s[:7]))  # as long as each is read, others have
    assert len(set(ticks)) == 8
