"""The parts of verifiers that start processes or listen at a port, in place: one process plays many of its rollouts.

verifiers has a program with the loop of turns and a server for each set of tools, which it starts for each rollout, and
a server between them and the model. Here the same code runs in the event loop of the environment's process, which may
be without a network:

    loop of turns ── HTTP over a pair of sockets ──> verifiers' own interception ──> Policy ──> generate
       └── tools: verifiers' own toolsets, called through the protocol MCP without a transport

This module imports verifiers, so it is loaded after `adapters/verifiers.py` has checked that it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from socket import socketpair
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import mcp
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1 import rollout as vf_rollout
from verifiers.v1.clients.client import Client, RelayReply
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import model_error
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.mcp import SharedToolServer
from verifiers.v1.runtimes import subprocess as vf_subprocess
from verifiers.v1.utils import loaders

from rlhf.environments import seeding

FIRST_PORT = 1 << 16  # no real port has such a number
LOOP = "rlhf_loop"  # the id by which verifiers finds `Loop`
OVERFLOW = "This rollout has reached its limit: the maximum context length is used up."  # ends a loop of verifiers
CONTEXT = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url="http://policy", api_key_var="NONE"))

__all__ = ["Loop"]  # what verifiers looks for in a module with a harness


@dataclass
class Rollout:
    """One rollout, in the context of its tasks."""

    generate: Callable[..., Any]
    seed: int | None  # of what comes after the set-up; None once it has begun
    session: Any = None  # verifiers' own record of it


_rollout: ContextVar[Rollout] = ContextVar("rollout")
_servers: dict[str, MCPServer] = {}  # of tools, by the address that the loop is told


class UnusableError(Exception):
    """An environment cannot work here; the message says why."""


class Episodes:
    """Plays the tasks of one environment.

    Attributes:
        count: number of its tasks; None if there is no end of them.
        tools: JSON schemas of the tools that its first task offers.

    Raises UnusableError if it cannot work in this process.
    """

    def __init__(self, id: str, args: Mapping[str, Any]) -> None:
        config = loaders.resolve_env_config({"taskset": {**args, "id": id}})
        self._env = loaders.load_environment(_in_place(config, id))
        self._tasks: list[Any] = []
        self._more = iter(self._env.taskset)
        self._of_load = seeding.RandomState(0)  # tasks that are drawn are the same on each node, and after a resume
        first, is_bounded = self.task(0), self._env.taskset.bounded
        shared = self._env.taskset.toolsets(self._env.taskset.config)
        _check_placement(first, toolsets := [*shared, *first.toolsets(first.config)])
        self.tools = asyncio.run(_schemas(toolsets))
        if is_bounded:
            with self._of_load:
                self._tasks += self._more
        self.count = len(self._tasks) if is_bounded else None
        self._serving: asyncio.Future[None] | None = None

    def task(self, number: int) -> Any:
        """Task `number`, from 0. Raises LookupError if there are fewer."""
        while len(self._tasks) <= number:
            try:
                with self._of_load:
                    self._tasks.append(next(self._more))
            except StopIteration:
                raise LookupError(f"it has only {len(self._tasks)} tasks") from None
        return self._tasks[number]

    async def play(self, number: int, generate: Callable[..., Any], seed: int) -> Any:
        """The finished episode of a task. `seed` is the group's: its members are set up in one state."""
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._serve())
        await asyncio.shield(self._serving)  # the end of the rollout that began it is not the end of it
        _rollout.set(Rollout(generate, random.getrandbits(32)))
        seeding.seed_all(seed)
        (slot,) = self._env.slots(self.task(number))
        return await self._env.run_slot(slot, CONTEXT)

    async def _serve(self) -> None:
        """Once in each process, what `Env.serving` does with listening servers."""
        loop_back(asyncio.get_running_loop())
        vf_subprocess.CACHE_DIR = Path(tempfile.gettempdir())
        shared = {}
        for toolset in self._env.taskset.toolsets(self._env.taskset.config):
            url = toolset.config.url or f"shared/{id(self)}/{toolset.server_name}"
            shared[toolset.server_name] = SharedToolServer(url=url, local=True, external=bool(toolset.config.url))
            if not toolset.config.url:
                await toolset._exit_stack.__aenter__()
                await toolset.setup()
                _servers[url] = mcp_server(toolset)
        self._env._shared_tools, self._env._interception = shared, Interception()
        await self._env._interception.start()
        await self._env.start()


