"""Continues a conversation: renders new messages as the tokens that follow the stop token of the policy's turn.

Sampled text is never rendered again. Only the new messages are rendered, after a short opening that stands for the
conversation so far; the result is cut where the assistant's turn of the opening ends:

    [user, assistant, *new messages] + generation prompt ->  ... assistant's turn <stop> | suffix

So only the suffix has to be append-only. A template may write earlier turns differently when more follows (Qwen3 drops
their thoughts); the log of a rollout keeps the sampled tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlhf.config.data import PLAIN, TemplateName
from rlhf.data.templates import (
    apply_template,
    check_has_template,
    first_difference,
    render,
    safe_messages,
    safe_tools,
    template_source,
    tokenize,
)

Message = dict[str, Any]
T = TypeVar("T")
Tools = Sequence[dict[str, Any]] | None

KEY = "data.template"
ASKED, THOUGHT, REPLIED, SAID = "Question 1", "Thought 1", "Reply 1", "Message"  # contents of the openings
MAX_CHARS_PER_TOKEN = 16
REMEMBERED = 128  # renderings: the members of a group have the same prompt, and often the same answers of tools
# Calls that a template accepts, and their arguments: all of a turn, one (Llama 3.1), arguments as text (DeepSeek V3)
CALL_FORMS: tuple[tuple[int | None, Any], ...] = ((None, {}), (1, {}), (None, "{}"), (1, "{}"))
LEFT_OUT = "\n[... {:,} characters left out: they do not fit ...]\n"
REWRITES = (
    "the template writes earlier turns of the assistant otherwise when more follows (it drops their thoughts). "
    "Training keeps what was sampled; a server that renders the whole conversation at every turn will not"
)


class Fitted(NamedTuple):
    """Messages, shortened if necessary, and their suffix [N] int32."""

    messages: list[Message]
    token_ids: np.ndarray


class Dialogue:
    """The template of a run's conversations.

    Args:
        stop_ids: the end-of-sequence ids of the model (`turns.stop_token_ids`).
        arguments: of the template (`DataConfig.template_arguments`).
    """

    def __init__(
        self,
        tokenizer: Any,
        template: TemplateName = "model",
        arguments: Mapping[str, Any] | None = None,
        *,
        stop_ids: Collection[int],
    ) -> None:
        self._tokenizer, self._template, self._arguments = tokenizer, template, dict(arguments or {})
        self.stop_ids = frozenset(stop_ids)
        self._recent: dict[str, Any] = {}  # by function and arguments

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> np.ndarray:
        """Token ids [P] int32 of a conversation up to the start of the assistant's turn."""
        return self._remembered(self._prompt, messages, tools)

    def _prompt(self, messages: Sequence[Message], tools: Tools) -> np.ndarray:
        return self._ids(render(messages, self._template, self._tokenizer, tools=tools, arguments=self._arguments))

    def can_go_on(self, token_ids: np.ndarray) -> bool:
        """True if a turn [R] ended with a stop token, so that a suffix can follow. A turn that was cut off did not."""
        return len(token_ids) > 0 and int(token_ids[-1]) in self.stop_ids

    def suffix(self, messages: Sequence[Message], tools: Tools = None, *, after: int | None = None) -> np.ndarray:
        """Token ids [N] int32 of new messages, up to the start of the assistant's next turn.

        A model may stop with another id than the template writes there. If the template ends every turn with the same
        id, any stop id closes a turn, and the suffix follows directly. If the id opens the next message (Gemma 4's
        <|tool_response>, GLM's <|user|>), it is put before the suffix.

        Args:
            messages: messages of other roles than the assistant. Tool messages answer its calls in order.
            after: the sampled stop id; None for the template's own.
        """
        return self._remembered(self._suffix, messages, tools, after)

    def _suffix(self, messages: Sequence[Message], tools: Tools, after: int | None) -> np.ndarray:
        stop, ids = self._after_turn(_opening(messages), messages, tools)
        if after not in (None, stop) and stop != self._remembered(self._closing, tools, messages[0]["role"] != "tool"):
            ids = np.concatenate([np.array([stop], np.int32), ids])
        return ids

    def fit(
        self, messages: Sequence[Message], room: int, tools: Tools = None, *, after: int | None = None
    ) -> Fitted | None:
        """The messages with a suffix of at most `room` tokens; None if that is impossible.

        Long contents lose their middle, with a note. All are cut to the same number of characters, the largest with
        which the suffix fits: at most MAX_CHARS_PER_TOKEN per token of room.
        """
        best, low = None, 0
        high = tried = min(max(len(_text(message)) for message in messages), max(0, room) * MAX_CHARS_PER_TOKEN)
        while low <= high:
            shortened = [_shortened(message, tried) for message in messages]
            ids = self.suffix(shortened, tools, after=after)
            if len(ids) <= room:
                best, low = Fitted(shortened, ids), tried + 1
            else:
                high = tried - 1
            tried = (low + high) // 2
        return best

    def check(self, tools: Tools = None) -> list[str]:
        """Returns warnings; ValueError if the template writes no tools, or a suffix is not append-only.

        It tries a user's message and, with tools, one and two answers of tools, each after a short and after a longer
        conversation.
        """
        if self._template in PLAIN:
            remedy = "Use a chat template for rollouts of several turns."
            raise ValueError(f"{KEY}={self._template}: plain text has no turns that could be told apart. {remedy}")
        check_has_template(self._template, self._tokenizer, KEY)
        notes = Counter[str]()
        how: dict[str, Any] = {"tools": tools, "arguments": self._arguments, "notes": notes}
        render([_user(ASKED)], self._template, self._tokenizer, **how)  # raises if it writes no tools
        kinds = {"a user's message": [{"role": "user", "content": f"{SAID} 1"}]}
        if tools:
            names = [tool.get("function", tool).get("name", "tool") for tool in tools]
            answers = [_answer(name, number) for number, name in enumerate([names[0], names[-1]], start=1)]
            kinds = {"a tool's answer": answers[:1], "answers of two tools": answers, **kinds}
        rewritten = [kind for kind, messages in kinds.items() if self._check_kind(kind, messages, tools)]
        self._check_control_tokens(tools)
        return [f"{KEY}={self._template}: {note}." for note in ([REWRITES] if rewritten else []) + [*notes]]

    def _check_kind(self, kind: str, messages: list[Message], tools: Tools) -> bool:
        """True if the template rewrites the turn before the messages; ValueError unless the suffix is append-only."""
        opening = _opening(messages)
        _, suffix = self._after_turn(opening, messages, tools)
        earlier = [*opening, *([_answer("tool", 0)] if opening[-1].get("tool_calls") else [_user("Go on")])]
        _, later = self._after_turn([*earlier, *opening[1:]], messages, tools)
        if not np.array_equal(suffix, later):
            self._refuse(f"{kind} is written otherwise after a longer conversation", suffix, later)
        written = self._tokenizer.decode(suffix.tolist())
        if lost := [message["content"] for message in messages if message["content"] not in written]:
            raise ValueError(f"{KEY}={self._template}: {kind} is not written: {lost[0]!r} is missing in {written!r}.")
        before, after = self._texts(opening, messages, tools)
        (head, _, turn), (new_head, _, new_turn) = before.partition(ASKED), after.partition(ASKED)
        if head != new_head:
            ids = (tokenize([text], self._template, self._tokenizer)[0] for text in (head, new_head))
            self._refuse(f"the beginning of the conversation is written otherwise when {kind} follows", *ids)
        return not new_turn.startswith(turn.rstrip()) or self._drops_thoughts(opening, messages, tools)

    def _drops_thoughts(self, opening: list[Message], messages: list[Message], tools: Tools) -> bool:
        """True if the thought of the turn is gone when more follows, in any form that the template may know."""
        question, turn = opening
        forms = [turn] if "reasoning_content" in template_source(self._template, self._tokenizer) else []
        if "tool_calls" not in turn:
            forms.append({"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{REPLIED}"})
        return any(THOUGHT not in self._texts([question, form], messages, tools)[1] for form in forms)

    def _check_control_tokens(self, tools: Tools) -> None:
        """Raise ValueError if the text of a stop token in a content becomes that token, or is not kept."""
        text = " ".join(self._tokenizer.convert_ids_to_tokens(sorted(self.stop_ids)))
        harmless, hostile = (self.suffix([_user(content)], tools) for content in (SAID, text))
        stops = [int(np.isin(ids, list(self.stop_ids)).sum()) for ids in (harmless, hostile)]
        written = self._tokenizer.decode(hostile.tolist())
        if stops[0] != stops[1] or text not in written:
            raise ValueError(
                f"{KEY}={self._template}: the tokenizer writes the text {text!r} as {written!r}, with "
                f"{stops[1] - stops[0]} stop tokens, so text of a tool could end a turn. Use another tokenizer."
            )

    def _refuse(self, problem: str, was: np.ndarray, now: np.ndarray) -> None:
        raise ValueError(
            f"{KEY}={self._template}: {problem}: {first_difference(was, now, self._tokenizer)}. What follows a turn "
            "could not be appended to it. Name a template that only appends: data.template=FILE.jinja."
        )

    def _text(self, messages: Sequence[Message], tools: Tools, *, last: bool = False) -> str:
        """A conversation as text with marks. With `last`, it ends with the start of the assistant's turn."""
        template, tokenizer = self._template, self._tokenizer
        text: str = apply_template(
            safe_messages(messages, template, tokenizer),
            template, tokenizer, KEY,
            {"tools": safe_tools(tools, template, tokenizer), **self._arguments, "add_generation_prompt": last},
        )  # fmt: skip
        return text

    def _texts(self, opening: list[Message], messages: Sequence[Message], tools: Tools) -> tuple[str, str]:
        """The text of an opening, and of it with the new messages and the start of the assistant's next turn."""
        messages, errors = _with_call_ids(messages), list[Exception]()
        for count, arguments in CALL_FORMS:
            variant = [_with_calls(message, count, arguments) for message in opening]
            try:
                before = self._remembered(self._text, variant, tools)
                return before, self._text([*variant, *messages], tools, last=True)
            except (ValueError, TypeError) as error:  # the latter: of operators in a template
                errors.append(error)
        raise ValueError(f"{KEY}={self._template}: {errors[0]}") from errors[0]

    def _after_turn(self, opening: list[Message], messages: Sequence[Message], tools: Tools) -> tuple[int, np.ndarray]:
        """The stop id that ends the opening's turn, and the ids [N] that the template writes after it.

        It is the last stop id of the opening if only spaces follow it; else the first stop id of the new messages, if
        they begin with it (GLM's <|user|> and <|observation|>).
        """
        assert all(message["role"] != "assistant" for message in messages), "the assistant's turns are sampled"
        before, whole = self._texts(opening, messages, tools)
        ids, longer = self._remembered(self._ids, before), self._ids(whole)
        stops, longer_stops = (np.flatnonzero(np.isin(each, list(self.stop_ids))) for each in (ids, longer))
        count = len(stops)
        turn = self._tokenizer.decode(ids[stops[-1] + 1 if count else 0 :].tolist()).rstrip()
        if turn and len(longer_stops) > count:
            start = longer_stops[count - 1] + 1 if count else 0
            opened = self._tokenizer.decode(longer[start : longer_stops[count]].tolist()).rstrip()
            if opened.endswith(turn[-len(REPLIED) :]):
                turn, count = "", count + 1
        if turn or not 0 < count <= len(longer_stops):
            known = ", ".join(repr(self._tokenizer.convert_ids_to_tokens(each)) for each in sorted(self.stop_ids))
            raise ValueError(
                f"{KEY}={self._template}: a turn of the assistant does not end with a token that ends a response "
                f"({known}): {turn[-80:]!r}. Correct eos_token_id in the model's generation_config.json, or use "
                "another template."
            )
        cut = int(longer_stops[count - 1])
        return int(longer[cut]), longer[cut + 1 :]

    def _ids(self, text: str) -> np.ndarray:
        return tokenize([text], self._template, self._tokenizer)[0]

    def _remembered(self, make: Callable[..., T], *arguments: Any) -> T:
        """What a method returns for these arguments; the most recent ones are not rendered again."""
        key = repr((make.__name__, arguments))
        if key not in self._recent:
            self._recent[key] = make(*arguments)
        made: T = self._recent[key]
        if len(self._recent) > REMEMBERED:
            del self._recent[next(iter(self._recent))]  # the oldest
        return made

    def _closing(self, tools: Tools, of_tools: bool) -> int:
        """The stop id that the template writes before answers of tools, or before other messages."""
        messages = [_answer("tool", 1)] if of_tools else [_user(f"{SAID} 1")]
        return self._after_turn(_opening(messages), messages, tools)[0]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(name: str, number: int) -> Message:
    return {"role": "tool", "name": name, "content": f"{SAID} {number}"}


