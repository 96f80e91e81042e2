"""Which part of a response is its answer: what follows the thoughts, without tool traces, up to the end of the turn."""

from __future__ import annotations

import re

# Chat templates end a turn with one of these; the text after it does not answer this prompt.
END_OF_TURN = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text|end)\|>|</s>|<eos>|<end_of_turn>")
THOUGHT_BEGINS = re.compile(r"<(?:seed:)?think(?:ing)?>|\[THINK\]|◁think▷")
THOUGHT_ENDS = re.compile(r"</(?:seed:)?think(?:ing)?>|\[/THINK\]|◁/think▷")
CHANNEL = re.compile(r"<\|channel\|>|^\s*(?:analysis|commentary|final)\b[^<\n]{0,80}<\|message\|>")  # also one cut off
CHANNELS_WITHOUT_MARKS = re.compile(r"(?:analysis|commentary)(?=[A-Z])")  # gpt-oss without its special tokens
TOOL_TRACE = re.compile(r"<(tool_(?:call|response|result)s?|function_results?)>.*?(?:</\1>|\Z)", re.DOTALL)


def after_thinking(response: str) -> str | None:
    """The text after the last thought, up to the end of the turn, without tool traces; None if a thought has not ended.

    Of a response in channels (gpt-oss) it is the last one, if that is the final channel.
    """
    rest = response
    if CHANNEL.search(rest):
        name, _, rest = rest.rpartition("<|channel|>")[2].partition("<|message|>")
        if name.strip() != "final":
            return None
    elif CHANNELS_WITHOUT_MARKS.match(rest):
        _, found, rest = rest.rpartition("assistantfinal")
        if not found:
            return None
    else:
        ends = [end.end() for end in THOUGHT_ENDS.finditer(rest)]
        rest = rest[ends[-1] if ends else 0 :]
        if THOUGHT_BEGINS.search(rest):
            return None
    if "<tool_" in rest or "<function_" in rest:
        rest = TOOL_TRACE.sub("", rest)
    end = END_OF_TURN.search(rest.lstrip())
    return rest.lstrip()[: end.start()] if end and end.start() else rest
