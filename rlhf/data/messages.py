"""Reads the messages of rows and requests into one form, for prompts, supervised rows, pairs and the endpoint.

A message that was read has `role`, `content` (text, perhaps empty), and only if the row has them:

    reasoning_content   the thought of the assistant, under whatever name the row has it
    tool_calls          [{"id", "type": "function", "function": {"name", "arguments": an object}}]
    tool_call_id, name  of an answer of a tool

Further keys of a message stay, for templates that read them. An unreadable message is refused with its column.
`data.forms` then ensures that the template writes everything that was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rlhf.config.data import OUR_ARGUMENTS

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool", "developer")
OTHER_ROLES = {"function": "tool", "ipython": "tool"}  # names of earlier APIs
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
THOUGHT_PARTS = ("thinking", "reasoning")
IMAGES = re.compile("image|video|audio|file|media")
WITH_IMAGES = "`{}` holds images: training reads text alone, and would leave them out. Remove the row, or its images."
LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
TEXT_OF_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
SYSTEM_COLUMNS = ("system", "system_prompt")  # next to the messages, as ToolACE, APIGen-MT and Orca have it
WRITE_MESSAGES = f'Write messages as {{"role": ..., "content": text}} with a role of {", ".join(ROLES)}.'
WRITE_CALLS = 'Write calls as {"type": "function", "function": {"name": ..., "arguments": {...}}}.'


def read_messages(value: Any, column: str, role: str) -> list[Message]:
    """The messages of a column that holds messages, their JSON text, or another text: one message of this role.

    Null values in a message are dropped. ValueError if the value is none of these, or a message cannot be read.
    """
    if isinstance(value, str):
        value = messages_in(value, column) or [{"role": role, "content": value}]
    elif isinstance(value, Mapping):
        value = [value]
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"`{column}` is {value!r:.80}, neither text nor messages. Correct it, or name another column.")
    messages = [_read(message, column) for message in value]
    for message in messages:
        content = message["content"]
        message["content"] = content if isinstance(content, str) else joined(content, message["role"])
        check_text(message["content"], column)
        check_text(message.get("reasoning_content", ""), column)
        check_text(json.dumps(message.get("tool_calls", ""), ensure_ascii=False, default=str), column)
    return _in_order_of_calls(messages)


def with_system(messages: list[Message], columns: Mapping[str, Any]) -> list[Message]:
    """The messages of a row after the text of its column `system` or `system_prompt`; ValueError if they differ."""
    column = next((name for name in SYSTEM_COLUMNS if isinstance(columns.get(name), str)), "")
    text = columns[column] if column else ""
    if not text.strip():
        return messages
    check_text(text, column)
    own = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    if not any(content.strip() for content in own):
        others = [message for message in messages if message["role"] not in ("system", "developer")]
        return [{"role": "system", "content": text}, *others]
    if not any(text.strip() in content for content in own):
        reason = f"but the messages have another system message: {own[0]!r:.60}. Remove one of them."
        raise ValueError(f"`{column}` is {text!r:.60}, {reason}")
    return messages


def read_request(messages: Iterable[Any]) -> list[Message]:
    """The messages of a request to the model, without keys that no template reads; `developer` becomes `system`.

    A user's content in several parts stays a list of texts. ValueError if a message cannot be read.
    """
    read = []
    for message in map(read_message, messages):
        content, role = message["content"], message["role"]
        if role == "developer":
            message["role"] = "system"
        if isinstance(content, list) and (role != "user" or len(content) < 2):
            message["content"] = joined(content, role)
        names = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
        read.append({name: message[name] for name in names if name in message})
    return _in_order_of_calls(read)


def read_message(message: Any) -> Message:
    """A message of a conversation with the model; its content is a list of texts if it came in parts.

    Arguments that are no JSON object stay text, since the model wrote them. ValueError if it cannot be read.
    """
    return _read(message, "messages", of_model=True)


def _in_order_of_calls(messages: list[Message]) -> list[Message]:
    """The messages, with answers of tools in the order of their calls, since many templates write no ids."""
    ordered = list[Message]()
    for is_answer, group in groupby(messages, lambda message: message["role"] == "tool"):
        run = list(group)
        ids = [call.get("id") for call in ordered[-1].get("tool_calls", ())] if is_answer and ordered else []
        if ids and all(message.get("tool_call_id") in ids for message in run):
            run.sort(key=lambda message: ids.index(message.get("tool_call_id")))
        ordered += run
    return ordered


def joined(texts: Iterable[str], role: str) -> str:
    """The joined texts of a content's parts: without a separator if the model wrote them, else on separate lines."""
    return ("" if role == "assistant" else "\n").join(texts)


