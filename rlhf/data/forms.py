"""Finds, by trial, the form of messages in which a chat template writes all that a row says.

Templates read a conversation under different names: a thought as `reasoning_content`, `thinking` or inside the content;
the arguments of a call as an object or as JSON text; the content of a turn with calls as "" or null; a content as text
or in parts. A stand-in for the conversation, with a unique text in each place, is rendered in one form after another,
until the rendering has all of these texts. A form holds for all conversations of one structure, so this is done once
per structure. In addition, the texts of every row are searched in its own rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from rlhf.answers.thoughts import THINK, Marks, split_thoughts
from rlhf.data.messages import THOUGHTS, Message

DESCRIPTION = "the description of"
PARTS = "parts"  # a thought as a part of the content, as Mistral's templates read it
READ = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"}
MAX_STRUCTURES = 4096  # structures whose form is cached
NO_TOOLS = (
    "the template writes no tools, so the model would not know them. Name a template that does "
    "(data.template=FILE.jinja), or take the tools away (the column `tools` of a row)."
)


class Form(NamedTuple):
    """The form in which a template is given messages.

    Attributes:
        thought: the name under which it reads thoughts, or PARTS; empty leaves them in the content.
        call_ids: calls without an id get one.
        new_ids: all calls get a new id; Mistral's templates accept only ids of nine characters.
        loses_thoughts: it drops some thoughts of turns that are not trained, under every name.
        loses_descriptions: it names tools without their descriptions.
    """

    thought: str = ""
    arguments_as_text: bool = False
    null_content: bool = False
    in_parts: bool = False
    call_ids: bool = False
    new_ids: bool = False
    knows_developer: bool = True
    loses_thoughts: bool = False
    loses_descriptions: bool = False

    def messages(self, messages: Sequence[Message], marks: Marks) -> list[Message]:
        """These messages, as `read_messages` returns them, in this form."""
        given, count, waiting, renamed = list[Message](), 0, list[str](), dict[str, str]()
        for message in messages:
            message = dict(message)
            thought, content = split_message(message, marks) if self.thought else (None, message["content"])
            message.pop("reasoning_content", None)
            if message["role"] == "developer" and not self.knows_developer:
                message["role"] = "system"
            if called := message.get("tool_calls"):
                message["tool_calls"] = [self._call(call, count + number) for number, call in enumerate(called)]
                count, waiting = count + len(called), [call.get("id", "") for call in message["tool_calls"]]
                renamed.update(zip((call.get("id", "") for call in called), waiting, strict=True))
                content = None if self.null_content and not content else content
            elif message["role"] == "tool" and self.call_ids and waiting:
                answered = waiting.pop(0)
                own = message.get("tool_call_id", answered)
                message["tool_call_id"] = renamed.get(own, own)
            if thought and self.thought == PARTS:
                content = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": content}]
            elif thought:
                message[self.thought] = thought
            if self.in_parts and isinstance(content, str):
                content = [{"type": "text", "text": content}]
            given.append({**message, "content": content})
        return given

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        function, arguments = call["function"], call["function"]["arguments"]
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        number_given = {"id": _call_id(number)} if self.call_ids else {}
        call = {**call, **number_given} if self.new_ids else {**number_given, **call}
        return {**call, "function": {**function, "arguments": arguments}}


class Piece(NamedTuple):
    """A text of a conversation: index of its message, description, the text, and its stand-in during the trial."""

    message: int
    what: str
    text: str
    stand_in: str

    @property
    def name(self) -> str:
        return self.what if self.message < 0 else f"{self.what} of message {self.message + 1}"


class Conversation:
    """The texts of a conversation, and a stand-in of the same structure.

    Attributes:
        pieces: the texts. messages, tools: the stand-in. key: identifies the structure.
    """

    def __init__(self, messages: Sequence[Message], tools: Any, marks: Marks) -> None:
        self.pieces: list[Piece] = []
        self._names: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._marks = marks
        self.messages = [self._message(number, message) for number, message in enumerate(messages)]
        self.tools = [self._tool(tool) for tool in tools or ()] or None
        self.key = json.dumps([self.messages, self.tools], default=str)

    def _text(self, message: int, what: str, text: str) -> str:
        if not text.strip():
            return text
        self.pieces.append(Piece(message, what, text, stand_in := f"Zq{len(self.pieces)}x"))
        return stand_in

    def _message(self, number: int, message: Message) -> Message:
        said = dict(message)
        thought, answer = split_message(message, self._marks)
        if thought is None:
            said["content"] = self._text(number, "the content", message["content"])
        else:
            stand_in = self._text(number, "the thought", thought)
            if "reasoning_content" in message:
                said["reasoning_content"] = stand_in
                said["content"] = self._text(number, "the content", message["content"])
            else:
                before = message["content"][: len(message["content"]) - len(answer)]
                said["content"] = before.replace(thought, stand_in) + self._text(number, "the content", answer)
        if id := message.get("tool_call_id"):
            said["tool_call_id"] = self._id(id)
        if calls := message.get("tool_calls"):
            said["tool_calls"] = [self._call(number, call) for call in calls]
        return said

    def _call(self, number: int, call: dict[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        stand_in = self._names.setdefault(name, f"Zn{len(self._names)}x")
        self.pieces.append(Piece(number, f"the call of {name}", name, stand_in))
        arguments = self._value(number, f"an argument of the call of {name}", arguments)
        id_of_call = {"id": self._id(call["id"])} if "id" in call else {}
        return {**call, **id_of_call, "function": {"name": stand_in, "arguments": arguments}}

    def _id(self, id: str) -> str:
        """The stand-in for the id of a call: its number, padded to the same length."""
        return self._ids.setdefault(id, f"{len(self._ids):0{len(id)}}")

    def _value(self, number: int, what: str, value: Any) -> Any:
        if isinstance(value, dict):
            self.pieces += [Piece(number, f"the name of {what}", str(name), str(name)) for name in value]
            return {name: self._value(number, what, each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._value(number, what, each) for each in value]
        if isinstance(value, str):
            return self._text(number, what, value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            other = 7_000_000 + len(self.pieces) + (0.5 if isinstance(value, float) else 0)
            self.pieces.append(Piece(number, what, json.dumps(value), str(other)))
            return other
        return value

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            return dict(tool)
        stand_in = self._names.setdefault(name, f"Zn{len(self._names)}x")
        self.pieces.append(Piece(-1, f"the tool {name}", name, stand_in))
        said = {**function, "name": stand_in}
        if isinstance(text := function.get("description"), str):
            said["description"] = self._text(-1, f"{DESCRIPTION} the tool {name}", text)
        return {**tool, "function": said} if "function" in tool else said


def split_message(message: Message, marks: Marks) -> tuple[str | None, str]:
    """The thought and the content of a message of the assistant, whose content may begin with a thought."""
    content: str = message["content"]
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message.get("reasoning_content"), content
    if not any(mark in content for form in (THINK, *marks) for mark in form.ends):
        return None, content
    thought, answer = split_thoughts(content, marks)
    if answer is None or answer == content or split_thoughts(thought, marks) != ("", thought):
        return None, content  # it is cut off, or one of several
    head = content[: len(content) - len(answer)]
    if not any(head.endswith(mark) for form in (THINK, *marks) for mark in form.ends):
        return None, content  # tags of another kind: a text that the model is to write
    return thought.strip(), answer.lstrip()


def find_form(
    said: Conversation, source: str, marks: Marks, render: Callable[[list[Message], Any], str], strict: Collection[int]
) -> Form:
    """The first form in which a template writes all texts of a conversation. ValueError if there is none.

    Args:
        render: messages and tools of the stand-in -> text.
        strict: indices of messages whose thoughts must be written. Other thoughts, and descriptions of tools, may be
            dropped, as some templates do by design (see `dropped_notes`).
    """
    errors, left_out, dropping = list[ValueError](), list[list[str]](), list[Form]()
    for form in _candidates(said, source):
        given = form.messages(said.messages, marks)
        try:
            text = render(given, said.tools)
        except (TypeError, ValueError) as error:  # the former: of plain text
            errors.append(ValueError(str(error)))
            continue
        lost = [piece for piece in said.pieces if piece.stand_in not in text]
        thoughts = [piece for piece in lost if piece.what == "the thought" and piece.message not in strict]
        descriptions = [piece for piece in lost if piece.what.startswith(DESCRIPTION)]
        needed = [piece.name for piece in lost if piece not in thoughts + descriptions]
        needed += _not_as_json(given, text)
        if not lost and not needed:
            return form
        if not needed:
            dropping.append(form._replace(loses_thoughts=bool(thoughts), loses_descriptions=bool(descriptions)))
        left_out.append(needed)
    if dropping:
        return dropping[0]
    if not left_out:
        raise errors[0]
    fewest = min(left_out, key=len)
    if any(name.startswith("the tool ") for name in fewest) and all("the tool " in name for name in fewest):
        raise ValueError(NO_TOOLS)
    raise ValueError(missing_texts_message(fewest))


def dropped_notes(messages: Sequence[Message], form: Form, source: str) -> Iterator[str]:
    """Notes about parts of a conversation that the template may drop; they complete "in N rows ..."."""
    if form.loses_thoughts:
        yield "the template drops thoughts of earlier turns, as it does when the model is asked"
    if form.loses_descriptions:
        yield "the template names tools without their descriptions"
    names = {name for message in messages for name in message} - READ
    unread = {name for name in names if not re.search(rf"""[."']{re.escape(name)}\b""", source)}
    if not re.search(r"""\bm\w*(?:\[[^\]]*\])?(?:\.|\[["']|\.get\(["'])name\b""", source):  # a tool has a name too
        unread |= {"name" for message in messages if "name" in message and message["role"] != "tool"}
    yield from (f"messages have `{name}`, which the template does not read" for name in sorted(unread))


