"""The HTTP endpoint of programs: vLLM's own app, with sessions before it and a rollout's log in place of an engine.

    program ── HTTP ──> Guard ────────> vLLM's app ──> `_prompt` ── ask ──> worker: log of the rollout, engine
                        token, limits   forms of APIs                          │
            <────────────────────────── answer <────── `_Sampled` <── turn ────┘

It is a process of its own, which a rollout worker starts (`environments/endpoint.py`): a request of a megabyte or a
stalled connection delays neither the worker nor an engine. The turn is sampled before the app answers, so a stream
arrives in a few events, a client that disconnects loses only its answer, and an engine that dies costs only time.

Messages from the worker: {"open": token, "most_tokens"}, {"close": token}, {"ping": number}, {"answer": number, ...}.
Messages to the worker: {"ready": true}, the same pings, and {"ask": number, "session": token, "messages", "tools",
"parses_calls", "max_tokens", "counts", "ignored", "wants_ids"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
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
from rlhf.sampling import chat

KEEP_ALIVE_S = 600.0  # an idle connection stays open so long, since its agent may be working
REMEMBERED = 10_000  # tokens of ended rollouts; a late request is told that its rollout has ended
NAME = "policy"  # the model's name, whatever name a client uses
BODY_S = 60.0  # limit for a body to arrive
MAX_HEADER_BYTES, MAX_HEADERS = 64 << 10, 256  # of a request
MAX_SENT_BYTES = 2 * chat.MAX_BODY_BYTES  # of a body with its chunk sizes and trailers
READ_BYTES, STRANGER_BYTES = 16 << 10, 4 << 10  # read from one connection before the event loop serves others
ACCEPTED = 32  # connections accepted in a row
CLOSED = {HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
SPARE_FDS = 256  # for the process itself
RENDERED_CHARS_PER_TOKEN = 16  # a longer request is not rendered, since rendering blocks the driver

Scope = MutableMapping[str, Any]


@dataclass
class _Request:
    """One request while the app answers it."""

    token: str
    client: _Client
    asked: chat.RequestContents
    read: Callable[[], None]  # allows the client's next body to be read
    turn: dict[str, Any] | None = None  # the driver's answer
    refused: chat.RefusedError | None = None
    deltas: deque[DeltaMessage] = field(default_factory=deque)


@dataclass(eq=False)
class _Client:
    """The owner of connections: a rollout, or all clients that have sent no token yet."""

    most_tokens: int = 0
    connections: dict[_Connection, None] = field(default_factory=dict)  # the least recently used one first
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a body is read and parsed


_current: ContextVar[_Request] = ContextVar("request")


class Driver:
    """The socket to the driver."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.clients: dict[str, _Client] = {}  # open rollouts by token
        self.ended: deque[str] = deque(maxlen=REMEMBERED)  # tokens of ended rollouts
        self.strangers = _Client()  # the owner of connections without a token; of too many, the oldest is closed
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def meet(self, connection: _Connection) -> None:
        """Give a new connection a few seconds to send a token."""
        connection.move(self.strangers)
        connection.timer = asyncio.get_running_loop().call_later(chat.STRANGER_S, connection.end)
        if len(self.strangers.connections) > self._shares()[0]:
            next(iter(self.strangers.connections)).end()

    def _shares(self) -> tuple[int, int]:
        """The maximum number of connections without a token, and of each rollout."""
        fds, rollouts = resource.getrlimit(resource.RLIMIT_NOFILE)[0], max(1, len(self.clients))
        strangers = max(chat.MAX_STRANGERS, min(chat.MAX_STRANGERS + chat.CONNECTING * rollouts, fds // 4))
        return strangers, min(chat.MAX_CONNECTIONS, max(1, (fds - strangers - SPARE_FDS) // rollouts))

    def admit(self, connection: _Connection, client: _Client) -> None:
        """Give a connection to a rollout. If it has too many, close an idle one, or raise RefusedError if none is."""
        if connection.transport.is_closing():
            raise chat.RefusedError(HTTPStatus.BAD_REQUEST, "the client has gone")
        if connection.owner is not client and len(client.connections) >= self._shares()[1]:
            if (idle := next((each for each in client.connections if each.is_idle), None)) is None:
                raise chat.RefusedError(HTTPStatus.TOO_MANY_REQUESTS, "this key has too many requests at once")
            idle.end()
        connection.move(client)

    def send(self, message: Mapping[str, Any], most_chars: int | None = None) -> bool:
        """Send a message of at most `most_chars` characters. Returns whether it was sent."""
        text = json.dumps(message, default=_as_json, ensure_ascii=False)
        if fits := most_chars is None or len(text) <= most_chars:
            self._writer.write(text.encode(errors="surrogatepass") + b"\n")
        return fits

    async def ask(self, request: Mapping[str, Any], most_tokens: int) -> dict[str, Any]:
        """Ask the driver for a turn, which it samples to the end even if nobody waits for it any longer."""
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            fits = self.send({"ask": number, **request}, RENDERED_CHARS_PER_TOKEN * most_tokens)
            return await future if fits else {"full": True}
        finally:
            del self._asked[number]

    async def serve(self) -> None:
        """Receive messages of the driver until it disconnects."""
        while line := await self._reader.readline():
            message = json.loads(line)
            if "open" in message:
                self.clients[message["open"]] = _Client(message["most_tokens"])
            elif "close" in message:
                self.ended.append(message["close"])
                # the rollout may have started with an earlier process
                for connection in list(self.clients.pop(message["close"], _Client()).connections):
                    self.meet(connection)
            elif "ping" in message:
                self.send(message)
            elif (future := self._asked.get(message["answer"])) and not future.done():
                future.set_result(message)


def _as_json(value: Any) -> Any:
    """The JSON form of a part of a message that vLLM's app has parsed."""
    return value.model_dump() if hasattr(value, "model_dump") else list(value)


class _Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A connection of uvicorn. Little of it is read at a time, so that it does not delay other connections."""

    owner: _Client | None = None
    timer: asyncio.TimerHandle | None = None  # closes the connection if no token arrives
    _read = memoryview(bytearray(READ_BYTES))
    _left = MAX_HEADER_BYTES  # bytes that the rest of a header or body may have

    @property
    def guard(self) -> Guard:
        guard: Any = self.app
        return guard

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def move(self, client: _Client | None) -> None:
        """Change the owner of the connection."""
        if self.owner is not None:
            self.owner.connections.pop(self)
        if self.timer is not None:
            self.timer.cancel()
        self.owner = client
        if client is not None:
            client.connections[self] = None

    def end(self) -> None:
        self.move(None)
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.guard.driver.meet(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.move(None)
        super().connection_lost(exc)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._read[: STRANGER_BYTES if self.owner is self.guard.driver.strangers else READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        self.data_received(bytes(self._read[:nbytes]))
        if self._left < 0 and not self.transport.is_closing():
            self.send_400_response(f"the header has over {MAX_HEADER_BYTES} bytes, or the body over {MAX_SENT_BYTES}")

    def on_message_begin(self) -> None:
        if not self.is_idle:
            raise ValueError("a request before the answer to the last one")
        self._left = MAX_HEADER_BYTES
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) == MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._left = MAX_SENT_BYTES
        scope: Any = self.scope
        scope["connection"] = self
        super().on_headers_complete()
        self.flow.pause_reading()  # until its body may be read


class Guard:
    """Passes requests on to the app if they belong to an open rollout and are small enough."""

    def __init__(self, app: Any, driver: Driver) -> None:
        self._app, self.driver = app, driver

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        with contextlib.ExitStack() as held:
            try:
                token, client = self._client(scope)
                await client.reading.acquire()
                held.callback(client.reading.release)
                asked = chat.read_request_body(scope["path"], await _body(scope, receive), NAME)
            except chat.RefusedError as error:
                await _answer(error, scope, send)
                return
            await self._answer(_Request(token, client, asked, held.close), scope, receive, send)

    async def _answer(self, request: _Request, scope: Scope, receive: Any, send: Any) -> None:
        """Let the app answer a request."""
        _current.set(request)
        sent = json.dumps(request.asked.body).encode()
        scope["headers"] = [(b"content-type", b"application/json"), (b"content-length", str(len(sent)).encode())]
        waiting = deque([{"type": "http.request", "body": sent, "more_body": False}])

        async def receive_body() -> Any:
            return waiting.popleft() if waiting else await receive()

        failed: list[int] = []

        async def send_as_api(message: Any) -> None:
            """Write errors in the form of the API, whatever part of the app they come from."""
            if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
                failed.append(message["status"])
            elif not failed:
                await send(message)
            elif not message.get("more_body"):
                status = HTTPStatus(failed[0])
                error = request.refused or chat.RefusedError(status, chat.error_message(message.get("body", b"")))
                await _answer(error, scope, send)

        await self._app(scope, receive_body, send_as_api)

    def _client(self, scope: Scope) -> tuple[str, _Client]:
        """The token of an open rollout and the rollout, which owns the connection from now on. Raises RefusedError."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (scope["method"], scope["path"]) not in chat.ROUTES or headers.get(b"upgrade", "").lower() == "websocket":
            raise chat.RefusedError(
                HTTPStatus.NOT_FOUND, f"{scope['method']} {scope['path'][: chat.MAX_SHOWN]} is not served here"
            )
        token = headers.get(b"x-api-key") or headers.get(b"authorization", "").removeprefix("Bearer ").strip()
        if (client := self.driver.clients.get(token)) is None:
            reason = chat.ENDED if token in self.driver.ended else "no rollout has this key"
            raise chat.RefusedError(HTTPStatus.UNAUTHORIZED, reason)
        self.driver.admit(scope["connection"], client)
        return token, client


async def _body(scope: Scope, receive: Any) -> bytes:
    """The body of a request. Raises RefusedError as soon as it is too long."""
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    chat.check_size(int(announced) if announced.isdigit() else 0)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise chat.RefusedError(HTTPStatus.BAD_REQUEST, "the client has gone")
                body += message.get("body", b"")
                chat.check_size(len(body))
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise chat.RefusedError(HTTPStatus.REQUEST_TIMEOUT, f"the body has not arrived within {BODY_S:g} s") from None


async def _answer(error: chat.RefusedError, scope: Scope, send: Any) -> None:
    body = json.dumps(error.body(scope["path"])).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status in CLOSED or b"transfer-encoding" in dict(scope["headers"]):  # the rest of the body is not read
        headers.append((b"connection", b"close"))
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": int(error.status), "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _prompt(
    driver: Driver, _request: Any, messages: list[Any], *_: Any, tool_dicts: Any = None, **__: Any
) -> tuple[list[Any], list[Any]]:
    """Replaces the app's rendering: asks the driver for the turn after these messages of a chat."""
    current, asked = _current.get(), _current.get().asked
    current.read()
    try:
        turn = await driver.ask(
            {
                "session": current.token,
                "messages": messages,
                "tools": tool_dicts or [],
                "parses_calls": bool(tool_dicts) and asked.may_call,
                "max_tokens": asked.max_tokens,
                "counts": asked.path == chat.COUNT_TOKENS,
                "wants_ids": bool(asked.body.get("return_token_ids")),
                "ignored": asked.ignored,
            },
            current.client.most_tokens,
        )
        if "full" in turn:
            raise chat.full_context(current.client.most_tokens)
        if "refused" in turn:
            raise chat.RefusedError(HTTPStatus.BAD_REQUEST, turn["refused"])
    except chat.RefusedError as error:
        current.refused = error
        raise VLLMValidationError(error.message) from None
    current.turn = turn
    counted = turn["prompt_tokens"] if asked.path == chat.COUNT_TOKENS else 1
    return [], [tokens_input([0] * counted)]


class _Sampled:
    """Replaces the app's engine: it returns the turn that `_prompt` got."""

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
        """The turn as one output, or as the events of a stream, the first of which has all tokens."""
        current = _current.get()
        turn = current.turn
        assert turn is not None, "a prompt is rendered before it is sampled from"
        streams = params.output_kind == RequestOutputKind.DELTA
        current.deltas = deque(_deltas(turn["message"]) if streams else ())
        tokens = turn["token_ids"]
        pairs = zip(tokens, turn["logprobs"], strict=True)
        logprobs = [{token: Logprob(logprob, rank=None)} for token, logprob in pairs]
        for number in range(events := max(1, len(current.deltas))):
            ended = number == events - 1
            output = CompletionOutput(
                0, turn["message"]["content"], tokens, None, logprobs, finish_reason=turn["finish"] if ended else None
            )
            yield RequestOutput(request_id, None, turn["prompt_ids"], None, [output], ended)
            tokens, logprobs = [], []


class _Parsed(Parser):
    """Replaces the app's parser: it returns the driver's message for the turn, with the driver's ids of calls."""

    tool_parser_cls = ToolParser  # without a class the app refuses tools

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


def _fail_fast(schema: Any) -> None:
    """Stop validation at the first wrong item of a list, since one item of a response has 233 possible errors."""
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list | tuple):
            _fail_fast(part)


async def make_app(model: Mapping[str, Any], driver: Driver) -> Guard:
    """vLLM's app for the model of these arguments of vLLM, with the driver in place of its engine."""
    flags = ["--model", model["model"], "--served-model-name", NAME, "--enable-auto-tool-choice"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    model_config = AsyncEngineArgs(**model).create_model_config()
    model_config.quantization = None  # nothing is computed here
    hf_config: Any = model_config.hf_config
    hf_config.model_type = NAME  # for gpt_oss the app would write prompts itself, with today's date
    engine: Any = _Sampled(VllmConfig(model_config=model_config))
    for form in (ChatCompletionRequest, ResponsesRequest, AnthropicMessagesRequest, AnthropicCountTokensRequest):
        _fail_fast(form.__pydantic_core_schema__)
    app = build_app(args, ("generate",), engine.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    state = app.state
    state.online_renderer.parser = state.openai_serving_responses.parser = _Parsed
    state.openai_serving_chat.parser_cls = state.anthropic_serving_messages.parser_cls = _Parsed
    state.online_renderer.preprocess_chat = partial(_prompt, driver)
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # a traceback for each bad request
    return Guard(app, driver)


async def _serve(model: Mapping[str, Any], control: socket.socket, listening: socket.socket) -> None:
    driver = Driver(*await asyncio.open_unix_connection(sock=control, limit=MAX_BYTES))
    guard: Any = await make_app(model, driver)
    config = uvicorn.Config(
        guard, http=_Connection, ws="none", log_level="critical", access_log=False, proxy_headers=False,
        lifespan="off", backlog=ACCEPTED, timeout_keep_alive=int(KEEP_ALIVE_S),
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore  # signals are ignored: it ends with the driver
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    listening.listen(chat.BACKLOG)  # uvicorn's backlog is also how many it accepts in a row
    driver.send({"ready": True})
    heard = asyncio.ensure_future(driver.serve())
    await asyncio.wait({serving, heard}, return_when=asyncio.FIRST_COMPLETED)


def main() -> None:
    """Serve until the driver disconnects.

    The arguments are the descriptors of the socket to the driver and of the listening socket; standard input holds
    the `model` argument of `make_app` as JSON.
    """
    die_with_parent(9)
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    control, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    asyncio.run(_serve(json.load(sys.stdin), control, listening))
    os._exit(0)


if __name__ == "__main__":
    main()
