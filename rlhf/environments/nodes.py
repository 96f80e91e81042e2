"""Environments on several nodes: a session is opened on the node that has the fewest, and stays there.

    node of the driver                                           another node
      Spread.open ─> Hosts ──────────────────> processes           one actor
          │                                                          │
          └────────> RemoteHosts ── ask, tell, end ────────────>  NodeHosts ─> Hosts ─> processes
                          <── news: turns that are asked for, printed lines ──┘

Pure asyncio: how an actor is called, and started again, is the affair of `rlhf.cluster.environment_nodes`. A session
has its number from the driver, so that only requests and answers cross, as they go to a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlhf.config.environment import EnvironmentConfig
from rlhf.environments.hosts import Hosts
from rlhf.environments.sessions import HostedSession, Sessions
from rlhf.environments.turns import CallLimitError, FailedError
from rlhf.processes.code import Sources, changed_sources

CONNECT_S = 10.0  # that a connection to the endpoint may take, tried before anything starts
NEWS_S = 5.0  # that an actor waits for news before it says that there is none
SILENT_S = 90.0  # without such a sign it is lost: its event loop waits for a core, and for nothing else
REMEMBERED = 1000  # ended sessions: calls to an actor overtake each other, so the first request may come after the end

News = tuple[int, int, dict[str, Any]] | str  # session, number and request of a turn; or a printed line


class NodeHosts:
    """The processes of a node for the driver on another one; it is hosted in an actor.

    Args:
        port: of the endpoint on the driver's node; 0: there is none.

    Raises:
        ValueError: as of `Hosts`, the endpoint is not reached, or the code is not that of the driver's node.
    """

    def __init__(self, config: EnvironmentConfig, tools: Sequence[str], sources: Sources, port: int) -> None:
        if port:
            try:
                socket.create_connection((config.endpoint_host, port), timeout=CONNECT_S).close()
            except OSError as error:
                raise ValueError(
                    f"environment.endpoint_host={config.endpoint_host}: this node cannot connect to port {port} there "
                    f"({error}). Use an address of the driver's node that all nodes reach, and open its ports to them."
                ) from None
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._ended: deque[int] = deque(maxlen=REMEMBERED)
        self._hosts = _AskingHosts(config, tools, say=self._news.put, port=port)
        self._hosts.news = self._news
        if changed := "; ".join(changed_sources(sources, self._hosts.sources, noun="environment")):
            self._hosts.close()
            raise ValueError(
                f"{changed} differs from the copy on the node of the driver. Put the same code on all nodes."
            )

    async def unconfined(self) -> tuple[str, ...]:
        return self._hosts.unconfined

    async def ask(self, session: int, message: dict[str, Any]) -> Any:
        """The answer; an error that costs the rollout is returned."""
        if session in self._ended:
            return FailedError("the session has ended")
        try:
            return await self._hosts.ask(session, message)
        except (CallLimitError, FailedError) as error:
            return error

    async def tell(self, session: int, message: dict[str, Any]) -> None:
        self._hosts.tell(session, message)

    async def end(self, session: int, broken: bool) -> None:
        self._ended.append(session)
        self._hosts.end(session, broken=broken)

    async def news(self) -> list[News]:
        """What there is, as soon as there is something; RuntimeError if the processes cannot go on."""
        news: list[News] = []
        with contextlib.suppress(queue.Empty):
            news.append(await asyncio.to_thread(self._news.get, timeout=NEWS_S))
            while True:
                news.append(self._news.get_nowait())
        self._hosts.call_soon(lambda: None)  # raises it
        return news

    async def close(self) -> None:
        await asyncio.to_thread(self._hosts.close)


class _AskingHosts(Hosts):
    """Hosts that pass on what their coroutines ask for."""

    news: queue.SimpleQueue[News]

    def _answer_turn_request(self, session: int, number: int, request: dict[str, Any]) -> None:
        self.news.put((session, number, request))


class RemoteHosts(Sessions):
    """The sessions on another node; it is made in the event loop.

    Args:
        node: its name, for messages.
        here: those on the node of the driver.
        call: calls a method of the node's `NodeHosts`, with a deadline; whatever it raises, the actor is lost.
        say: gets what environments print there.
    """

    def __init__(
        self, node: str, here: Sessions, call: Callable[..., Awaitable[Any]], say: Callable[[str], None]
    ) -> None:
        super().__init__(here.config, here.about)
        self.opened, self.services = here.opened, here.services
        self.node, self._call, self._say = node, call, say
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ask(self, session: int, message: dict[str, Any]) -> Any:
        return await self._reach("ask", session, message)

    def tell(self, session: int, message: dict[str, Any]) -> None:
        self._begin(self._send("tell", session, message))

    def end(self, session: int, *, broken: bool) -> None:
        self._begin(self._send("end", session, broken))

    async def serve(self) -> str:
        """Hear the node's news until its actor is lost; says so, and why."""
        while not self._lost.done():
            with contextlib.suppress(FailedError):
                for each in await self._reach("news", deadline_s=SILENT_S):
                    if isinstance(each, str):
                        self._say(f"node {self.node}: {each}")
                    else:
                        self._answer_turn_request(*each)
        return self._lost.result()

    async def _send(self, method: str, *arguments: Any) -> None:
        with contextlib.suppress(FailedError):
            await self._reach(method, *arguments)

    async def _reach(self, method: str, *arguments: Any, deadline_s: float = math.inf) -> Any:
        """Call the actor; raises the error that it returns, or FailedError if it is lost."""
        call = asyncio.ensure_future(self._call(method, *arguments, deadline_s=deadline_s))
        try:
            await asyncio.wait({call, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            answer = call.result() if call.done() else FailedError(self._lost.result())
        except Exception as error:
            if not self._lost.done():
                self._lost.set_result(f"the environments of node {self.node} are lost: {error}")
            answer = FailedError(self._lost.result())
        finally:
            call.cancel()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Spread:
    """Opens sessions on all nodes.

    Args:
        here: the processes of the driver's node.
        say: gets warnings, and what environments of other nodes print.
    """

    def __init__(self, here: Hosts, say: Callable[[str], None]) -> None:
        self.here, self.say = here, say
        self._nodes: list[Sessions] = [here]

    async def open(self, row: Mapping[str, Any], seeds: Mapping[str, int]) -> HostedSession:
        """`Sessions.open` on the node with the fewest open sessions; of equal ones here, which needs no hop."""
        return await min(self._nodes, key=lambda node: node.open_sessions).open(row, seeds)

    async def keep(self, hosts: RemoteHosts, start_again: Callable[[], Awaitable[RemoteHosts]]) -> None:
        """Open sessions on another node too. When its actor is lost, it is started again, once each time."""
        while True:
            self._nodes.append(hosts)
            try:
                lost = await hosts.serve()
            finally:
                self._nodes.remove(hosts)
            self.say(f"warning: {lost} Its rollouts have failed; it is started again.")
            try:
                hosts = await start_again()
            except Exception as error:
                self.say(f"warning: the run goes on without environments on node {hosts.node}: {error}")
                return
            self.say(f"environments run on node {hosts.node} again")
