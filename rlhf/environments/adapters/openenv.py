"""An environment of OpenEnv: its server at an address, without the package here, or its application in this process.

    GET /schema                                    the fields of an action
    POST /mcp                                      the tools that it offers, in JSON-RPC
    WS  /ws   {"type": "reset" | "step", "data"}   -> {"type": "observation", "data": {"observation", "reward", "done"}}

An action is the text of a turn, if it has one field of text or `args.action` names it. Otherwise the model calls tools:
those that the server offers (MCP), or one tool with the fields of an action.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from rlhf.environments.adapters.connections import InProcess, Remote
from rlhf.processes.code import import_problem, load_module

OWN = ("done", "reward", "metadata")  # fields of every observation, which the model is not shown
ARGS = ("action", "observation", "reset", "reward", "system_prompt")
ACT = "act"  # the tool for an action with several fields
OF_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # codes of errors that the action may have caused


class OpenEnv:
    """Plays rollouts; each has a session of the server at `url`, or of the application `app`.

    Args:
        app: `package.server.app:app`, or `path/to/app.py:app`.
        args: `action`: the field of an action that gets the model's text; `observation`: the field that the model is
            shown, by default all; `reset`: arguments of the environment's reset; `reward`: `sum` of the steps (the
            default), or `last`; `system_prompt`.

    Raises ValueError if no such server answers, or an argument does not fit its actions.
    """

    def __init__(self, url: str | None, app: str | None, args: Mapping[str, Any]) -> None:
        self._args = {"reward": "sum", **args}
        if unknown := [name for name in args if name not in ARGS]:
            raise ValueError(f"environment.args.{unknown[0]}: openenv has no such argument. Use {', '.join(ARGS)}.")
        if (reward := self._args["reward"]) not in ("sum", "last"):
            raise ValueError(f"environment.args.reward={reward}: not how a rollout is judged. Use sum or last.")
        self._place = f"environment.url={url}" if app is None else f"environment.app={app}"
        self._server = Remote(url or "") if app is None else _loaded(app)
        schema = self._schema()
        fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
        self._offers_mcp = not fields or "tool_name" in fields
        texts = [name for name, field in fields.items() if field.get("type") == "string"]
        needed = [name for name in schema.get("required", ()) if name != "metadata"]
        self._field = self._args.get("action")
        if self._field is not None and (self._offers_mcp or self._field not in fields):
            known = "it offers tools of its own" if self._offers_mcp else f"its actions have {', '.join(fields)}"
            raise ValueError(f"environment.args.action={self._field}: {known}. Correct the name, or remove the key.")
        if self._field is None and len(texts) == 1 and needed in ([], texts):
            self._field = texts[0]
        act = {"name": ACT, "description": schema.get("description", ""), "parameters": schema | {"properties": fields}}
        offered = self._offered() if self._offers_mcp else [act] if self._field is None else []
        self.tools = [{"type": "function", "function": tool} for tool in offered]

    def _schema(self) -> dict[str, Any]:
        """The schema of an action."""
        try:
            return dict(self._server.get("/schema")["action"])
        except Exception as error:  # of the connection, or the answer of another server
            raise ValueError(
                f"{self._place}: no server of OpenEnv answers there ({type(error).__name__}: {error}). Start it, such "
                "as `uvicorn server.app:app --port 8000` in the folder of the environment, or correct the name."
            ) from None

    def _offered(self) -> list[dict[str, Any]]:
        """The tools that the server offers, as chat templates read them."""
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}).encode()
        try:
            tools = self._server.get("/mcp", body)["result"]["tools"]
        except (OSError, ValueError, LookupError) as error:
            raise ValueError(
                f"{self._place}: its actions are calls of tools, and it lists none ({error!r}). Let the class of the "
                "environment derive from MCPEnvironment, or give its actions fields."
            ) from None
        nothing = {"type": "object", "properties": {}}
        return [
            {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("inputSchema") or tool.get("input_schema") or nothing,
            }
            for tool in tools
        ]

    async def open(self, row: Mapping[str, Any], seed: int) -> _Session:
        """A session of the server, after its reset."""
        session = _Session(await self._server.connect("/ws"), self._args.get("observation"), self._server.closed)
        try:
            await session.ask("reset", {"seed": seed, **self._args.get("reset", {})})
        except BaseException:
            await session.close()
            raise
        return session

    async def play(self, row: Mapping[str, Any], generate: Any, session: _Session) -> dict[str, Any]:
        """Turn after turn, until the environment or a limit ends the rollout, or the model calls no tool."""
        system = self._args.get("system_prompt")
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": session.shown or "Begin."})
        while not session.done:
            turn = await generate(messages, tools=self.tools)
            messages.append(turn)
            if not turn.token_ids:  # past a limit
                break
            if self._field is not None:
                messages.append({"role": "user", "content": await session.step({self._field: turn["content"] or ""})})
            for call in turn.get("tool_calls") or ():
                if not session.done:
                    named = {"name": call["function"]["name"], "tool_call_id": call.get("id")}
                    messages.append({"role": "tool", **named, "content": await self._called(session, call["function"])})
            if turn.finish_reason != "stop" or messages[-1] is turn:
                break
        rewards = session.rewards or [0.0]
        score = sum(rewards) if self._args["reward"] == "sum" else rewards[-1]
        return {"score": score, "steps": float(len(session.rewards)), "errors": float(session.errors)}

    async def _called(self, session: _Session, function: Mapping[str, Any]) -> str:
        """Make a call of the model; returns its answer."""
        name, written = function["name"], function.get("arguments") or {}
        try:
            arguments = json.loads(written) if isinstance(written, str) else written
            if not self._offers_mcp and name != ACT:
                raise ValueError(f"Tool {name} not found.")
        except ValueError as error:
            return str({"error": str(error)})
        mcp = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return await session.step(mcp if self._offers_mcp else arguments)


def _loaded(app: str) -> InProcess:
    """The application of this name. Raises ValueError if it cannot be imported."""
    install = "; `environment.python` names the interpreter that has it"
    try:
        loaded = getattr(load_module(app), app.rpartition(":")[2], None)
    except BaseException as error:  # a module may raise anything
        raise ValueError(f"environment.app={app}: {import_problem(app, error, install=install)}.") from None
    if not callable(loaded):
        raise ValueError(f"environment.app={app}: the module has no such application. Correct the name.")
    return InProcess(loaded)


class ServerError(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code


class _Session:
    """The connection of one rollout, and what the environment said last."""

    def __init__(self, socket: Any, field: str | None, closed: type[Exception]) -> None:
        self._socket, self._field, self._closed = socket, field, closed
        self.shown, self.done, self.errors = "", False, 0
        self.rewards: list[float] = []  # of the steps

    async def step(self, action: Any) -> str:
        """What the environment says of an action; of one that it refuses, why."""
        try:
            self.rewards.append(await self.ask("step", action))
        except ServerError as error:
            if error.code not in OF_ACTION:
                raise
            self.errors += 1
            return str({"error": str(error)})
        return self.shown

    async def ask(self, do: str, data: Any) -> float:
        """Reset or step; returns the reward. Raises ServerError with the server's reason."""
        with contextlib.suppress(self._closed):  # a server that is full says so before it closes
            await self._socket.send(json.dumps({"type": do, "data": data}))
        answer = json.loads(await self._socket.recv())
        said = answer.get("data", {})
        if answer["type"] == "error":
            wrong = "; ".join(f"{error.get('loc')}: {error.get('msg')}" for error in said.get("errors", ()))
            raise ServerError(said.get("code", ""), f"{said.get('message')} {wrong}".rstrip())
        self.shown, self.done = self._text(said["observation"]), bool(said.get("done"))
        return float(said.get("reward") or 0.0)

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self._socket.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        """What the model is shown of an observation: a field, the result of a tool, or the fields that say something.

        An observation without fields of its own, as the base class of OpenEnv, has only `metadata` to say it in.
        """
        if self._field is not None:
            if self._field not in observation:
                raise ServerError(
                    "", f"args.observation={self._field}: an observation has only {', '.join(observation)}"
                )
            return _written(observation[self._field])
        if "tool_name" in observation:
            error, result = observation.get("error"), observation.get("result")
            return str({"error": error.get("message")}) if error else _written(result)
        own = {name: value for name, value in observation.items() if name not in OWN} or observation.get("metadata", {})
        said = {name: _written(value) for name, value in own.items() if value not in (None, "", [], {})}
        return "\n".join(text if len(said) == 1 else f"{name}: {text}" for name, text in said.items())


def _written(value: Any) -> str:
    """A value as text; of the result of an MCP tool its data, or its texts."""
    if isinstance(value, Mapping) and value.get("data") is not None:
        value = value["data"]
    elif isinstance(value, Mapping) and isinstance(value.get("content"), list):
        return "\n".join(str(block.get("text", block)) for block in value["content"])
    return value if isinstance(value, str) else json.dumps(value)