def missing_texts_message(names: Sequence[str]) -> str:
    remedy = "Name a template that writes it (data.template=FILE.jinja), or remove it from the row."
    if names[0].startswith("the thought"):
        remedy = (
            "Give only the last turn as completion and the rest as prompt if it drops the thoughts of earlier turns; "
            "else name a template that writes thoughts (data.template=FILE.jinja), or write it into the content, as "
            "<think>...</think>, if the model is to learn that."
        )
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the template leaves out what the row says: {names[0]}{more}. {remedy}"


def missing_texts(said: Conversation, text: str, form: Form, strict: Collection[int]) -> list[str]:
    """Names of the conversation's texts that are missing in the rendered text."""

    @lru_cache(1)
    def letters() -> str:
        return _letters(text)

    def is_there(line: str) -> bool:
        escaped = (json.dumps(line, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        return line in text or any(each in text for each in escaped) or _letters(line) in letters()

    return [
        piece.name
        for piece in said.pieces
        if piece.message >= 0
        and (piece.message in strict or not _may_be_dropped(piece, form))
        and piece.text.strip() not in text
        and not all(is_there(line.strip()) for line in piece.text.splitlines())
    ]


def _may_be_dropped(piece: Piece, form: Form) -> bool:
    """True if a template may drop this text of an untrained turn: a thought, or a content with several thoughts."""
    if piece.what == "the thought":
        return form.loses_thoughts
    return piece.what == "the content" and any(mark in piece.text for mark in THINK.ends)


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text)


def _not_as_json(messages: Sequence[Message], text: str) -> list[str]:
    """Calls whose arguments the template wrote as a Python dictionary, or as JSON text inside JSON text."""
    wrong_calls = []
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            wrong = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, str) else str(arguments)
            if arguments and arguments != "{}" and wrong in text:
                wrong_calls.append(f"the arguments of a call as a JSON object of message {number + 1}")
    return wrong_calls


def _candidates(said: Conversation, source: str) -> Iterator[Form]:
    names = [name for name in THOUGHTS if re.search(rf"""(?:\.|["']){name}\b(?!\s*[=(])""", source)]
    thoughts = [*names, *([PARTS] if "thinking" in names else [])] or [""]
    calls = any(message.get("tool_calls") for message in said.messages)
    empty = any(message.get("tool_calls") and not message["content"] for message in said.messages)
    ids = "tool_call_id" in source
    both = (False, True)
    options = (both, both[: 1 + (calls and ids)], thoughts, both[: 1 + empty], both[: 1 + calls])
    for in_parts, new_ids, thought, null, as_text in product(*options):
        yield Form(thought, as_text, null, in_parts, ids, new_ids, knows_developer="developer" in source)


def _call_id(number: int) -> str:
    return f"call{number:05}"  # nine characters, as Mistral's template asks for