def _opening(messages: Sequence[Message]) -> list[Message]:
    """A question, and a turn of the assistant: with a call for each answer of a tool among the new messages, or text.

    It has not both: Gemma 4 would write the text after the answers.
    """
    turn: Message = {"role": "assistant", "content": REPLIED}
    answers = [message for message in _with_call_ids(messages) if message["role"] == "tool"]
    if answers:
        calls = [
            {
                "id": answer["tool_call_id"],
                "type": "function",
                "function": {"name": answer.get("name", "tool"), "arguments": {}},
            }
            for answer in answers
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
    return [_user(ASKED), {**turn, "reasoning_content": THOUGHT}]


def _with_calls(message: Message, count: int | None, arguments: Any) -> Message:
    """The message with its first `count` calls, with these arguments."""
    if "tool_calls" not in message:
        return message
    calls = [call | {"function": call["function"] | {"arguments": arguments}} for call in message["tool_calls"][:count]]
    return {**message, "tool_calls": calls}


def _with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages, with an id for each answer of a tool that names no call; Mistral wants nine characters."""
    return [
        {"tool_call_id": f"call{number:05}", **message} if message["role"] == "tool" else message
        for number, message in enumerate(messages)
    ]


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _shortened(message: Message, most: int) -> Message:
    """The message with at most `most` characters of its content: the beginning, a note of the gap, and the end."""
    content = _text(message)
    if len(content) <= most:
        return message
    start, end = content[: (most + 1) // 2], content[len(content) - most // 2 :]
    return {**message, "content": start + LEFT_OUT.format(len(content) - most) + end}
