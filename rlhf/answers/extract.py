"""Finds the answer in a response. Each step searches one place, such as a box; steps run in the configured order.

Text is searched, never parsed as mathematics. Every search is linear in the length of the response: a megabyte of
brackets must not cost more than a megabyte of prose.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence

from rlhf.answers.clean import option_letter
from rlhf.answers.last_number import MEASURE, WORD, Span, last_number, only_number, unit_at

TAIL_CHARACTERS = 20_000  # all steps except `box` search only this many characters at the end
LAST_LINE = 400  # characters, at most
MAX_CONNECTOR = 80  # characters between two boxes that can be one answer
CLAUSE_CHARACTERS = 2_000  # of an answer after "the answer is", at most

BOX = re.compile(  # its content: {...}, one token as in \boxed 5, or a fraction or root without braces around it
    r"\\(?:boxed|fbox|framebox)\s*(\{|[^\s{}$\\,;]+|\\(?:[dt]?frac|sqrt)(?![a-zA-Z])(?:(?!\\f?box)[^$\n])*)?"
)
GROUPED_NUMBER = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
LABEL = r"[A-Za-z](?:_\{?\w{1,8}\}?|')?\s*(?:=|\\in|:)"
CONNECTOR = re.compile(
    rf"(?:[\s,;&$.~]|\\[()\[\],;!:\s\\]|\\q?quad|\\text\s*\{{\s*,?\s*(?:and|or)\s*\}}"
    rf"|\b(?:and|or|also|either|maybe|perhaps|possibly|alternatively)\b|{LABEL})*"
)

PLACEHOLDER = re.compile(
    r"(?:\s|~|\.|_|\\[,;:! ]|\\[lc]?dots|\\q?quad|\\text\w*\s*\{|\}|\b(?:your|the|final|answer|ans|here)\b)*",
    re.IGNORECASE,
)
INSTRUCTION = re.compile(
    r"(?:(?P<quote>['\"“‘`])[^'\"“‘`\n]*)?\b(?P<whose>your)?\s?(?:\w+\s)?(?:answer|result|solution)\s(?:[a-z]+\s){0,3}"
    r"(?:in|within|inside|into|using|as)[\s:,'\"`$(]*$",
    re.IGNORECASE,
)
EXAMPLE = re.compile(r"\b(?:for example|for instance|such as|e\.g\.),?[\s:'\"`$(]*$", re.IGNORECASE)
ASKING = re.compile(r"\b(?:example|e\.g|such as|like|within|inside|write|put)\b|例如|比如", re.IGNORECASE)
MIN_QUOTED = 30  # characters that a quotation of the prompt has at least
QUOTE_ENDS = re.compile(r"[\s$).,]*['\"”’`]")

MATH_SPAN = re.compile(
    r"\$\$(.{1,3000}?)\$\$|\\\[(.{1,3000}?)\\\]|\\\((.{1,2000}?)\\\)|(?<!\\)\$(?!\d[^$\n]{0,1000}\s\$)"
    r"((?:\\\$|[^$\n]){1,1000})(?<!\\)\$(?!\d)"  # not between two amounts of money: $5 + 2 = $7
    r"|(\\begin\{(?:align|equation|gather)\*?\}.{1,3000}?\\end\{(?:align|equation|gather)\*?\})",
    re.DOTALL,
)
ANSWER_WORDS = (
    r"\b(?:answer|ans|option|choice|réponse|respuesta|antwort|lösung|risposta|resposta|antwoord|svar|odpowiedź|cevap|"
    r"jawa[bp]an(?:nya)?|đáp án|ответ|opción|opção|opzione|vastaus|răspuns|válasz|odpověď|відповідь|απάντηση)s?\b"
    "|答案|答え|回答|解答|正解|答|选项|選項|정답|답|الجواب|الإجابة|جواب|پاسخ|उत्तर|जवाब|উত্তর|คำตอบ|תשובה"
)
STARTS = "ans opt opc opç opz cho pic sel rép res ris ant lös sva odp cev jaw đáp отв vas răs vál від απά"
ANSWER_START = re.compile(  # a fast search for the beginnings of these words; a set of literals needs no backtracking
    "|".join([*STARTS.split(), *STARTS.title().split(), *STARTS.upper().split(), *"答回解正정답اजउউ选選คתپج"])
)
ANSWER_IS = re.compile(
    rf"(?:{ANSWER_WORDS})(?:\s+(?:to|for|of)\s[^.:\n]{{0,80}}?|\s+(?:finale?|corr?e[ct]t?[aeo]?|đúng|الصحيحة))?\W{{0,4}}?\s*"
    r"(?:\b(?:is|are|(?:would|should|must|will) be|comes out to|est|es|ist|é|è|jest|adalah|är|là|هي)\b"
    r"|[:：=]|\s[-–—]\s|是|为|為|は|은|는)"
    r"[\s:：*]*|(?:\b(?:option|choice|choose|pick|select)\s+|(?<!不)[选選][择擇択]?[:：]?\s*)"
    r"(?=\(?[A-J]\)?(?:[\s.,;:!。，项項]|$))",
    re.IGNORECASE,
)
NOT_CHOSEN = re.compile(r"(?:\bnot|n[’']t|\b(?:never|cannot|may|might|could|can|would))\s+$", re.IGNORECASE)  # choose A
SENTENCE_END = re.compile(r"\n|[.!?](?=[\s*\"')\]]|$)|。")
HEDGE = r"(?:or|maybe|perhaps|possibly)\b"
SUBORDINATE = re.compile(
    r"[,;]?\s+(?:because|since|as|when|where|which|so|for|if|after|by)\b.*"
    rf"|\s+\((?!{HEDGE})[a-z]{{2,}}\s[^()]*\)\s*$",
    re.DOTALL,
)
REMARK = re.compile(  # 18 (9 eggs times $2), at the end of the text
    rf"(?<=[\w%*])(?<!or)(?<!and)\s+\((?!{HEDGE})(?=[^()\n]*[A-Za-z+=])[^()\n]{{4,200}}\)(?=[\s.!*]{{0,20}}\Z)"
)
BOLD_ANSWER = re.compile(  # in the last line, with a number, and no heading such as **Step 2:**
    r"\*\*(?![\s*]|Step\b)[^*\n:=]{0,60}\d[^*\n:=]{0,60}\*\*(?!\s*[=:])(?=(?:(?!\*\*)[^\n])*\s*\Z)"
)
SEPARATOR = re.compile(r"\s*,?\s*(?:and|or)?\s*")
AND_OR = re.compile(r"\s*,?\s*(?:and|or)\s+(?:\w+\s+)?")
LEAD_IN = re.compile(
    r"\A(?:(?:therefore|thus|so|hence|then|finally|approximately|about|roughly|exactly|equal to|simply|just|given by|"
    r"option|choice|the (?:final )?(?:value|number|answer|result) is)\b[\s,:]*)+",
    re.IGNORECASE,
)
IS_CORRECT = re.compile(
    r"\s+is (?:the )?(?:correct|right|best)(?: (?:answer|option|choice|one))?$|\s*(?:です|だ|입니다|이다|项|項)$"
)
ROUNDED = re.compile(r"\s*\(?\s*(?:≈|~|(?:or )?(?:about|approximately|approx\.))\s*")  # $4\\sqrt{3}$ ≈ 6.93
COPULA = re.compile(r"\b(?:is|are|equals|equal to|be|becomes)\b\s*:?")
EMPHASIS = re.compile(  # bold, italics and code on one line; 9**9 is a power, __import__ is code
    r"(?<![\w)\\*_`])(?P<mark>\*{1,3}|__?|`)(?=[^\s*_`])([^\n]{1,300}?)(?<=\S)(?P=mark)(?![\w(*])"
)
BLOCK_MARKS = re.compile(  # fences, bullets, quotes, tags
    r"^[ \t]*```\w*[ \t]*$\n?|^[-*+>](?:[ \t]+(?=[^\s\d])| (?=\S+$))|</?(?:b|i|em|strong|code|p|u)>", re.MULTILINE
)
ANSWER_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
HASH_ANSWER = re.compile(
    r"[ \t]*(?:[-+\u2013\u2212\uff0d]?\\?[$€£¥₹]?[ \t]*[-+\u2013\u2212\uff0d]?(?:\d|\.\d|[¼-¾⅐-⅞])|\\?\$?-?\\d?frac)"
)
LIST_ITEM = re.compile(r"[ \t]*\d+[.)][ \t]+[A-Za-z]")  # a heading such as "#### 2. Compute the total"
CANNOT = r"(?:cannot|can't|could not|couldn't|unable to|not able to|impossible to)"
REFUSAL = re.compile(  # of the writer; a person in the problem may be unable to do something too
    rf"\b(?:(?:I|we)(?: am| are)? {CANNOT}|{CANNOT} (?:be )?(?:determin|solv|answer|calculat|comput|say|tell)|"
    r"(?:don't|do not) know|not sure|no idea|not enough information)",
    re.IGNORECASE,
)
CODE = re.compile(r"__\w+__|\b(?:exec|eval|open|compile|getattr|system|sympify)\(|\blambda\b[^.]*:")
MATH_WORDS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "and", "or", "frac", "mod"]
)
NOT_AN_ANSWER = frozenset(["none", "null", "nan", "n/a", "undefined", "?", "...", "unknown", "answer"])


def extract(text: str, steps: Sequence[str], prompt: str = "") -> str | None:
    """The answer that a response states in its text after the thoughts (`thoughts.answer_of`), or None.

    Args:
        steps: some of box, answer_tag, hash, answer_is, math_span, last_number. The first step with a match wins; of
            the last two steps, the match that is later in the text wins.
        prompt: the question; a box in an instruction that is quoted from it is not the answer.
    """
    text, plain = _without_quoted_boxes(text, prompt), None
    for step in steps:
        if step != "box" and plain is None:
            plain = without_markdown(text)
        stated = STEPS[step](text if step == "box" else plain or "")
        if step == "math_span" and stated is not None and "last_number" in steps:
            stated = _later_of_span_and_number(plain or "")
        if stated is not None:
            answer = stated.strip()
            return answer if answer and answer.strip("$. ").lower() not in NOT_AN_ANSWER else None
    return None


def without_markdown(text: str) -> str:
    """The text, or its end, without marks of bold, italics, code, quotes, lists, and a remark after the answer."""
    text = REMARK.sub("", text[-TAIL_CHARACTERS:])
    if bold := BOLD_ANSWER.search(text, max(0, len(text) - LAST_LINE)):
        unit = MEASURE.match(text, bold.end())
        text = text[: unit.end() if unit and unit_at(text, bold.end()) else bold.end()]
    text = BLOCK_MARKS.sub("", text)
    return EMPHASIS.sub(r"\2", EMPHASIS.sub(r"\2", text))  # twice, for code in bold


def gold_answer(gold: str, answer_format: str = "auto") -> str | None:
    r"""The answer in a gold column, for training and grading alike: "1, 2" for `\boxed{1} and \boxed{2}`.

    Args:
        answer_format: gsm8k (the text after `####` on the last line, without thousands separators), boxed (the last
            box, with the boxes before it that only connectors separate), text or none (the whole column), or auto: the
            first of these that matches.

    None without such a marker, or with a last box that is not closed.
    """
    if answer_format in ("text", "none"):
        return gold.strip()
    text, hashed = gold.strip(), gold.rpartition("####")[2].strip()
    follows_hash = answer_format != "boxed" and "####" in gold and "\n" not in hashed
    if answer_format == "gsm8k" and not follows_hash:
        return None
    if follows_hash:
        text = hashed.replace(",", "") if GROUPED_NUMBER.fullmatch(hashed) else hashed
    if answer_format != "boxed" and not BOX.search(text):
        return text
    spans = boxes(text)
    return _last_joined(text, spans) if spans and not BOX.search(text, spans[-1].end) else None


def alternatives(gold: str) -> list[str]:
    """The acceptable answers in a gold answer: the items of a JSON list of texts, or the one answer."""
    if gold.lstrip().startswith('["'):
        with contextlib.suppress(ValueError):
            items = json.loads(gold)
            if isinstance(items, list) and items and all(isinstance(item, str) for item in items):
                return items
    return [gold]


def boxes(text: str) -> list[Span]:
    """Every outermost box with balanced braces, in order."""
    closing: dict[int, int] = {}
    stack: list[int] = []
    for brace in BRACES.finditer(text) if "box" in text else ():
        if brace[0] == "{":
            stack.append(brace.start())
        elif brace[0] == "}" and stack:
            closing[stack.pop()] = brace.start()
    spans: list[Span] = []
    for box in BOX.finditer(text):
        if box[1] is None or (spans and box.start() < spans[-1].end):
            continue
        if box[1] == "{":
            end = closing.get(box.start(1))
            if end is not None:
                spans.append(Span(box.start(), end + 1, text[box.start(1) + 1 : end]))
        else:
            spans.append(Span(box.start(), box.end(), box[1].rstrip(".")))
    return spans


def _last_run(spans: list[Span], belong: Callable[[Span, Span], bool]) -> list[Span]:
    """The last span and those before it, as long as each belongs to the one after it."""
    first = len(spans) - 1
    while first > 0 and belong(spans[first - 1], spans[first]):
        first -= 1
    return spans[max(first, 0) :]


def _last_joined(text: str, spans: list[Span]) -> str | None:
    """The last span, and the spans before it that only connectors separate: parts of one answer, or alternatives."""

    def connected(before: Span, after: Span) -> bool:
        return after.start - before.end <= MAX_CONNECTOR and bool(CONNECTOR.fullmatch(text, before.end, after.start))

    contents = [span.content.strip() for span in _last_run(spans, connected)]
    return ", ".join(dict.fromkeys(contents)) if spans else None


def _without_quoted_boxes(text: str, prompt: str) -> str:
    """The text without boxes that hold a placeholder or only quote the instruction."""
    kept, position = [], 0
    for box in boxes(text):
        if PLACEHOLDER.fullmatch(box.content) or _is_instruction(text, box) or _is_quoted(text, box, prompt):
            kept.append(text[position : box.start])
            position = box.end
    return "".join([*kept, text[position:]])


def _is_instruction(text: str, box: Span) -> bool:
    """Whether a box is an example, or part of a quoted instruction: 'put your final answer in \\boxed{42}'."""
    before = text[max(0, box.start - MAX_CONNECTOR) : box.start]
    if EXAMPLE.search(before):
        return True
    asked = INSTRUCTION.search(before)
    return asked is not None and bool(asked["whose"] or (asked["quote"] and QUOTE_ENDS.match(text, box.end)))


def _is_quoted(text: str, box: Span, prompt: str) -> bool:
    """Whether a box stands in a span of an instruction that the prompt has too: for example \\boxed{12}."""
    starts = range(max(0, box.end - MIN_QUOTED), box.start + 1) if text[box.start : box.end] in prompt else ()
    spans = (text[start : max(box.end, start + MIN_QUOTED)] for start in starts)
    return any(len(span) >= MIN_QUOTED and span in prompt and ASKING.search(span) for span in spans)


def _answer_tag(text: str) -> str | None:
    spans = [Span(tag.start(), tag.end(), tag[1]) for tag in ANSWER_TAG.finditer(text)]
    stated = _last_joined(text, spans)
    return (_answer_is(stated) or stated) if stated else stated


def _hash(text: str) -> str | None:
    line = text.rpartition("####")[2].lstrip(" \t").partition("\n")[0] if "####" in text else ""
    return line.strip() if HASH_ANSWER.match(line) and not LIST_ITEM.match(line) else None


def _answer_is(text: str) -> str | None:
    for start in reversed(list(ANSWER_START.finditer(text))):
        match = ANSWER_IS.match(text, start.start())
        if match and not NOT_CHOSEN.search(text[max(0, start.start() - 12) : start.start()]):
            return _clause(text[match.end() : match.end() + CLAUSE_CHARACTERS])
    return None


def _clause(text: str) -> str | None:
    """The answer at the beginning of the text after "the answer is"."""
    text = text.lstrip(" \t\r\n*:")
    if (spans := _leading_spans(text)) is not None:
        return spans
    return _sentence(SENTENCE_END.split(text, maxsplit=1)[0])


def _sentence(sentence: str) -> str | None:
    sentence = LEAD_IN.sub("", sentence.strip(" \t*\"'")).rstrip(".!* ")
    sentence = IS_CORRECT.sub("", sentence)
    main = SUBORDINATE.sub("", sentence)
    if len(main.split()) <= 2 and (option_letter(main) or any(map(str.isdigit, main))):
        sentence = main
    copulas = list(COPULA.finditer(sentence))
    if copulas and len(sentence.split()) > 3:
        return _clause(sentence[copulas[-1].end() :])
    sentence = SUBORDINATE.sub("", sentence).strip(" \t*\"'").rstrip(".,;:!?* ").lstrip(",;:!? ")
    if sentence.count("$") >= 2 or "\\(" in sentence:
        spans = _math_spans(sentence)
        if spans and WORD.search(sentence[: spans[0].start]):
            return _last_joined(sentence, spans)
    return only_number(sentence) or sentence or None


def _leading_spans(text: str) -> str | None:
    """The math spans that begin the text, with connectors between them and a percent sign or unit after them."""
    spans: list[Span] = []
    position = 0
    while (match := MATH_SPAN.match(text, position)) is not None:
        content = _content(match)
        if not spans and _is_prose(content):
            return None
        spans.append(Span(match.start(), match.end(), content))
        position = SEPARATOR.match(text, match.end()).end()  # type: ignore[union-attr]  # it may be empty
    if not spans:
        return None
    return ", ".join(span.content.strip() for span in spans) + unit_at(text, spans[-1].end)


def _is_prose(content: str) -> bool:
    """Whether a math span is words: `$5 because $` is an amount of money and a word, not mathematics."""
    bare = re.sub(r"\\[a-zA-Z]+\s*\{[^{}]*\}", "", content)
    return re.search(r"\s[a-z]{2,}\s", bare) is not None and not re.search(r"\s(?:and|or)\s", bare)


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _math_spans(text: str) -> list[Span]:
    return [Span(m.start(), m.end(), _content(m)) for m in MATH_SPAN.finditer(text)]


def _last_span(text: str) -> Span | None:
    def belong(before: Span, after: Span) -> bool:
        """Values of the same variable or of no variable: x = 2 and x = 3; not m = 2 and n = 3."""
        same = before.content.rpartition("=")[0].strip() == after.content.rpartition("=")[0].strip()
        return same and AND_OR.fullmatch(text, before.end, after.start) is not None

    spans = [span for span in _math_spans(text) if span.content.strip() and not _is_prose(span.content)]
    run = _last_run(spans, belong)
    return Span(run[0].start, run[-1].end, ", ".join(span.content for span in run)) if run else None


def _math_span(text: str) -> str | None:
    span = _last_span(text)
    return None if span is None or _refuses(text) else span.content


def _last_number(text: str) -> str | None:
    if (whole := _whole(text)) is not None:
        return whole
    number = last_number(text)
    return None if number is None or _refuses(text) else number.content


def _later_of_span_and_number(text: str) -> str | None:
    span, number = _last_span(text), last_number(text)
    if span and (number is None or number.start < span.end or ROUNDED.fullmatch(text[span.end : number.start])):
        return span.content + unit_at(text, span.end)
    return number.content if number is not None else None


def _whole(text: str) -> str | None:
    """The response itself if it is only an answer: one short line of mathematics, or a few words without a digit."""
    line = LEAD_IN.sub("", text.strip()).strip(" \t*")
    if not line or len(line) > 200 or "\n" in line or ("," in line and line.count("=") > 1):
        return None
    words = [word for word in WORD.findall(line) if word[0] != "\\" and word not in MATH_WORDS]
    is_short = len(line.split()) <= 8 and not any(map(str.isdigit, line))
    return line.rstrip(".!") if is_short or not words else None


def _refuses(text: str) -> bool:
    """Whether the end of the text refuses to answer or is program code; its numbers are then no answer."""
    return REFUSAL.search(text[-200:]) is not None or CODE.search(text[-1000:]) is not None


STEPS: dict[str, Callable[[str], str | None]] = {
    "box": lambda text: _last_joined(text, boxes(text)),
    "answer_tag": _answer_tag,
    "hash": _hash,
    "answer_is": _answer_is,
    "math_span": _math_span,
    "last_number": _last_number,
}