def fields(id: str) -> list[str]:
    """The names of the arguments that a taskset takes."""
    return [name for name in loaders.taskset_config_type(id).model_fields if name != "id"]


def _in_place(config: Any, id: str) -> Any:
    """The config with the loop of this module for its one agent, in a process of this machine."""
    roles = agent_config_fields(config)
    if len(roles) != 1:
        raise UnusableError(f"it has {len(roles)} agents ({', '.join(roles)}), but a rollout has one reward")
    ((role, agent),) = roles.items()
    own = agent.harness.id if agent.harness is not None else loaders.default_harness_id(id)
    if own not in ("bash", "null"):  # bash is what verifiers takes where nothing is named
        raise UnusableError(f"it has a harness of its own ({own}), which starts programs that listen at ports")
    changes = {"harness": loaders.harness_config_type(LOOP)(id=LOOP), "runtime": vf.SubprocessConfig()}
    return config.model_copy(update={role: agent.model_copy(update=changes)})


def _check_placement(task: Any, toolsets: list[Any]) -> None:
    """Raises UnusableError if the task or one of these sets of tools needs a container."""
    if type(task).NEEDS_CONTAINER or task.data.image is not None:
        raise UnusableError("its tasks need a container")
    for toolset in toolsets:
        if not toolset.config.url and toolset.config.runtime.type != "subprocess":
            raise UnusableError(f"its tools need a container ({type(toolset).__name__})")


class Policy(Client):
    """Answers the model's calls of one rollout with turns of the engine."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        self._generate = generate

    async def get_response(self, dialect: Any, body: dict[str, Any], *_: Any, **__: Any) -> Any:
        turn = await self._generate(body["messages"], tools=body.get("tools") or [], max_tokens=_most(body))
        if turn.finish_reason == "length" and not turn.token_ids:
            raise model_error(OVERFLOW, status_code=400)
        reason = "stop" if turn.finish_reason == "stop" else "length"
        raw = {
            "id": "turn",
            "object": "chat.completion",
            "created": 0,
            "model": CONTEXT.model,
            "choices": [{"index": 0, "message": dict(turn), "finish_reason": reason}],
            "usage": {"prompt_tokens": 0, "completion_tokens": len(turn.token_ids), "total_tokens": 0},
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response

    async def relay(self, dialect: Any, body: dict[str, Any], *_: Any, **__: Any) -> RelayReply:
        response = await self.get_response(dialect, body)

        async def events() -> AsyncIterator[bytes]:
            for event in dialect.stream_events(response.raw):
                yield event

        return RelayReply("text/event-stream", events(), self.close)


def _most(body: Mapping[str, Any]) -> int | None:
    return body.get("max_completion_tokens") or body.get("max_tokens")


class Interception(InterceptionServer):
    """verifiers' server between a loop and the model, with a `Policy` for each rollout."""

    def register(self, session: Any) -> tuple[str, str]:
        registered = super().register(session)
        _rollout.get().session = session
        session.client = Policy(_rollout.get().generate)
        return registered


