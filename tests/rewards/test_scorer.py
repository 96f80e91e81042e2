"""The scorer: parts, weights, sources, unscorable responses and failed calls."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import rollout_of

from rlhf.answers.thoughts import marks_in
from rlhf.config.reward import RewardConfig, RewardPart
from rlhf.rewards.grade import Grade
from rlhf.rewards.registry import load_user_function
from rlhf.rewards.scorer import Scorer
from rlhf.types import Outcome, Prompt

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIG = {
    "parts": [
        {"name": "math", "weight": 1.0},
        {"name": "format", "weight": 0.5, "style": "boxed"},
        {"name": "length", "weight": 0.25, "max_tokens": 100, "buffer_tokens": 50},
    ],
    "by_source": {
        "gsm8k": ["gsm8k"],
        "user": [{"name": "hostile_rewards:length", "scale": 2.0}, {"name": "hostile_rewards:sees", "weight": 10.0}],
        "bad": ["hostile_rewards:by_response"],
    },
    "workers": 2,
    "wall_seconds": 1.0,
}


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    sys.path.insert(0, str(FIXTURES))
    with Scorer(RewardConfig.model_validate(CONFIG)) as running:
        yield running
    sys.path.remove(str(FIXTURES))


def prompt(answer: str = "5", source: str = "math", **columns: Any) -> Prompt:
    messages = ({"role": "user", "content": "?"},)
    return Prompt("p", 0, np.zeros(3, np.int32), messages, answer, source, columns)


def score(scorer: Scorer, p: Prompt, text: str, *, response_length: int = 10) -> Any:
    return asyncio.run(scorer.score_group(p, [rollout_of(range(response_length))], [text]))[0]


def test_the_reward_is_the_weighted_sum_of_the_parts(scorer: Scorer) -> None:
    result = score(scorer, prompt("5"), r"\boxed{5}", response_length=75)
    assert result.reward_parts == {"math": 1.0, "format": 1.0, "length": -0.5}
    assert result.reward == 1.0 + 0.5 - 0.125
    assert (result.status, result.extracted) == ("ok", "5")


def test_a_response_without_an_answer_gets_0_and_the_status_no_answer(scorer: Scorer) -> None:
    result = score(scorer, prompt("5"), "I think it is 5.")
    assert result.reward_parts["math"] == 0.0
    assert (result.status, result.extracted) == ("no_answer", "")


def test_a_response_that_begins_inside_a_thought_is_graded_by_what_follows_the_thought(scorer: Scorer) -> None:
    thinking = replace(prompt("5"), in_thought=True)
    unfinished = score(scorer, thinking, r"Let me try: \boxed{5}. Wait, ")
    assert (unfinished.reward_parts["math"], unfinished.status) == (0.0, "no_answer")
    finished = score(scorer, thinking, r"Let me try: \boxed{4}. Wait, it is 5.</think> \boxed{5}")
    assert finished.reward_parts["math"] == finished.reward_parts["format"] == 1.0


def test_the_marks_of_the_model_say_where_a_thought_is(scorer: Scorer) -> None:
    """gpt-oss's marks are read where the model has them, or is not known; tags always."""
    answer, thought = r"To write <|channel|> is \boxed{5}", r"<think>\boxed{5}?"
    for marks, paid in ((marks_in("{{ '<|channel|>' }}"), 0.0), (None, 0.0), ((), 1.0)):
        values = [
            asyncio.run(scorer.score_group(prompt("5"), [rollout_of([1])], [text], marks))[0].reward_parts["math"]
            for text in (answer, thought)
        ]
        assert values == [paid, 0.0]


def test_the_form_of_a_rollout_with_turns_is_that_of_its_last_message_with_its_thought() -> None:
    parts = [{"name": "format", "style": "think"}]
    with Scorer(RewardConfig.model_validate({"parts": parts, "workers": 1})) as own:
        said = {"role": "assistant", "content": "5"}
        rollouts = [
            replace(rollout_of([1]), turns=(turn, {"role": "tool", "content": "!"}), outcome=Outcome())
            for turn in ({**said, "reasoning_content": "2 + 3"}, {**said, "reasoning_content": ""}, said)
        ]
        scored = asyncio.run(own.score_group(replace(prompt("5"), in_thought=True), rollouts[:2], ["5", "5"]))
        scored += asyncio.run(own.score_group(prompt("5"), rollouts[2:], ["5"]))
    assert [each.reward for each in scored] == [1.0, 0.0, 0.0]


def test_an_expression_that_is_copied_from_the_prompt_gets_0(scorer: Scorer) -> None:
    asked = replace(prompt("x+3"), messages=({"role": "user", "content": r"Write $3(x+1)-2x$ shorter: $(x+1)+2$"},))
    assert score(scorer, asked, r"\boxed{(x+1)+2}").reward_parts["math"] == 0.0
    assert score(scorer, asked, r"\boxed{3+x}").reward_parts["math"] == 1.0


def test_a_row_without_a_gradable_answer_is_unscorable(scorer: Scorer) -> None:
    result = score(scorer, prompt(""), r"\boxed{5}")
    assert result.reward is None
    assert result.reward_parts["math"] is None
    assert result.status == "bad_gold"