def check_text(text: str, column: str) -> None:
    """Raise a ValueError if a string cannot be used as text."""
    problem = "a NUL character, which ends the text for many programs" if "\0" in text else ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"half a surrogate pair, which is no character ({text[error.start]!a})"
    if problem:
        raise ValueError(f"`{column}` holds {problem}. Correct or remove the row.")


def read_tools(columns: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tool schemas in the column `tools` of a row, None without it. ValueError unless it is a list or its JSON.

    Null values in a list are dropped: a Parquet column gives every schema the keys of all schemas.
    """
    value = columns.get("tools")
    tools: Any = _json_or_text(value) if isinstance(value, str) else without_nulls(value)
    if not tools and not isinstance(tools, str):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"`tools` is {value!r:.80}, not a list of schemas, nor the JSON text of one. Write "
            '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}].'
        )
    check_text(json.dumps(tools, ensure_ascii=False, default=str), "tools")
    return [tool if "function" in tool or "name" not in tool else _wrapped(tool) for tool in tools]


def read_arguments(columns: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a chat template for a row: those of the run, then its column `chat_template_kwargs`."""
    value: Any = columns.get("chat_template_kwargs")
    own: Any = without_nulls(_json_or_text(value) if isinstance(value, str) else value) or {}
    if not isinstance(own, dict):
        raise ValueError(f"`chat_template_kwargs` is {value!r:.80}, not an object. Write it as {{name: value}}.")
    if ours := sorted(OUR_ARGUMENTS & own.keys()):
        raise ValueError(f"`chat_template_kwargs` has {', '.join(ours)}, which rlhf passes itself. Remove it.")
    return {**arguments, **own}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return text


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    """A schema of xLAM's rows, the Responses API or Anthropic, in the form of chat APIs, which templates read."""
    function = {name: value for name, value in tool.items() if name not in ("type", "input_schema")}
    parameters = {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
    return {"type": "function", "function": {**function, **parameters}}


def without_nulls(value: Any) -> Any:
    """The value without keys whose value is null, or an object that holds only nulls."""
    if isinstance(value, dict):
        kept = {name: without_nulls(each) for name, each in value.items() if each is not None}
        return {name: each for name, each in kept.items() if each != {} or value[name] == {}}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def messages_in(text: str, column: str) -> list[Any] | None:
    """The messages in a JSON text; None for any other text, such as a task that happens to be JSON."""
    if not LIST_OF_OBJECTS.match(text):
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        if not TEXT_OF_MESSAGES.match(text):
            return None
        remedy = "Write a list of messages, or its JSON text (json.dumps)."
        raise ValueError(f"`{column}` is {text!r:.80}, which looks like messages but is not JSON. {remedy}") from None
    names = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    are_messages = all(isinstance(each, dict) and any(each.keys() >= pair for pair in names) for each in parsed)
    return parsed if are_messages else None


def _read(given: Any, column: str, *, of_model: bool = False) -> Message:
    """A message; its content is text, or a list of texts if it came in parts."""
    if not isinstance(given, Mapping):
        raise ValueError(f"`{column}` holds {given!r:.80}, not a message. {WRITE_MESSAGES}")
    message = {name: value for name, value in given.items() if value is not None}
    if "role" not in message and {"from", "value"} <= message.keys():
        message = _from_sharegpt(message)
    role = message.get("role")
    role = message["role"] = OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"`{column}` holds {given!r:.80}, not a message. {WRITE_MESSAGES}")
    if "tool_call_id" in message:
        message["tool_call_id"] = str(message["tool_call_id"])
    content, thoughts = _content(message.pop("content", ""), column)
    thoughts += [_text(message.pop(name), name, column) for name in THOUGHTS if name in message]
    details = message.pop("reasoning_details", None)
    if details and not any(thoughts):  # of OpenRouter, where it repeats `reasoning`
        thoughts += _texts_of(details, ("text", "summary"), "reasoning_details", column)
    thoughts = list(dict.fromkeys(filter(None, thoughts)))
    if len(thoughts) > 1:
        raise ValueError(f"`{column}` holds a message with two thoughts that differ: {thoughts[:2]!r:.120}. Keep one.")
    earlier_form = message.pop("function_call", None)
    calls = _calls(message.pop("tool_calls", None) or earlier_form or [], column, of_model=of_model)
    if role != "assistant" and (calls or thoughts):
        raise ValueError(f"`{column}` holds a message of {role} with a call or a thought: only the assistant has them.")
    read = {"role": role, "content": content, **({"reasoning_content": thoughts[0]} if thoughts else {})}
    return {**read, **({"tool_calls": calls} if calls else {}), **{n: v for n, v in message.items() if n not in read}}


def _from_sharegpt(message: Message) -> Message:
    """A message with `from` and `value`."""
    said = {name: value for name, value in message.items() if name not in ("from", "value")}
    if message["from"] == "function_call":
        return {**said, "role": "assistant", "tool_calls": message["value"]}
    role = message["from"]
    return {**said, "role": SHAREGPT.get(role, role) if isinstance(role, str) else role, "content": message["value"]}


def _text(value: Any, name: str, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{column}` holds a message whose {name} is {value!r:.80}, not text. Write it as text.")
    return value


def _texts_of(parts: Any, names: tuple[str, ...], name: str, column: str) -> list[str]:
    """The text of each part of a thought, under the first of these keys; empty if the part has none of them."""
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Mapping) for part in parts):
        raise ValueError(
            f"`{column}` holds a message whose {name} is {parts!r:.80}, not a list of parts with text. Write the "
            "thought as text, in `reasoning_content`."
        )
    return [_text(next((part[key] for key in names if part.get(key)), ""), name, column) for part in parts]


def _content(content: Any, column: str) -> tuple[str | list[str], list[str]]:
    """A content as text or as the texts of its parts, and the thoughts among the parts."""
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list | tuple):
        remedy = "Write it as text, an object as its JSON text."
        raise ValueError(f"`{column}` holds a message whose content is {content!r:.80}, not text. {remedy}")
    texts, thoughts = list[str](), list[str]()
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = str(part.get("type") or "text") if isinstance(part, Mapping) else ""
        if kind in THOUGHT_PARTS:
            inner = part.get(kind) or part.get("text") or part.get("summary") or ""
            is_list = isinstance(inner, list)
            thoughts.append(
                "".join(_texts_of(inner, ("text",), kind, column)) if is_list else _text(inner, kind, column)
            )
        elif kind in TEXT_PARTS and isinstance(text := part.get("text", part.get(kind)), str):
            texts.append(text)
        elif IMAGES.search(kind):
            raise ValueError(WITH_IMAGES.format(column))
        else:
            raise ValueError(
                f"`{column}` holds a content with the part {part!r:.80}: only text is read. {WRITE_MESSAGES} "
                "Write calls in `tool_calls`, and their answers as messages of the role tool."
            )
    return texts, thoughts


def _calls(calls: Any, column: str, *, of_model: bool) -> list[dict[str, Any]]:
    read = _json_or_text(calls) if isinstance(calls, str) else calls
    listed = [read] if isinstance(read, Mapping) else read
    if not isinstance(listed, list | tuple):
        reason = "not a list of calls, nor the JSON text of one"
        raise ValueError(f"`{column}` holds `tool_calls` that are {calls!r:.80}, {reason}. {WRITE_CALLS}")
    said = ((without_nulls(call), call) for call in listed)
    return [_call(call, given, column, of_model=of_model) for call, given in said if call]


def _call(call: Any, given: Any, column: str, *, of_model: bool) -> dict[str, Any]:
    """A call; nulls in its arguments stay."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError(f"`{column}` holds {given!r:.80}, not a call. {WRITE_CALLS}")
    own = given.get("function") or given
    written: Any = next((own[key] for key in ("arguments", "parameters", "input") if own.get(key) is not None), {})
    arguments = _json_or_text(written) if isinstance(written, str) else written
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict) and not (of_model and isinstance(written, str)):
        raise ValueError(
            f"`{column}` holds a call of {name} whose arguments are {written!r:.80}, not a JSON object. {WRITE_CALLS}"
        )
    arguments = arguments if isinstance(arguments, dict) else written
    number = {"id": str(call["id"])} if call.get("id") else {}
    return {**number, "type": "function", "function": {"name": name, "arguments": arguments}}
