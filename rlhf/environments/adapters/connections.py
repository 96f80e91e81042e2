"""Two ways to a web application: its address, or the application itself (ASGI), run in this process without a socket.

Both have `get(path, body)` for JSON, `connect(path)` for a WebSocket with `send`, `recv` and `close`, and `closed`, the
exception of a WebSocket that the other side has closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Callable
from typing import Any

from rlhf.environments.adapters import load_package

START_S = 10.0  # for an answer, and for a connection
MAX_MESSAGE = 100 << 20  # bytes, as in the client of OpenEnv
JSON = "application/json"


class Remote:
    """An application at an address."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").replace("//localhost", "//127.0.0.1", 1)  # without a look-up
        self._websockets = load_package("websockets", install="websockets", environment="openenv")
        self.closed: type[Exception] = self._websockets.ConnectionClosed

    def get(self, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, body, {"Content-Type": JSON})
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.load(answer)

    async def connect(self, path: str) -> Any:
        address = f"ws{self._url.removeprefix('http')}{path}"
        return await self._websockets.connect(address, open_timeout=START_S, max_size=MAX_MESSAGE)


class InProcess:
    """An application of this process."""

    closed: type[Exception] = ConnectionError

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    def get(self, path: str, body: bytes | None = None) -> Any:
        answered: list[dict[str, Any]] = []

        async def request() -> dict[str, Any]:
            return {"type": "http.request", "body": body or b""}

        async def answer(message: dict[str, Any]) -> None:
            answered.append(message)

        how = {"method": "GET" if body is None else "POST", "headers": [(b"content-type", JSON.encode())]}
        asyncio.run(self._app(_scope("http", path, **how), request, answer))
        if (status := answered[0]["status"]) != 200:
            raise OSError(f"HTTP status {status} for {path}")
        return json.loads(b"".join(message.get("body", b"") for message in answered[1:]))

    async def connect(self, path: str) -> Any:
        return _Socket(self._app, path)


class _Socket:
    """A WebSocket between this process and an application that runs as a task."""

    def __init__(self, app: Callable[..., Any], path: str) -> None:
        self._heard, self._said = asyncio.Queue[dict[str, Any]](), asyncio.Queue[dict[str, Any]]()
        self._heard.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.ensure_future(app(_scope("websocket", path, headers=[]), self._heard.get, self._said.put))
        self._task.add_done_callback(lambda _: self._said.put_nowait({"type": "websocket.close"}))

    async def send(self, text: str) -> None:
        await self._heard.put({"type": "websocket.receive", "text": text})

    async def recv(self) -> str:
        while (message := await self._said.get())["type"] != "websocket.close":
            if message["type"] == "websocket.send":
                return str(message["text"])
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()):
            raise error
        raise ConnectionError("the application has closed the connection")

    async def close(self) -> None:
        await self._heard.put({"type": "websocket.disconnect", "code": 1000})
        with contextlib.suppress(Exception):
            await self._task


def _scope(kind: str, path: str, **more: Any) -> dict[str, Any]:
    scope: dict[str, Any] = {"type": kind, "asgi": {"version": "3.0"}, "http_version": "1.1", "path": path}
    scope |= {"raw_path": path.encode(), "root_path": "", "query_string": b"", "subprotocols": []}
    here = {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    return {**scope, **here, "scheme": "ws" if kind == "websocket" else "http", **more}
