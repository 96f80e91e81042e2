"""The short rewards and the shaping functions, with hand-computed numbers."""

from __future__ import annotations

import pytest

from rlhf.config.reward import (
    ExactOptions,
    F1Options,
    FormatOptions,
    LengthOptions,
    MultipleChoiceOptions,
    RepetitionOptions,
)
from rlhf.rewards.shaping import length_reward, repetition_reward
from rlhf.rewards.simple import exact_reward, f1_reward, format_reward, gsm8k_reward, multiple_choice_reward


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (17, -1.0), (1000, -1.0)],
)
def test_the_overlong_penalty_grows_over_the_buffer_before_the_bound(length: int, penalty: float) -> None:
    assert length_reward(length, LengthOptions(max_tokens=16, buffer_tokens=4)) == penalty


def test_without_a_buffer_the_overlong_penalty_is_a_step() -> None:
    assert [length_reward(n, LengthOptions(max_tokens=16)) for n in (16, 17)] == [0.0, -1.0]


@pytest.mark.parametrize(("length", "penalty"), [(10, 0.0), (9, -0.25), (7, -0.75), (6, -1.0), (0, -1.0)])
def test_the_short_penalty_is_its_mirror_image(length: int, penalty: float) -> None:
    assert length_reward(length, LengthOptions(min_tokens=10, buffer_tokens=4)) == penalty


def test_the_length_reward_takes_the_worse_of_both_bounds() -> None:
    options = LengthOptions(min_tokens=10, max_tokens=20, buffer_tokens=5)
    assert [length_reward(n, options) for n in (5, 10, 15, 18, 25)] == [-1.0, 0.0, 0.0, -0.6, -1.0]


def test_the_repetition_reward_counts_ngrams_that_occurred_before() -> None:
    assert repetition_reward("a b a b a b", RepetitionOptions(ngram=2, free_fraction=0)) == pytest.approx(-3 / 5)
    assert repetition_reward("a b c d", RepetitionOptions(ngram=2, free_fraction=0)) == 0.0
    assert repetition_reward("a b", RepetitionOptions(ngram=3, free_fraction=0)) == 0.0


def test_the_repetition_reward_is_free_up_to_its_share_and_then_linear() -> None:
    options = RepetitionOptions(ngram=1, free_fraction=0.5)
    assert repetition_reward("a b a b", options) == 0.0
    assert repetition_reward("a a a a", options) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("response", "value", "status"),
    [
        ("9 * 2 = 18\n#### 18", 1.0, "ok"),
        ("#### $1,018.00", 0.0, "ok"),
        ("#### 18.0", 1.0, "ok"),
        ("#### 17\n#### 18", 1.0, "ok"),
        ("#### -18", 0.0, "ok"),
        ("The answer is 18.", 0.0, "no_answer"),
    ],
)
def test_gsm8k_reads_the_number_after_the_last_hashes(response: str, value: float, status: str) -> None:
    grade = gsm8k_reward(response, "She sells 16 - 7 = 9, then 9 * 2.\n#### 18")
    assert (grade.value, grade.status) == (value, status)


@pytest.mark.parametrize(
    ("response", "value", "status"),
    [
        (r"\boxed{C}", 1.0, "ok"),
        (r"\boxed{\text{(C)}}", 1.0, "ok"),
        (r"\boxed{\textbf{(C) } 42}", 1.0, "ok"),
        ("<answer>c</answer>", 1.0, "ok"),
        ("The answer is C.", 1.0, "ok"),
        ("The answer is (C) because it fits.", 1.0, "ok"),
        ("C", 1.0, "ok"),
        (r"\boxed{D}", 0.0, "ok"),
        (r"\boxed{Z}", 0.0, "no_answer"),
        (r"\boxed{A, B, C}", 0.0, "no_answer"),
        ("Could be A, B or C", 0.0, "no_answer"),
    ],
)
def test_multiple_choice_reads_the_letter(response: str, value: float, status: str) -> None:
    grade = multiple_choice_reward(response, "C", MultipleChoiceOptions())
    assert (grade.value, grade.status) == (value, status)


def test_exact_match_ignores_spaces_and_unless_told_otherwise_case() -> None:
    assert exact_reward("  New   York ", "new york", ExactOptions()).value == 1.0
    assert exact_reward("New York", "new york", ExactOptions(ignore_case=False)).value == 0.0
    assert exact_reward("<answer>New York</answer>", "New York", ExactOptions()).value == 1.0
    assert exact_reward("It is New York", "New York", ExactOptions()).value == 0.0
    assert exact_reward("x", "", ExactOptions()).status == "bad_gold"


def test_f1_is_the_overlap_of_words_without_articles_and_punctuation() -> None:
    # words: {cat, sat} and {cat, sat, down}: precision 1, recall 2/3, F1 = 2 * 2 / 5
    assert f1_reward("The cat sat.", "a cat sat down", F1Options()).value == pytest.approx(0.8)
    assert f1_reward("The cat sat.", "a cat sat down", F1Options(threshold=0.9)).value == 0.0
    assert f1_reward("...", "a cat", F1Options()).status == "no_answer"


@pytest.mark.parametrize(
    ("style", "response", "value"),
    [
        ("think", "<think>hm</think> yes", 1.0),
        ("think", "<think></think> yes", 0.0),
        ("think", "<think>hm</think>", 0.0),
        ("think", "hm</think> yes", 0.0),
        ("think", "<think>a</think><think>b</think> yes", 0.0),
        ("think", "so <think>hm</think> yes", 0.0),
        ("think_answer", "<think>hm</think>\n<answer>5</answer>", 1.0),
        ("think_answer", "<think>hm</think> well <answer>5</answer>", 0.0),
        ("think_answer", "<think>hm</think> <answer>5</answer> <answer>6</answer>", 0.0),
        ("think", "<think>I write `</think>` later</think> yes", 1.0),
        ("think", "<thinking>hm</thinking> yes", 0.0),
        ("think", "<|channel>thought\nhm<channel|>yes", 1.0),
        ("think", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes", 1.0),
        ("boxed", r"so \boxed{5}", 1.0),
        ("boxed", r"<|START_THINKING|>\boxed{5}", 0.0),
        ("boxed", r"so \boxed{5} and \boxed{6}", 0.0),
        ("boxed", "so 5", 0.0),
    ],
)
def test_the_format_reward_depends_on_the_form_alone(style: str, response: str, value: float) -> None:
    assert format_reward(response, FormatOptions(style=style)) == value  # type: ignore[arg-type]


def test_a_pattern_must_match_the_whole_response() -> None:
    options = FormatOptions(pattern=r"Answer: \d+")
    assert [format_reward(text, options) for text in ("Answer: 5", "Answer: 5.")] == [1.0, 0.0]
