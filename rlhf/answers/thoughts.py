"""Where the thoughts of a response end and its answer begins. The marks of all known models stand here, as data.

A thought ends at the first end mark of the form that opened it. A thought without an end mark is cut off, so the
response has no answer. The answer is the text after the last thought. An end mark without a begin mark ends a thought
too, because a chat template may have opened it, unless the response has had a thought and ends with that mark. Quoted
marks are text: directly between quotes, brackets or backticks; outside thoughts also in a code span, a closed code
block, or a quotation that begins and ends with tags. The same holds for ends of turns and traces of tools.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple


class ThoughtForm(NamedTuple):
    """The marks of one family of models: any of `begins` opens a thought, any of `ends` closes it.

    With `first`, words open a thought only at the beginning of a response, and close only that thought.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    first: bool = False


Marks = tuple[ThoughtForm, ...]


def _tag(*names: str) -> ThoughtForm:
    return ThoughtForm(tuple(f"<{name}>" for name in names), tuple(f"</{name}>" for name in names))


THINK = _tag("think")
LOST = (ThoughtForm(("analysis", "commentary"), ("assistantfinal", "final<|message|>"), first=True),)  # gpt-oss's marks
# Tags hold for every model: a prompt may teach them.
TAGS: Marks = (
    THINK,  # Qwen, DeepSeek, GLM, Nemotron, Hunyuan, MiniMax M2, ...
    _tag("Think", "THINK"),
    _tag("thinking", "Thinking", "THINKING"),
    _tag("thought", "Thought", "THOUGHT", "thoughts"),  # EXAONE Deep, Marco-o1
    _tag("reasoning", "Reasoning", "REASONING", "reason"),  # Reka, LLaVA-CoT, prompts of GRPO recipes
    _tag("scratchpad"),
    _tag("seed:think"),  # Seed-OSS
    _tag("mm:think"),  # MiniMax M3
    _tag("longcat_think"),  # LongCat
    ThoughtForm(("[THINK]",), ("[/THINK]",)),  # Mistral
    ThoughtForm(("◁think▷",), ("◁/think▷",)),  # Kimi-VL
    *LOST,
)
# Control tokens and words that mean a thought for the models that have them, and for any where the model is not known.
OF_MODELS: Marks = (
    ThoughtForm(  # gpt-oss: every channel but the final one
        ("<|channel|>analysis<|message|>", "<|channel|>"),
        (
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>final<|constrain|>json<|message|>",
            "final<|message|>",
        ),
    ),
    ThoughtForm(("<|channel>thought\n", "<|channel>thought", "<|channel>"), ("<channel|>",)),  # Gemma 4
    ThoughtForm(("<|START_THINKING|>",), ("<|END_THINKING|>",)),  # Cohere
    ThoughtForm(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",)),  # Kimi K3
    *(ThoughtForm((f"<ifm|{name}>",), (f"</ifm|{name}>",)) for name in ("think", "think_fast", "think_faster")),  # K2
    ThoughtForm(("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",)),
    ThoughtForm(("<|content_thinking|>",), ("<|content_text|>",)),  # Inkling: where the block of its text begins
    ThoughtForm(
        ("to=self<|message|>",), ("<|eom|><|start|>assistant to=user<|message|>", "to=user<|message|>")
    ),  # Muse
    ThoughtForm(("<|think|>",), ("<|end|><|begin|>assistant<|content|>", "<|content|>")),  # Solar
    ThoughtForm(("<|inner_prefix|>",), ("<|inner_suffix|>",)),  # Apertus
    ThoughtForm(("<|begin_of_thought|>",), ("<|end_of_thought|>",)),  # OpenThinker, Sky-T1
    ThoughtForm(("<|thinking|>",), ("<|/thinking|>", "</|thinking|>")),
    ThoughtForm(  # Granite 3.2
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        first=True,
    ),
    ThoughtForm(("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), first=True),  # Apriel
)
ANY_FORM = ThoughtForm((), ())  # of a thought that the prompt has opened
FRAMES = {  # marks that some models write around their answer
    "<response>": "</response>",
    "<|START_RESPONSE|>": "<|END_RESPONSE|>",
    "<|START_TEXT|>": "<|END_TEXT|>",
    "<|open|>response<|sep|>": "<|close|>response<|sep|>",
    "<|begin_of_solution|>": "<|end_of_solution|>",
}

# Chat templates end a turn with one of these; the text after it does not answer this prompt.
END_OF_TURN = (
    r"<\|(?:im_end|im_start|endoftext|eot_id|eom_id|eot|eom|end_of_text|end|return|call|end_message|END_OF_TURN_TOKEN)\|>|"
    r"</s>|<eos>|<end_of_turn>|<turn\|>|<｜end▁of▁sentence｜>|\[END FINAL RESPONSE\]"
)
TOOL_TRACE = r"<(?P<trace>tool_(?:call|response|result)s?|function_results?)>"
# What stands before and after a mark that is text.
QUOTED = ("``", '""', "''", "“”", "„“", "„”", "‘’", "«»", "「」", "『』", "()", "[]", "{}")
BEFORE_QUOTES = re.compile(  # text before opening quotes: no word but the r of r"...", no end of a sentence
    r"""(?:^|[^\w.!?)\]]|[^\x00-\x7f])[rbfu]{0,2}(["'`])\1?$""", re.IGNORECASE
)
AFTER_QUOTES = re.compile(r"""(["'`])\1?(?![A-Za-z\d\\$(])""")
CONTROL_TOKEN = re.compile(r"<\|.+?\|>")
TAG = re.compile(r"</?\w+>")
SUFFIX = r"(?::[^\s<>]+)?"  # Hunyuan writes <think:6124c78e>
LONGEST_END = 200  # characters at the end of a prompt in which a mark may stand
CODE = re.compile(  # a closed code block, a code span, or a quotation of tags; bounded to keep the time linear
    r"(?:^|(?<=[>\]▷]))[ \t]*(?P<fence>`{3,}+|~{3,}+)[^`\n]*+\n[\s\S]{0,8000}?^[ \t]*(?P=fence)[ \t]*$"
    r"|(?<!`)(?P<span>`++).{1,1000}?(?<!`)(?P=span)(?!`)"
    r"""|(?<!\w)["'“„«「][<\[◁][^"'“”„«»「」\n]*[>\]▷]["'“”»」]""",
    re.MULTILINE,
)
MAY_QUOTE = re.compile(r"""`|~~~|["'“„«「][<\[◁]""")  # a text without these has no CODE
NO_ANSWER = re.compile(f"{TOOL_TRACE}|{END_OF_TURN}")
CODE_OR_NO_ANSWER = re.compile(  # <s>...</s> in a line is struck out
    rf"(?P<code>{CODE.pattern}|(?<=.)<s>[^<\n]*</s>)|{NO_ANSWER.pattern}", re.MULTILINE
)


def split_thoughts(text: str, marks: Marks = OF_MODELS, *, in_thought: bool = False) -> tuple[str, str | None]:
    """Split a response by the rule above.

    Args:
        marks: the marks of the model (`data.thoughts.marks_of`); `TAGS` always count.
        in_thought: True if the prompt has opened a thought.

    Returns:
        (thoughts without their outer marks, perhaps empty; the answer as written, None if a thought has not ended)
    """
    forms = _forms(marks)
    inside = ANY_FORM if in_thought else _first_form(text, forms)  # the form of the thought that is open
    position = thought_end = start = 0
    occurrences = _occurrences(text, forms, inside)
    code = CODE.search(text) if occurrences and MAY_QUOTE.search(text) else None
    for begin, end, opens, form in occurrences:
        if begin < position or (inside and (opens or inside not in (form, ANY_FORM))):
            continue
        position = end
        if not inside:
            while code and (code.start() < start or code.end() <= begin):
                code = CODE.search(text, max(start, code.end()) if code.start() >= start else start)
            if code and code.start() < begin:
                position = code.end()
                continue
        if _is_quoted(text, begin, end) or (start and not inside and not opens and not text[end:].strip()):
            continue
        if opens:
            inside = form
        else:
            inside, thought_end, start = None, begin, end
    thoughts = _without_begin(text if inside else text[:thought_end], forms)
    return thoughts, None if inside else text[start:]


def answer_of(response: str, marks: Marks = OF_MODELS, *, in_thought: bool = False) -> str | None:
    """The answer of a response, without tool traces, up to the end of the turn; None if a thought has not ended."""
    thoughts, answer = split_thoughts(response, marks, in_thought=in_thought)
    if answer is None:
        return None
    if thoughts:  # an end mark more than there are thoughts
        ends = (end for form in _forms(marks) for end in form.ends)
        answer = next((answer.rstrip().removesuffix(end) for end in ends if answer.rstrip().endswith(end)), answer)
    answer = answer.lstrip()
    if ("<" in answer or "[END" in answer) and NO_ANSWER.search(answer):
        answer = _truncate_at_turn_end(answer)
    for begin, end_of_frame in FRAMES.items():
        if answer.lstrip().startswith(begin):
            return answer.lstrip().removeprefix(begin).partition(end_of_frame)[0]
    return answer


def _truncate_at_turn_end(answer: str) -> str:
    """The answer up to the end of its turn, without tool traces."""
    kept, position, searched = "", 0, 0
    while match := CODE_OR_NO_ANSWER.search(answer, searched):
        begin, searched = match.span()
        if match["code"] or _is_quoted(answer, begin, searched):
            continue
        if match["trace"]:
            kept += answer[position:begin]
            end = answer.find(f"</{match['trace']}>", searched)
            position = searched = end + len(f"</{match['trace']}>") if end >= 0 else len(answer)
        elif begin:
            return kept + answer[position:begin]
    return kept + answer[position:]


def after_one_thought(text: str, marks: Marks = OF_MODELS, *, in_thought: bool = False) -> str | None:
    """The answer of a response that is one thought, in <think> or a form of `marks`, and then text; None for others."""
    thought, answer = split_thoughts(text, marks, in_thought=in_thought)
    is_opened = in_thought or _without_begin(text, (THINK, *marks)) != text
    are_plain = all(part.strip() and split_thoughts(part, marks)[1] == part for part in (thought, answer or ""))
    return answer if is_opened and are_plain else None


def opens_thought(prompt: str, marks: Marks = OF_MODELS) -> bool:
    """Whether a rendered prompt ends with a mark that opens a thought, so that the response begins inside it."""
    end = prompt[-LONGEST_END:].rstrip()
    words = tuple(mark for form in marks if form.first for mark in form.begins)
    return end.endswith(words) or any(
        opens and stop == len(end) for _, stop, opens, _ in _occurrences(end, _forms(marks), None)
    )


def marks_in(template: str, tokens: Iterable[str] = ()) -> Marks:
    """The forms with a mark in a chat template, or with control tokens of a tokenizer that open a thought."""
    known = set(tokens)

    def is_known(form: ThoughtForm) -> bool:
        pieces = [set(CONTROL_TOKEN.findall(mark)) or {mark} for mark in form.begins]
        return any(mark in template for mark in form.begins + form.ends) or any(map(known.issuperset, pieces))

    return tuple(form for form in (*TAGS, *OF_MODELS) if form not in LOST and is_known(form))


def marks_from_json(written: list[Any] | None) -> Marks:
    """Marks from JSON; None means the marks of all models."""
    return OF_MODELS if written is None else tuple(ThoughtForm(tuple(b), tuple(e), first) for b, e, first in written)


@lru_cache
def _forms(marks: Marks) -> Marks:
    return tuple(dict.fromkeys((*TAGS, *marks)))


def _first_form(text: str, forms: Marks) -> ThoughtForm | None:
    """The form whose words begin the text and thereby open a thought."""
    said = text.lstrip()[:LONGEST_END]
    words = ((form, mark) for form in forms if form.first for mark in form.begins)
    return next((form for form, mark in words if said.startswith(mark) and _pattern(mark).match(said)), None)


def _occurrences(text: str, forms: Marks, first: ThoughtForm | None) -> list[tuple[int, int, bool, ThoughtForm]]:
    """(begin, end, whether it opens a thought, form) of all marks in a text, in order, the longest first."""
    occurrences = [
        (mark.start(), -mark.end(), opens, form)
        for form in forms
        for opens in (True, False)
        if not form.first or form is first or (first is ANY_FORM and not opens)
        for literal in (form.begins if opens else form.ends)
        if literal.removesuffix(">") in text
        for mark in _pattern(literal).finditer(text)
    ]
    return [(begin, -end, opens, form) for begin, end, opens, form in sorted(occurrences)]


def _is_quoted(text: str, begin: int, end: int) -> bool:
    """Whether a mark is inside quotes, not between two quotations: `"</think>"`, but not `"a"</think>"b"`."""
    quotes = text[max(begin - 1, 0) : begin] + text[end : end + 1]
    if quotes not in QUOTED:
        return text.endswith("<code>", 0, begin) and text.startswith("</code>", end)
    if quotes[0] != quotes[1]:
        return True
    before = text[max(begin - 6, 0) : begin]
    return bool(not before.endswith("```") and BEFORE_QUOTES.search(before) and AFTER_QUOTES.match(text, end))


def _without_begin(text: str, forms: Marks) -> str:
    """The text without the mark that it begins with."""
    said = text.lstrip()
    opening = (_pattern(mark).match(said) for form in forms for mark in form.begins if said[:1] == mark[:1])
    end = max((mark.end() for mark in opening if mark), default=None)
    return text if end is None else said[end:]


@lru_cache
def _pattern(mark: str) -> re.Pattern[str]:
    if mark.isalpha():  # the name of a channel whose marks are lost
        return re.compile(re.escape(mark) + r"(?=[A-Z\d\\$(]|[^<\n]{0,80}<\|message\|>)")
    return re.compile(re.escape(mark[:-1]) + SUFFIX + ">" if TAG.fullmatch(mark) else re.escape(mark))