def loop_back(loop: asyncio.AbstractEventLoop) -> None:
    """Let servers of this event loop listen without a network: who connects to one gets a pair of sockets."""
    served: dict[int, Any] = {}
    connect = loop.create_connection

    async def create_server(protocol_factory: Any, *_: Any, **__: Any) -> Any:
        served[port := FIRST_PORT + len(served)] = protocol_factory
        return SimpleNamespace(sockets=[SimpleNamespace(getsockname=lambda: ("127.0.0.1", port))], close=lambda: None)

    async def create_connection(protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if port not in served:
            return await connect(protocol_factory, host, port, **options)
        ours, theirs = socketpair()
        await loop.connect_accepted_socket(served[port], theirs)
        return await connect(protocol_factory, sock=ours)

    loop.create_server, loop.create_connection = create_server, create_connection  # type: ignore[method-assign]


# --- the loop of turns ---


def _chat_program() -> ModuleType:
    """verifiers' program that asks the model and calls tools, as a module; it reaches our tools without a network."""
    program = ModuleType("verifiers_chat_program")
    exec(compile(CHAT_PROGRAM_SOURCE, program.__name__, "exec"), program.__dict__)
    away = program.mcp_client

    @contextlib.asynccontextmanager
    async def mcp_client(spec: Mapping[str, Any]) -> AsyncIterator[Any]:
        server = _servers.get(spec["url"])
        async with away(spec) if server is None else mcp.Client(server) as client:
            yield client

    program.mcp_client = mcp_client  # type: ignore[attr-defined]
    return program


_program: Any = _chat_program()
_ssl = ssl.create_default_context()  # unused, but each client would make its own


class Loop(NullHarness):
    """The harness `null`, whose program runs in this process."""

    async def setup(self, runtime: Any) -> None:
        """Nothing to install."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Mapping[str, str], data: Any,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:  # fmt: skip
        rollout = _rollout.get()
        if rollout.seed is not None:
            seeding.seed_all(rollout.seed)
            rollout.seed = None
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        messages += said
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None, verify=_ssl, trust_env=False))
            client = _program.AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http, max_retries=0)
            tools, dispatch, connected = await _program.connect_mcp({"mcpServers": servers}, stack)
            compactor = _program.Compactor(client, ctx.model, tools, False, None)
            args = argparse.Namespace(
                tool_interception_url=tool_interception_url, api_key=secret, bash=False, edit=False, search=False
            )
            await _program.run_chat_loop(args, compactor, messages, dispatch, connected, http)
        return vf.ProgramResult(0, "", "")


sys.modules[LOOP] = sys.modules[__name__]


# --- tools ---


def mcp_server(toolset: Any) -> MCPServer:
    """The tools of a set. Their state is that of the rollout that calls them; a failed call does not change it."""

    async def pull() -> Any:
        return _rollout.get().session.trace.state.model_copy(deep=True)

    async def push(before: bytes) -> None:
        _rollout.get().session.trace.state = toolset.state

    toolset._pull_state, toolset._push_state = pull, push
    server = MCPServer(toolset.server_name or type(toolset).__name__, log_level="ERROR")
    toolset.register(server)
    return server


async def _schemas(toolsets: list[Any]) -> list[dict[str, Any]]:
    """The schemas of the tools of these sets, as the model gets them; none of sets that another machine serves."""
    own = {toolset.server_name: mcp_server(toolset) for toolset in toolsets if not toolset.config.url}
    _servers.update(own)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lambda: [_servers.pop(name) for name in own])
        schemas, _, _ = await _program.connect_mcp({"mcpServers": {name: {"url": name} for name in own}}, stack)
        return list(schemas)


@contextlib.asynccontextmanager
async def serve_tools(
    toolsets: list[Any], runtime: Any, shared: Mapping[str, Any] | None = None, *, state_route: str = "", **_: Any
) -> AsyncIterator[dict[str, str]]:
    """The tools of a rollout, by the names of their sets; stands for verifiers' function of this name."""
    urls = {name: server.url for name, server in (shared or {}).items()}
    async with contextlib.AsyncExitStack() as stack:
        for toolset in toolsets:
            name = toolset.server_name
            if name in urls:
                raise vf.ToolsetError(f"two sets of tools are called {name!r}")
            urls[name] = toolset.config.url or f"{state_route}/{name}"
            if not toolset.config.url:
                await stack.enter_async_context(toolset._exit_stack)
                await toolset.setup()
                await toolset.setup_task(_rollout.get().session.trace.task.data)
                _servers[urls[name]] = mcp_server(toolset)
                stack.callback(_servers.pop, urls[name])
        yield urls


vf_rollout.serve_tools = serve_tools
logging.getLogger("verifiers.v1.interception").setLevel(logging.ERROR)  # it warns of each rollout that ends at a limit