def test_of_an_evaluation_answers_that_say_the_same_have_one_vote(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [r"\boxed{\frac{1}{2}}", r"\boxed{2}", "none", r"\boxed{0.5}", r"\boxed{2}", r"\boxed{\dfrac12}"]

    def voted(**options: Any) -> list[str]:
        rollouts = [rollout_of([1])] * len(texts)
        return [sample.vote for sample in asyncio.run(scorer.score_group(prompt("5"), rollouts, texts, **options))]

    half = r"\frac{1}{2}"
    by_spelling = [half, "2", "", "0.5", "2", r"\dfrac12"]
    assert voted(metric="math") == [half, "2", "", half, "2", half]
    assert voted() == by_spelling
    killed: Future[Grade] = Future()
    killed.set_result(Grade(None, "timeout"))
    monkeypatch.setattr(scorer.pool, "submit", lambda job: killed)
    assert voted(metric="math") == by_spelling


def test_of_an_evaluation_the_answer_is_the_one_that_its_metric_reads_in_any_order_of_the_parts() -> None:
    text = "#### 5"
    for names in (["exact", "gsm8k", "f1"], ["f1", "gsm8k", "exact"]):
        with Scorer(RewardConfig.model_validate({"parts": names, "workers": 1})) as own:
            read = {
                metric: asyncio.run(own.score_group(prompt("5"), [rollout_of([1])], [text], metric=metric))[0].extracted
                for metric in ("gsm8k", "exact", "reward_model")
            }
        assert read == {"gsm8k": "5", "exact": text, "reward_model": text}


def test_a_user_function_gets_the_response_the_columns_the_metadata_and_its_options(scorer: Scorer) -> None:
    result = score(scorer, prompt("gold", "user", difficulty=np.int64(3)), "four")
    assert result.reward_parts == {"hostile_rewards:length": 8.0, "hostile_rewards:sees": 1.0}
    assert result.reward == 18.0


def test_a_user_function_that_returns_none_is_unscorable_and_not_a_failure(scorer: Scorer) -> None:
    results = [score(scorer, prompt("5", "bad"), "none") for _ in range(5)]
    assert [(result.reward, result.status) for result in results] == [(None, "unscorable")] * 5


def test_many_responses_are_scored_at_once_and_each_gets_its_own(scorer: Scorer) -> None:
    async def run() -> list[float | None]:
        tasks = [scorer.score_group(prompt(str(k % 7)), [rollout_of([1])], [rf"\boxed{{{k}}}"]) for k in range(300)]
        return [result.reward_parts["math"] for (result,) in await asyncio.gather(*tasks)]

    assert asyncio.run(run()) == [float(k % 7 == k) for k in range(300)]


def test_a_batch_gives_score_answer_and_status_in_order(scorer: Scorer) -> None:
    graded = scorer.graded_batch(scorer.submit_batch([r"\boxed{5}", "no", r"\boxed{6}"], ["5", "5", ""]))
    assert [(g.extracted, g.status) for g in graded] == [("5", "ok"), ("", "no_answer"), ("", "bad_gold")]


def test_gold_answers_that_cannot_be_graded_are_named(scorer: Scorer) -> None:
    rows = [("a", "5"), ("b", ""), ("c", r"\frac{1}{"), ("d", r"\text{east}"), ("e", "@@ ##")]
    prompts = [Prompt(name, 0, np.zeros(1, np.int32), (), gold, "math") for name, gold in rows]
    prompts.append(Prompt("f", 0, np.zeros(1, np.int32), (), "a lot", "gsm8k"))
    bad = scorer.check_gold(prompts)
    assert [row.row for row in bad] == ["b", "c", "e", "f"]
    assert bad[-1].reason == "gsm8k: gold answer 'a lot' is not a number"


def test_a_response_carries_how_the_call_of_each_part_ended_and_why_one_failed(scorer: Scorer) -> None:
    fine = score(scorer, prompt("5"), "I think it is 5.")
    assert fine.part_status == {"math": "no_answer", "format": "ok", "length": "ok"}
    assert fine.errors == {}
    failed, hung = score(scorer, prompt("5", "bad"), "raise"), score(scorer, prompt("5", "bad"), "sleep")
    name = "hostile_rewards:by_response"
    assert (failed.part_status, hung.part_status) == ({name: "failed"}, {name: "timeout"})
    assert failed.errors[name].endswith(": KeyError: 'a key'")
    assert hung.errors.keys() == {name}


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("ours", "wieght: there is no such key. Did you mean weight?"),
        ("of_trl", "wieght: no key, and TRL's functions get no options. Remove it."),
    ],
)
def test_a_key_that_is_spelled_wrongly_is_no_option_that_a_function_ignores(
    tmp_path: Path, function: str, problem: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def ours(response, **_): return 1.0\ndef of_trl(completions, **_): return [1.0]\n")
    with pytest.raises(ValueError, match=re.escape(problem)):
        load_user_function(RewardPart(name=f"{file}:{function}", options={"wieght": 2}).model_dump())
