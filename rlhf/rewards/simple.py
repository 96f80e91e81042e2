"""The short rewards: GSM8K, multiple choice, exact match, F1, and the form of a response.

All but the last grade the answer of a response, without its thoughts (`answers/thoughts.py`).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

from rlhf.answers.clean import clean, option_letter
from rlhf.answers.extract import HASH_ANSWER, boxes, extract, gold_answer, without_markdown
from rlhf.answers.node import exact_number
from rlhf.answers.plain import plain_text
from rlhf.answers.thoughts import OF_MODELS, Marks, after_one_thought, answer_of
from rlhf.config.reward import ExactOptions, F1Options, FormatOptions, MathOptions, MultipleChoiceOptions
from rlhf.rewards.grade import BAD_GOLD, NO_ANSWER, Grade
from rlhf.rewards.math import grade_answer

ARTICLES = re.compile(r"\b(a|an|the)\b")  # dropped before words are compared (SQuAD, arXiv:1606.05250, sec. 6.1)
ONE_ANSWER = re.compile(r"\s*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
SENTENCE_END = re.compile(r"\.\s|。")
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
MARK = re.compile(  # a mark between two digits, a sign, a point before a digit; any other mark
    r"(?<=\d)(?:[^\w\s]|_)(?=\d)|(?:(?<![\w.])|(?<=\de))-(?=[$€£¥₹]?\.?\d)|(?<!\w)\.(?=\d)|(?P<other>[^\w\s]|_)"
)


def gsm8k_reward(response: str, gold: str) -> Grade:
    """1 if what follows the last `####` is the gold number, as `math` compares (GSM8K, arXiv:2110.14168)."""
    wanted = gold_answer(gold) or ""
    if not HASH_ANSWER.match(wanted):
        return Grade(None, BAD_GOLD, detail=f"gold answer {gold[:80]!r} is not a number")
    after_hashes = reversed(without_markdown(response).split("####")[1:])
    sentences = (SENTENCE_END.split(text, maxsplit=1)[0] for text in after_hashes)
    stated = next(filter(None, (extract(f"####{sentence}", ("hash",)) for sentence in sentences)), None)
    if stated is None:
        return Grade(0.0, NO_ANSWER)
    if exact_number(stated) is not None:
        stated = stated.replace("$", "").replace(",", "")
    return grade_answer(stated, wanted, MathOptions())


def multiple_choice_reward(response: str, gold: str, options: MultipleChoiceOptions) -> Grade:
    """1 if the response chooses the gold letter: boxed, in answer tags, after "the answer is", or as its whole text."""
    wanted = _letter(gold_answer(gold) or "", options.letters)
    if wanted is None:
        return Grade(None, BAD_GOLD, detail=f"gold answer {gold[:80]!r} is none of the letters {options.letters}")
    stated = extract(response, ("box", "answer_tag", "answer_is"))
    text = response.strip() if stated is None else stated
    chosen = None if stated is None and len(text) > 4 else _letter(text, options.letters)
    if chosen is None:
        return Grade(0.0, NO_ANSWER, extracted=stated or "")
    return Grade(float(chosen == wanted), extracted=chosen)


def _letter(text: str, letters: str) -> str | None:
    option = option_letter(clean(text))
    return option[0] if option and option[0] in letters.upper() else None


def exact_reward(response: str, gold: str, options: ExactOptions) -> Grade:
    """1 if the answer (boxed, in answer tags, or the whole response) equals the gold answer up to its spelling."""
    if not gold.strip():
        return Grade(None, BAD_GOLD, detail="gold answer is empty")
    stated = _stated_text(response)
    if not stated:
        return Grade(0.0, NO_ANSWER)
    same = _squeeze(stated, options.ignore_case) == _squeeze(gold, options.ignore_case)
    return Grade(float(same), extracted=stated)


def f1_reward(response: str, gold: str, options: F1Options) -> Grade:
    """F1 of the words of answer and gold, without case, punctuation and articles (SQuAD, arXiv:1606.05250)."""
    wanted = Counter(_words(gold))
    if not wanted:
        return Grade(None, BAD_GOLD, detail=f"gold answer {gold[:80]!r} has no words")
    stated = _stated_text(response)
    given = Counter(_words(stated))
    if not given:
        return Grade(0.0, NO_ANSWER)
    common = (wanted & given).total()
    f1 = 2 * common / (wanted.total() + given.total())
    return Grade(f1 if options.threshold is None else float(f1 >= options.threshold), extracted=stated)


def _stated_text(response: str) -> str:
    stated = extract(response, ("box", "answer_tag"))
    return (stated if stated is not None else response).strip()


def _squeeze(text: str, ignore_case: bool) -> str:
    squeezed = " ".join(plain_text(text).split())
    return squeezed.casefold() if ignore_case else squeezed


def _words(text: str) -> list[str]:
    """The words without case, articles and punctuation; numbers keep their sign, point and fraction."""
    numbers = GROUPED.sub(lambda match: match[0].replace(",", ""), plain_text(text).casefold())
    return ARTICLES.sub(" ", MARK.sub(_kept, numbers)).split()


def _kept(mark: re.Match[str]) -> str:
    other = mark["other"]
    is_dropped = other and (other in string.punctuation or unicodedata.category(other)[0] == "P")
    return "" if is_dropped else mark[0]


def format_reward(
    response: str, options: FormatOptions, marks: Marks = OF_MODELS, *, in_thought: bool = False
) -> float:
    """1 if the whole response has the form, else 0; its answer does not matter.

    Args:
        in_thought: the prompt has opened the thought; a pattern sees it opened by the response, as <think>.
    """
    if options.pattern is not None:
        whole = f"<think>{response}" if in_thought else response
        return float(re.fullmatch(options.pattern, whole, re.DOTALL) is not None)
    if options.style == "boxed":
        return float(len(boxes(answer_of(response, marks, in_thought=in_thought) or "")) == 1)
    rest = after_one_thought(response, marks, in_thought=in_thought)
    return float(rest is not None and (options.style == "think" or ONE_ANSWER.fullmatch(rest) is not None))
