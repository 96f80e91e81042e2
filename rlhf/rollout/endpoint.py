"""The HTTP endpoint of programs: vLLM's own app, with sessions before it and the driver's log in place of an engine.

    program ── HTTP ──> Guard ────────> vLLM's app ──> `_prompt` ── ask ──> driver: log of the rollout, engine
                        token, limits   forms of APIs                          │
            <────────────────────────── answer <────── `_Sampled` <── turn ────┘

It is a process of its own, which the driver starts (`environments/endpoint.py`): a request of a megabyte or a stalled
connection holds up neither the driver nor an engine. The turn is sampled before the app answers, so a client that asks
for a stream gets it in a few events, one that goes away loses only its answer, and an engine that dies costs time.

The driver sends {"open": token}, {"close": token} and answers {"answer": number, ...}; it gets {"ready": true} and
{"ask": number, "session": token, "messages", "tools", "parses_calls", "max_tokens", "counts", "ignored",
"wants_ids"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind
from vllm.tool_parsers import ToolParser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from rlhf.processes.channel import MAX_BYTES
from rlhf.processes.outside import die_with_parent
from rlhf.rollout.chat import (
    BACKLOG,
    COUNT_TOKENS,
    ENDED,
    ROUTES,
    Asked,
    RefusedError,
    asked_of,
    check_size,
    message_of,
)

KEEP_ALIVE_S = 600.0  # an idle connection of an agent that works meanwhile
REMEMBERED = 10_000  # tokens of ended rollouts: a late request is told that its rollout has ended
NAME = "policy"  # of the model, whatever name a client uses

Scope = MutableMapping[str, Any]


@dataclass
class _Request:
    """One request while the app answers it."""

    token: str
    asked: Asked
    turn: dict[str, Any] | None = None  # what the driver has answered
    refused: RefusedError | None = None
    deltas: deque[DeltaMessage] = field(default_factory=deque)


_current: ContextVar[_Request] = ContextVar("request")


class Driver:
    """The socket to the driver.

    Attributes:
        tokens: of open rollouts. ended: of those that have ended.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.tokens: set[str] = set()
        self.ended: deque[str] = deque(maxlen=REMEMBERED)
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message, default=_plain).encode() + b"\n")

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The driver's answer; it samples to the end even if nobody waits any more."""
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send({"ask": number, **request})
        try:
            return await future
        finally:
            del self._asked[number]

    async def serve(self) -> None:
        """Hear the driver until it hangs up."""
        while line := await self._reader.readline():
            message = json.loads(line)
            if "open" in message:
                self.tokens.add(message["open"])
            elif "close" in message:
                self.tokens.discard(message["close"])
                self.ended.append(message["close"])
            elif (future := self._asked.get(message["answer"])) and not future.done():
                future.set_result(message)


def _plain(value: Any) -> Any:
    """A part of a message that vLLM's app has parsed."""
    return value.model_dump() if hasattr(value, "model_dump") else list(value)


class Guard:
    """Lets through what belongs to an open rollout, and is small enough to be read."""

    def __init__(self, app: Any, driver: Driver) -> None:
        self._app, self._driver = app, driver

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        try:
            token = self._token(scope)
            body = await _body(scope, receive)
            asked = asked_of(scope["path"], body, NAME)
        except RefusedError as error:
            await _answer(error, scope["path"], send)
            return
        request = _Request(token, asked)
        _current.set(request)
        sent = json.dumps(asked.body).encode()
        scope["headers"] = [(b"content-type", b"application/json"), (b"content-length", str(len(sent)).encode())]
        waiting = deque([{"type": "http.request", "body": sent, "more_body": False}])

        async def receive_body() -> Any:
            return waiting.popleft() if waiting else await receive()

        failed: list[int] = []

        async def send_as_api(message: Any) -> None:
            """Errors in the form of the API, whatever part of the app has found them."""
            if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
                failed.append(message["status"])
            elif not failed:
                await send(message)
            elif not message.get("more_body"):
                status = HTTPStatus(failed[0])
                error = request.refused or RefusedError(status, message_of(message.get("body", b"")))
                await _answer(error, scope["path"], send)

        await self._app(scope, receive_body, send_as_api)

    def _token(self, scope: Scope) -> str:
        """The token of an open rollout; raises RefusedError."""
        if (scope["method"], scope["path"]) not in ROUTES:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"{scope['method']} {scope['path']} is not served here")
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        token = headers.get(b"x-api-key") or headers.get(b"authorization", "").removeprefix("Bearer ").strip()
        if token in self._driver.tokens:
            return token
        reason = ENDED if token in self._driver.ended else "no rollout has this key"
        raise RefusedError(HTTPStatus.UNAUTHORIZED, reason)


async def _body(scope: Scope, receive: Any) -> bytes:
    """The body of a request; RefusedError as soon as it is too long."""
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    check_size(int(announced) if announced.isdigit() else 0)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the client has gone")
        body += message.get("body", b"")
        check_size(len(body))
        if not message.get("more_body"):
            return bytes(body)


