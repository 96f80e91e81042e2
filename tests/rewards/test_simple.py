"""The short rewards and the shaping functions, with hand-computed numbers."""

from __future__ import annotations

import re
import string

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


@pytest.mark.parametrize(
    ("text", "characters"),
    [
        ("!" * 3000, 3000),
        ("ha" * 500, 1000),
        ("哈" * 100, 100),
        ("！" * 200, 200),
        ("😀" * 200, 200),
        ("ซ้ำ" * 50, 150),
        ("\n" * 200, 200),
    ],
)
def test_repetition_without_spaces_is_repetition_of_characters(text: str, characters: int) -> None:
    period = len(set(text))
    expected = 1 - period / (characters - 7)
    assert repetition_reward(text, RepetitionOptions(free_fraction=0)) == pytest.approx(-expected)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("word " * 3 + "!" * 90, "word word word w"),
        ("a b c " * 9 + "https://example.com/" + "".join(map(str, range(60))), "a b c " * 9 + "x"),
        ("x = 1\n" * 9 + "| --- | " + "-" * 80, "x = 1 " * 9 + "| --- | -"),
    ],
)
def test_a_long_word_that_does_not_repeat_itself_and_a_short_line_of_one_mark_are_one_word(
    text: str, same: str
) -> None:
    options = RepetitionOptions(ngram=2, free_fraction=0)
    assert repetition_reward(text, options) == repetition_reward(same, options)


def test_chinese_and_japanese_without_repetition_cost_nothing() -> None:
    text = "今天天气很好，我和朋友一起去公园散步，看到了很多花和树。きょうは学校で数学を勉強しました。"
    assert repetition_reward(text, RepetitionOptions()) == 0.0
    assert repetition_reward(text * 9, RepetitionOptions()) < -0.8
    assert repetition_reward(f"The sign says {text}" * 9, RepetitionOptions()) < -0.8


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
    ("gold", "stated", "value"),
    [
        ("5", "5 million", 0.0),
        ("5000000", "5 million", 1.0),
        ("5", "5 lakh", 0.0),
        ("-5", "−5", 1.0),
        ("5", "−5", 0.0),
        ("-5", "–5", 1.0),
        ("-5", "-$5", 1.0),
        ("1234.5", "$1,234.50", 1.0),
        ("5", "5%", 1.0),
        ("1", "1/2", 0.0),
        ("0.5", "1/2", 1.0),
        ("0.5", "½", 1.0),
        ("12", "12:30", 0.0),
        ("5", "5 apples", 1.0),
        ("5", "5 dollars per day.", 1.0),
        ("5", "5e3", 0.0),
        ("5000", "5e3", 1.0),
        ("1", "1 000", 0.0),
        ("1000", "1 000", 1.0),
        ("5", "**5**", 1.0),
        ("5", "５", 1.0),
        ("5", "$5$", 1.0),
        ("5", "5. So she has 6 left", 1.0),
        ("5", "5 or 6", 0.0),
        ("5", "5-6", 0.0),
        ("5", "5 dozen", 0.0),
        ("5", "5k", 0.0),
        ("5", "5^2", 0.0),
        ("5", "5 1/2", 0.0),
        ("5", "5 apples and 3 pears", 0.0),
        ("15", "5*3", 0.0),
        ("8", "5 + 3 = 8", 1.0),
        ("5", "5\n#### Check", 1.0),
        ("5", "6\n#### 5 eggs", 1.0),
    ],
)
def test_gsm8k_takes_all_that_follows_the_hashes_for_the_number(gold: str, stated: str, value: float) -> None:
    assert gsm8k_reward(f"so\n#### {stated}", f"#### {gold}").value == value


def test_gsm8k_refuses_a_gold_answer_that_is_no_number() -> None:
    assert gsm8k_reward("#### 5", "a lot").status == "bad_gold"
    assert gsm8k_reward("#### -5", "#### −5").value == 1.0
    assert gsm8k_reward("#### $1,018", "1018").extracted == "1018"


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


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\text{New York}", "New York"),
        (r"$\mathrm{New\ York}$", "New York"),
        (r"\(\textbf{\text{New}}~\textit{York}\)", "New York"),
        (r"\boxed{\text{New York}}", "New York"),
        (r"\operatorname{New York}", r"\text{New York}"),
        (r"R\&D at 10\%", "R&D at 10%"),
        ("５ ＵＳＡ", "5 USA"),
        ("−5", "-5"),
        ("5½", "5 1/2"),
        ("10²", "10^{2}"),
        ("٣٫٥", "3.5"),
        ("你好，世界？", "你好,世界?"),
        ("“don’t”", '"don\'t"'),
        ("「はい」", '"はい"'),
        ("1990–1995", "1990-1995"),
        ("cafe\u0301", "café"),
        ("New\u00a0York\u200b", "New York"),
    ],
)
def test_exact_match_and_f1_compare_texts_in_one_spelling(answer: str, gold: str) -> None:
    assert exact_reward(answer, gold, ExactOptions()).value == 1.0
    assert f1_reward(answer, gold, F1Options()).value == 1.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("10²", "102"), ("5½", "51/2"), ("101₂", "1012"), ("résumé", "resume"), ("2^{10}", "210"), (r"\frac{1}{2}", "12")],
)
def test_one_spelling_makes_no_two_answers_equal(answer: str, gold: str) -> None:
    assert exact_reward(answer, gold, ExactOptions()).value == 0.0
    assert f1_reward(answer, gold, F1Options()).value == 0.0


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("-5", "5", 0.0),
        ("-$5", "5", 0.0),
        ("3.14", "314", 0.0),
        (".5", "5", 0.0),
        ("1/2", "12", 0.0),
        ("1,2", "12", 0.0),
        ("12:30", "1230", 0.0),
        ("3-0", "30", 0.0),
        ("1e-5", "1e5", 0.0),
        ("2020-01-02", "20200102", 0.0),
        ("5.", "5", 1.0),
        ("(5)", "5", 1.0),
        ("1,000", "1000", 1.0),
        ("$5", "5%", 1.0),
        ("F-16", "F16", 1.0),
        ("北京。", "北京", 1.0),
    ],
)
def test_f1_keeps_sign_point_and_fraction_of_numbers_alone(answer: str, gold: str, value: float) -> None:
    assert f1_reward(answer, gold, F1Options()).value == value


@pytest.mark.parametrize(
    "text", ["The U.S.A., a well-known (old) country!", 'it\'s _an_ "a-b" + c_d; the end.', "5 km: #1 & 2"]
)
def test_the_words_of_plain_text_are_those_of_squad(text: str) -> None:
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    official = re.sub(r"\b(a|an|the)\b", " ", bare).split()  # SQuAD's evaluate-v2.0.py
    assert f1_reward(text, " ".join(official), F1Options()).value == 1.0


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
