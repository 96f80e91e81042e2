"""What the model said, as an assistant message: vLLM's parsers find thoughts and tool calls in a response.

It runs in the engine's actor. A response that no parser can read is a message without calls: model text never ends a
run. The parsers log a traceback for each such response, which is normal here, so their loggers are silenced.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import numpy as np
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from rlhf.answers.thoughts import opens_thought
from rlhf.rollout.requests import Completion, Parsing

PROMPT_END = 16  # tokens that hold the mark of a thought


class MessageReader:
    """Reads the responses of one model, whose tokenizer and config are vLLM's own.

    Raises:
        ValueError: the tokenizer lacks what a parser needs.
    """

    def __init__(self, parsing: Parsing, tokenizer: Any, model_config: Any) -> None:
        self.parsing = parsing
        for name in ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self._parser_class = ParserManager.get_parser(
                tool_parser_name=parsing.tool_parser,
                reasoning_parser_name=parsing.reasoning_parser,
                enable_auto_tools=parsing.tool_parser is not None,
                model_name=model_config.model,
                is_harmony=parsing.tool_parser == "openai",
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ValueError(
                f"rollout.tool_parser: vLLM's parser {parsing.tool_parser} does not fit this model: {error}. "
                "Name the parser of the model's own form of tool calls."
            ) from error
        self._tokenizer, self._model_config, self._template_kwargs = tokenizer, model_config, parsing.template_kwargs
        self._calls_tools = parsing.tool_parser is not None
        self._request = ChatCompletionRequest(
            messages=[],
            tools=list(parsing.tools) or None,
            tool_choice="auto" if parsing.tools else None,  # None: calls are looked for all the same
            chat_template_kwargs=parsing.template_kwargs,
        )
        # Marks of calls and thoughts may be control tokens, which remain in the text where a parser looks for them. Not
        # every parser of thoughts asks for them.
        request = self._request if self._parser_class is None else self._parser().adjust_request(self._copy())
        self._skip_special_tokens = bool(request.skip_special_tokens) and parsing.reasoning_parser is None

    def message(self, completion: Completion, prompt_ids: np.ndarray, *, keep_last: bool = False) -> dict[str, Any]:
        """The message of a response to these ids [P]; the id that stopped it is no text, unless `keep_last`."""
        token_ids = completion.token_ids.tolist()
        said = token_ids[:-1] if completion.finish_reason == "stop" and not keep_last else token_ids
        text: str = self._tokenizer.decode(said, skip_special_tokens=self._skip_special_tokens)
        if self._parser_class is None:
            return {"role": "assistant", "content": text}
        try:
            parser = self._parser()
            parser.set_prompt_token_ids(prompt_ids.tolist())
            reasoning, content, calls = parser.parse(
                text, self._copy(), enable_auto_tools=self._calls_tools, model_output_token_ids=token_ids
            )
        except Exception:  # whatever a parser raises, it is about what the model wrote
            return {"role": "assistant", "content": text}
        if reasoning and not (content or calls) and reasoning.strip() == text.strip() and not self._thinks(prompt_ids):
            content, reasoning = text, None  # some parsers take every text without a mark for a thought that was cut
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id if call.id and call.id in text else _call_id(token_ids, len(prompt_ids), number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls)
            ]
        return message

    def _thinks(self, prompt_ids: np.ndarray) -> bool:
        """Whether the prompt ends inside a thought."""
        return opens_thought(self._tokenizer.decode(prompt_ids[-PROMPT_END:].tolist()), self.parsing.marks)

    def _parser(self) -> Any:
        """A new one: parsers are stateful."""
        assert self._parser_class is not None
        tools: Any = self._request.tools
        return self._parser_class(
            self._tokenizer,
            tools,
            chat_template_kwargs=dict(self._template_kwargs),
            model_config=self._model_config,
        )

    def _copy(self) -> ChatCompletionRequest:
        """Parsers may write into it."""
        return self._request.model_copy()


def _call_id(token_ids: list[int], position: int, number: int) -> str:
    """Nine characters, as Mistral's template asks for; vLLM's are random, and some templates write them."""
    return hashlib.blake2b(f"{position} {number} {token_ids}".encode(), digest_size=5).hexdigest()[:9]