async def _answer(error: RefusedError, path: str, send: Any) -> None:
    body = json.dumps(error.body(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers.append((b"connection", b"close"))
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": int(error.status), "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _prompt(
    driver: Driver, _request: Any, messages: list[Any], *_: Any, tool_dicts: Any = None, **__: Any
) -> tuple[list[Any], list[Any]]:
    """In place of the app's rendering: have the turn after these messages sampled. They have the form of chats here."""
    current, asked = _current.get(), _current.get().asked
    try:
        turn = await driver.ask(
            {
                "session": current.token,
                "messages": messages,
                "tools": tool_dicts or [],
                "parses_calls": bool(tool_dicts) and asked.may_call,
                "max_tokens": asked.max_tokens,
                "counts": asked.path == COUNT_TOKENS,
                "wants_ids": bool(asked.body.get("return_token_ids")),
                "ignored": asked.ignored,
            }
        )
        if "refused" in turn:
            raise RefusedError(HTTPStatus.BAD_REQUEST, turn["refused"], full_context=turn["full_context"])
    except RefusedError as error:
        current.refused = error
        raise VLLMValidationError(error.message) from None
    current.turn = turn
    counted = turn["prompt_tokens"] if asked.path == COUNT_TOKENS else 1
    return [], [tokens_input([0] * counted)]


class _Sampled:
    """What the app takes for its engine: it returns the turn that `_prompt` got."""

    errored = is_stopped = False
    is_running = True

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer, self.input_processor = renderer_from_config(vllm_config), None

    def check_admission(self, *_: Any) -> None:
        """Every request is admitted."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def generate(self, _prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
        """The turn: whole, or for a stream all tokens with the first event of its message."""
        current = _current.get()
        turn = current.turn
        assert turn is not None, "a prompt is rendered before it is sampled from"
        streams = params.output_kind == RequestOutputKind.DELTA
        current.deltas = deque(_deltas(turn["message"]) if streams else ())
        logprobs = [
            {token: Logprob(logprob, rank=None)}
            for token, logprob in zip(turn["token_ids"], turn["logprobs"], strict=True)
        ]
        tokens = turn["token_ids"]
        for number in range(events := max(1, len(current.deltas))):
            ended = number == events - 1
            output = CompletionOutput(
                0, turn["message"]["content"], tokens, None, logprobs, finish_reason=turn["finish"] if ended else None
            )
            yield RequestOutput(request_id, None, turn["prompt_ids"], None, [output], ended)
            tokens, logprobs = [], []


class _Parsed(Parser):
    """What the app takes for a parser: the message that the driver has for the turn, with its own ids of calls."""

    tool_parser_cls = ToolParser  # that there is one lets clients pass tools

    def __init__(self, *_: Any, **__: Any) -> None:
        self._reasoning_parser = self._tool_parser = None

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return True

    def parse(self, *_: Any, **__: Any) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        turn = _current.get().turn
        assert turn is not None
        message = turn["message"]
        calls = [FunctionCall(id=call["id"], **call["function"]) for call in message.get("tool_calls", ())]
        return message.get("reasoning_content") or None, message["content"] or (None if calls else ""), calls

    def parse_delta(self, *_: Any, **__: Any) -> DeltaMessage | None:
        deltas = _current.get().deltas
        return deltas.popleft() if deltas else None


def _deltas(message: Mapping[str, Any]) -> Iterator[DeltaMessage]:
    """The events of a streamed message: its thought, its text, its calls."""
    if thought := message.get("reasoning_content"):
        yield DeltaMessage(reasoning=thought)
    if message["content"]:
        yield DeltaMessage(content=message["content"])
    for number, call in enumerate(message.get("tool_calls", ())):
        function = DeltaFunctionCall(**call["function"])
        yield DeltaMessage(tool_calls=[DeltaToolCall(id=call["id"], type="function", index=number, function=function)])


async def app_of(plan: Mapping[str, Any], driver: Driver) -> Guard:
    """vLLM's app for this model, with the driver in place of its engine.

    Args:
        plan: {"model": arguments of vLLM that say which model it is}
    """
    flags = ["--model", plan["model"]["model"], "--served-model-name", NAME, "--enable-auto-tool-choice"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    model_config = AsyncEngineArgs(**plan["model"]).create_model_config()
    model_config.quantization = None  # nothing is computed here
    hf_config: Any = model_config.hf_config
    hf_config.model_type = NAME  # of gpt_oss the app would write prompts itself, with today's date
    engine: Any = _Sampled(VllmConfig(model_config=model_config))
    app = build_app(args, ("generate",), engine.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    state = app.state
    state.online_renderer.parser = state.openai_serving_responses.parser = _Parsed
    state.openai_serving_chat.parser_cls = state.anthropic_serving_messages.parser_cls = _Parsed
    state.online_renderer.preprocess_chat = partial(_prompt, driver)
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # a traceback for each bad request
    return Guard(app, driver)


class _Server(uvicorn.Server):
    """It ends with the driver, whose signals are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def _serve(plan: Mapping[str, Any], control: socket.socket, listening: socket.socket) -> None:
    driver = Driver(*await asyncio.open_unix_connection(sock=control, limit=MAX_BYTES))
    guard: Any = await app_of(plan, driver)
    config = uvicorn.Config(
        guard, log_level="critical", access_log=False, lifespan="off", backlog=BACKLOG,
        timeout_keep_alive=int(KEEP_ALIVE_S),
    )  # fmt: skip
    server = asyncio.ensure_future(_Server(config).serve(sockets=[listening]))
    driver.send({"ready": True})
    heard = asyncio.ensure_future(driver.serve())
    await asyncio.wait({server, heard}, return_when=asyncio.FIRST_COMPLETED)


def main() -> None:
    """Serve until the driver hangs up.

    Arguments: the socket to the driver, and the one that listens; the plan of `app_of` comes by standard input.
    """
    die_with_parent(9)
    control, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    asyncio.run(_serve(json.load(sys.stdin), control, listening))
    os._exit(0)


if __name__ == "__main__":
    main()
