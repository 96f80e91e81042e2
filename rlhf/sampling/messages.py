"""Turns a response into an assistant message: its thoughts, its text, and the calls that vLLM's parser finds.

It runs in the engine's actor. Calls are only searched for after the thoughts (`answers.thoughts`), so a call inside a
thought is never made; gpt-oss's calls stand in channels, which its parser reads as a whole. A malformed call becomes a
call with an `error`, which its environment returns to the model; anything else that no parser can read is text, so no
response ends a run. Parsers log a traceback for each such response; their loggers are silenced.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from rlhf.answers.thoughts import opens_thought, split_thoughts
from rlhf.config.printing import as_utf8
from rlhf.sampling.requests import Completion, Parsing

PROMPT_END = 16  # last tokens of a prompt, which include the mark of a thought
IN_CHANNELS = {"openai": "openai_gptoss"}  # parser of calls in channels -> parser of its thoughts
# The beginnings of calls in all forms, unless a backtick quotes them. Some forms have a section around calls.
CALL_BEGINS = re.compile(
    r"(?<!`)(?:<(?:seed:|longcat_)?tool_call>|<\|tool_call\|?>|<invoke |<\|tool_call_(?:start|begin)\|>|"
    r"<(?:start_|dots_)?function_call>|\[TOOL_CALLS\]|<｜tool▁call▁begin｜>|<function_calls>|<\|START_ACTION\|>|"
    r"<minimax:tool_call>(?!\s*<invoke )|<\|tool_calls_section_begin\|>(?!\s*<\|tool_call_begin\|>)|"
    r"<｜tool▁calls▁begin｜>(?!\s*<｜tool▁call▁begin｜>)|\bto=functions\.)"
)
MAX_READ_ALONE = 32  # calls of a turn; a turn that consists of marks would block the engine
UNREAD = "This call could not be read, and was not made. Write it again, in the form that the tools were described in."


class _Call(NamedTuple):
    name: str
    arguments: str
    id: str | None = None
    error: str = ""


class MessageReader:
    """Reads the responses of one model. Raises ValueError if the tokenizer lacks tokens that a parser needs."""

    def __init__(self, parsing: Parsing, tokenizer: Any, model_config: Any) -> None:
        self.parsing = parsing
        for name in ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self._parser_class = ParserManager.get_parser(
                tool_parser_name=parsing.tool_parser,
                reasoning_parser_name=IN_CHANNELS.get(parsing.tool_parser or ""),
                enable_auto_tools=parsing.tool_parser is not None,
                model_name=model_config.model,
                is_harmony=parsing.tool_parser in IN_CHANNELS,
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ValueError(
                f"rollout.tool_parser: vLLM's parser {parsing.tool_parser} does not fit this model: {error}. "
                "Name the parser of the model's own form of tool calls."
            ) from error
        self._tokenizer, self._model_config = tokenizer, model_config
        self._calls_tools = parsing.tool_parser is not None
        self._request = ChatCompletionRequest(
            messages=[],
            tools=list(parsing.tools) or None,
            tool_choice="auto" if parsing.tools else None,  # with None, calls are parsed too
            chat_template_kwargs=parsing.template_kwargs,
        )
        names = [str(tool.get("function", tool).get("name")) for tool in parsing.tools]
        named = "|".join(map(re.escape, names)) or r"(?!)"
        # Forms without marks (Llama, pythonic): a call is known by the name of its tool.
        begin = r"""\{\s*(?:["']type["']\s*:\s*["']function["']\s*,\s*)?["']name["']\s*:\s*["']"""
        self._unmarked = re.compile(rf"""{begin}(?:{named})["']|\A\s*\[(?:{named})\(""")
        self._names = re.compile(rf"\b(?:{named})\b")
        # Marks of calls and thoughts may be control tokens, so these stay in the text if they are searched for.
        request = self._request if self._parser_class is None else self._parser().adjust_request(self._copy())
        self._skip_special_tokens = bool(request.skip_special_tokens) and not parsing.marks

    def message(self, completion: Completion, prompt_ids: np.ndarray, *, keep_last: bool = False) -> dict[str, Any]:
        """The message of a response to these ids [P]. The id that stopped it is dropped, unless `keep_last`."""
        token_ids = completion.token_ids.tolist()
        said = token_ids[:-1] if completion.finish_reason == "stop" and not keep_last else token_ids
        text: str = self._tokenizer.decode(said, skip_special_tokens=self._skip_special_tokens)
        thoughts, said_after = self._split(text, prompt_ids)
        content: str | None = said_after
        calls = list[_Call]()
        if self._parser_class is not None:
            in_channels = self.parsing.tool_parser in IN_CHANNELS
            with contextlib.suppress(Exception):  # a parser may raise anything about the model's text
                parser = self._parser()
                parser.set_prompt_token_ids(prompt_ids.tolist())
                in_channel, content, parsed = parser.parse(
                    text if in_channels else said_after,
                    self._copy(),
                    enable_auto_tools=self._calls_tools,
                    model_output_token_ids=token_ids,
                )
                # JSON may hold \ud800
                calls = [_Call(call.name, as_utf8(call.arguments), call.id) for call in parsed or ()]
                if in_channels:
                    thoughts, said_after = in_channel, text.partition(in_channel)[2] if in_channel else text
        if self._calls_tools and completion.finish_reason == "stop":
            content, calls = self._with_malformed(said_after, content, calls)
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if thoughts is not None:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id if call.id and call.id in text else _call_id(token_ids, len(prompt_ids), number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                    **({"error": call.error} if call.error else {}),
                }
                for number, call in enumerate(calls)
            ]
        return message

    def _with_malformed(self, said: str, content: str | None, calls: list[_Call]) -> tuple[str | None, list[_Call]]:
        """The content, and all calls after the thoughts, including malformed ones.

        One malformed call makes parsers drop other calls too. So if there are more beginnings than parsed calls, each
        call is read separately.
        """
        begins = [match.start() for match in CALL_BEGINS.finditer(said)]
        if not (begins or calls):
            begins = [match.start() for match in self._unmarked.finditer(said)]
        quoted = sum(len(CALL_BEGINS.findall(call.arguments)) for call in calls)
        missing = len(begins) - quoted - len(calls)
        if missing <= 0:
            return content, calls
        begins = begins[:MAX_READ_ALONE]
        head = said[: begins[0]]  # it may open a section of calls
        pieces = [said[begin:end] for begin, end in pairwise([*begins, len(said)])]
        all_calls = [call for piece in pieces for call in self._read(head, piece)]
        if sum(not call.error for call in all_calls) < len(calls):  # the parser needs the whole text
            all_calls = [*calls, *([_Call("unknown", "", error=UNREAD)] * min(missing, MAX_READ_ALONE))]
        return content if calls else head, all_calls

    def _read(self, head: str, written: str) -> list[_Call]:
        """The calls in a part of a text, or one call with an error."""
        try:
            parsed = self._parser().tool_parser.extract_tool_calls(head + written, self._copy()).tool_calls
        except Exception:  # as in `message`
            parsed = []
        name = self._names.search(written)
        return [_Call(call.function.name, as_utf8(call.function.arguments), call.id) for call in parsed] or [
            _Call(name[0] if name else "unknown", written, error=UNREAD)
        ]

    def _split(self, text: str, prompt_ids: np.ndarray) -> tuple[str | None, str]:
        """The thoughts of a response (None without thoughts), and the text after them."""
        prompt_end = self._tokenizer.decode(prompt_ids[-PROMPT_END:].tolist())
        in_thought = opens_thought(prompt_end, self.parsing.marks)
        thoughts, content = split_thoughts(text, self.parsing.marks, in_thought=in_thought)
        if content == text:
            return None, text
        return thoughts.strip("\n"), (content or "").lstrip("\n")

    def _parser(self) -> Any:
        """A new parser, since parsers are stateful."""
        assert self._parser_class is not None
        tools, kwargs = cast(Any, self._request.tools), dict(self.parsing.template_kwargs)
        return self._parser_class(self._tokenizer, tools, chat_template_kwargs=kwargs, model_config=self._model_config)

    def _copy(self) -> ChatCompletionRequest:
        """A copy of the request, since parsers may write into it."""
        return self._request.model_copy()


def _call_id(token_ids: list[int], position: int, number: int) -> str:
    """An id of nine characters, as Mistral's template needs; vLLM's ids are random, and some templates show them."""
    return hashlib.blake2b(f"{position} {number} {token_ids}".encode(), digest_size=5).hexdigest()[:9]
