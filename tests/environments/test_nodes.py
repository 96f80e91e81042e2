"""Sessions on several nodes: where they are opened, what crosses, and what the loss of a node costs. No Ray."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_environments import call

from rlhf.config.environment import PROGRAM, EnvironmentConfig
from rlhf.environments import nodes, sessions
from rlhf.environments.hosts import Hosts
from rlhf.environments.nodes import NodeHosts, RemoteHosts, Spread
from rlhf.environments.sessions import Sessions
from rlhf.environments.turns import CallLimitError, FailedError

FILE = Path(__file__).parent / "games.py"
ABOUT = {"": {"tools": [], "rewards": True, "blocking": False, "plays": False, "program": False, "withheld": []}}
OPENED = {"text": "", "messages": None}
SEEDS = {"group": 7, "sample": 0}


class Here(Sessions):
    """The driver's node; every reset succeeds at once."""

    def __init__(self) -> None:
        super().__init__(EnvironmentConfig(name="calculator"), ABOUT)
        self.asked: list[int] = []

    async def ask(self, session: int, message: dict[str, Any]) -> Any:
        self.asked.append(session)
        return OPENED

    def end(self, session: int, *, broken: bool) -> None:
        pass


class Actor:
    """The actor of another node, as one that `call` reaches until it is dead.

    Attributes:
        hosts: what it holds.
        called: methods that were called.
    """

    def __init__(self, hosts: Any) -> None:
        self.hosts, self.called = hosts, list[str]()
        self.dead = asyncio.Event()

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        self.called.append(method)
        work = asyncio.ensure_future(getattr(self.hosts, method)(*arguments))
        death = asyncio.ensure_future(self.dead.wait())
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise ConnectionError("no answer") from None
        finally:
            death.cancel()
        if self.dead.is_set():
            work.cancel()
            raise ConnectionError("the actor died")
        return work.result()


class Answers:
    """What an actor holds: `answer` gives the answers to requests; news never come."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], Awaitable[Any]]) -> None:
        self.answer, self.asked, self.ended = answer, list[int](), list[int]()

    async def ask(self, session: int, message: Mapping[str, Any]) -> Any:
        self.asked.append(session)
        return await self.answer(message)

    async def end(self, session: int, broken: bool) -> None:
        self.ended.append(session)

    async def news(self) -> Any:
        await asyncio.sleep(1000)


async def at_once(message: Mapping[str, Any]) -> Any:
    return OPENED


async def never(message: Mapping[str, Any]) -> Any:
    if message["do"] == "open":
        return OPENED
    await asyncio.sleep(1000)


def remote(actor: Actor, here: Sessions | None = None, say: Callable[[str], None] = lambda line: None) -> RemoteHosts:
    return RemoteHosts("b", here or Here(), actor.call, say)


@asynccontextmanager
async def spread(*others: Actor, again: Any = None) -> AsyncIterator[tuple[Spread, list[str]]]:
    """Here and some other nodes, none of which can be started again unless `again` does so; and what is said."""
    said: list[str] = []
    spread = Spread(Here(), said.append)  # type: ignore[arg-type]

    async def refuse() -> RemoteHosts:
        raise ConnectionError("the node is gone")

    tasks = [asyncio.ensure_future(spread.keep(remote(actor), again or refuse)) for actor in others]
    await asyncio.sleep(0)
    yield spread, said
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_session_is_opened_on_the_node_that_has_the_fewest() -> None:
    async def play() -> None:
        others = [Actor(Answers(at_once)) for _ in range(2)]
        async with spread(*others) as (opened, _):
            sessions = [await opened.open({}, SEEDS) for _ in range(7)]
            assert len(opened.here.asked) == 3  # type: ignore[attr-defined]
            assert [len(actor.hosts.asked) for actor in others] == [2, 2]
            for session in sessions[1::3]:  # those of the first of the others
                await session.close()
            await settled()
            assert others[0].hosts.ended == others[0].hosts.asked
            for _ in range(3):
                await opened.open({}, SEEDS)
            assert [len(actor.hosts.asked) for actor in others] == [5, 2]

    asyncio.run(play())


def test_a_node_on_which_all_fails_at_once_does_not_get_every_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(message: Mapping[str, Any]) -> Any:
        return FailedError("open: no server")

    async def play() -> None:
        broken = Actor(Answers(fail))
        async with spread(broken) as (opened, _):
            for _ in range(10):
                with suppress(FailedError):
                    await opened.open({}, SEEDS)
            assert len(opened.here.asked) == 5  # type: ignore[attr-defined]
            await asyncio.sleep(0.1)
            assert [node.open_sessions for node in opened._nodes] == [5, 0]

    monkeypatch.setattr(sessions, "FAILED_COUNTS_S", 0.05)
    asyncio.run(play())


@pytest.mark.parametrize("how", ["death", "silence"])
def test_a_lost_node_fails_its_sessions_and_gets_no_more_until_it_is_started_again(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        first, second = Actor(Answers(never)), Actor(Answers(at_once))
        starts = [remote(second)]

        async def again() -> RemoteHosts:
            if not starts:
                raise ConnectionError("the node is gone")
            return starts.pop()

        async with spread(first, again=again) as (opened, said):
            here, there = [await opened.open({}, SEEDS) for _ in range(2)]
            assert first.hosts.asked == [there.number]
            waiting = [asyncio.ensure_future(there.call([call("act")])) for _ in range(2)]
            await settled()
            if how == "death":
                first.dead.set()
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            why = "the actor died" if how == "death" else "no answer"
            lost = f"the environments of node b are lost: {why}"
            assert [(type(error), str(error)) for error in errors] == 2 * [(FailedError, lost)]
            await settled()
            started = "environments run on node b again"
            assert said == [f"warning: {lost} Its rollouts have failed; it is started again.", started]
            with pytest.raises(FailedError, match="are lost"):
                await there.finish()
            await there.close()
            await here.close()
            for _ in range(2):
                await opened.open({}, SEEDS)
            assert len(second.hosts.asked) == 1
            assert set(first.hosts.asked) == {there.number}
            second.dead.set()
            await settled()
            assert said[-1] == "warning: the run goes on without environments on node b: the node is gone"
            for _ in range(3):
                await opened.open({}, SEEDS)
            assert len(second.hosts.asked) == 1

    if how == "silence":
        monkeypatch.setattr(nodes, "SILENT_S", 0.1)
    asyncio.run(asyncio.wait_for(play(), 60))


def test_what_a_rollout_costs_keeps_its_type_and_text_on_the_way() -> None:
    async def answer(message: Mapping[str, Any]) -> Any:
        errors = {"open": OPENED, "call": CallLimitError("over 1 CPU seconds"), "finish": FailedError("finish: no")}
        return errors[message["do"]]

    async def play() -> None:
        session = await remote(Actor(Answers(answer))).open({}, SEEDS)
        with pytest.raises(CallLimitError, match=r"^over 1 CPU seconds$"):
            await session.call([call("act")])
        with pytest.raises(FailedError, match=r"^finish: no$"):
            await session.finish()

    asyncio.run(play())


# --- with processes ---


@asynccontextmanager
async def node(name: str, port: int = 0, **keys: Any) -> AsyncIterator[tuple[RemoteHosts, NodeHosts, list[str]]]:
    """Hosts as an actor holds them, what reaches them, and what they print."""
    limits = {"cpu_seconds": 1.0, "wall_seconds": 20.0, "memory_mb": 256, "processes": 4}
    config = EnvironmentConfig(**{"name": name if name == PROGRAM else f"{FILE}:{name}", **limits, **keys})
    held, said = NodeHosts(config, (), {}, port), list[str]()
    there = remote(Actor(held), held._hosts, said.append)
    serving = asyncio.ensure_future(there.serve())
    try:
        yield there, held, said
    finally:
        await held.close()
        serving.cancel()


async def answer(request: Any) -> dict[str, Any]:
    content = f"after {request['messages'][-1]['content']}"
    return {"role": "assistant", "content": content, "finish_reason": "stop", "token_ids": [1]}


@pytest.mark.slow
def test_a_coroutine_on_another_node_asks_the_driver_for_its_turns() -> None:
    async def play() -> None:
        async with node("debate") as (there, _, _):
            session = await there.open({"question": "why"}, SEEDS)
            assert session.plays
            remote_outcome = await session.play(answer)
            await session.close()

            async def fail(_: Any) -> dict[str, Any]:
                raise ConnectionError("no engine")

            session = await there.open({"question": "why"}, SEEDS)
            with pytest.raises(ConnectionError):
                await session.play(fail)
            await session.close()
        local = Hosts(EnvironmentConfig(name=f"{FILE}:debate"), say=lambda line: None)
        try:
            session = await local.open({"question": "why"}, SEEDS)
            assert await session.play(answer) == remote_outcome
            await session.close()
        finally:
            local.close()

    asyncio.run(play())


ASKS = """
import os, socket, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
socket.create_connection((url.hostname, url.port)).sendall(os.environ["OPENAI_API_KEY"].encode())
open(os.environ["RLHF_REWARD"], "w").write("0.5")
"""


@pytest.mark.slow
def test_a_program_on_another_node_reaches_the_endpoint_on_the_drivers_node(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKS)
    with socket.create_server(("127.0.0.2", 0)) as endpoint:
        host, port = endpoint.getsockname()

        async def play() -> None:
            keys = {"command": ["python", str(tmp_path / "agent.py")], "endpoint_host": host, "memory_mb": 1024}
            async with node(PROGRAM, port, **keys) as (there, *_):
                session = await there.open({}, SEEDS)
                assert session.is_program
                outcome = await session.run({"url": f"http://{host}:{port}", "key": "sk-1"})
                assert outcome.reward == 0.5
                await session.close()

        asyncio.run(play())
        endpoint.accept()[0].close()  # that of the check at the start
        with endpoint.accept()[0] as connected:
            assert connected.recv(100) == b"sk-1"


def test_a_node_that_cannot_reach_the_endpoint_is_refused() -> None:
    config = EnvironmentConfig(name=PROGRAM, command=("true",), endpoint_host="127.0.0.2")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        port = elsewhere.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"endpoint_host=127\.0\.0\.2: this node cannot connect to port {port} there"
        ):
            NodeHosts(config, (), {}, port)


def test_a_service_is_asked_by_the_driver_whichever_node_has_the_session() -> None:
    async def play() -> None:
        here, actor = Here(), Actor(Answers(at_once))

        async def answer(message: Mapping[str, Any]) -> dict[str, Any]:
            return {"reward": 2.0, "parts": {}, "facts": {}, "attributes": {}}

        here.services = {"": answer}
        session = await remote(actor, here).open({}, SEEDS)
        assert (await session.run({"url": "http://127.0.0.2:1", "key": "sk-1"})).reward == 2.0
        assert actor.hosts.asked == [session.number]  # opened there, and asked nothing more

    asyncio.run(play())


@pytest.mark.slow
def test_a_session_that_is_cancelled_gives_its_process_back_even_if_its_end_comes_first() -> None:
    async def play() -> None:
        async with node("Guess", processes=1) as (there, held, said):
            session = await there.open({}, SEEDS)
            waiting = asyncio.ensure_future(there.open({}, SEEDS))
            await asyncio.sleep(0.2)
            waiting.cancel()
            await held.end(-1, False)  # before anything is asked
            late = await held.ask(-1, {"do": "open", "environment": "", "row": {}, "seeds": SEEDS})
            assert isinstance(late, FailedError)
            await session.close()
            async with asyncio.timeout(20):
                session = await there.open({}, SEEDS)
                (answer,) = (await session.call([call("guess", number=-1)])).messages
            assert answer["content"] == "wrong"
            await session.close()
            assert f"node b: environment {FILE}:Guess: a line that the game prints" in said

    asyncio.run(play())


@pytest.mark.slow
def test_an_actor_whose_processes_cannot_go_on_is_lost() -> None:
    async def play() -> None:
        async with node("Guess") as (there, held, _):
            serving = asyncio.ensure_future(there.serve())
            held._hosts.call_soon(held._hosts._fork, None)  # breaks its thread, as a bug would
            async with asyncio.timeout(20):
                assert "are lost" in await serving

    asyncio.run(play())


@pytest.mark.slow
def test_other_code_than_on_the_node_of_the_driver_is_refused() -> None:
    name = f"{FILE}:Guess"
    with pytest.raises(ValueError, match=r"Guess': games.py differs from the copy on the node of the driver\. Put"):
        NodeHosts(EnvironmentConfig(name=name), (), {name: {"games.py": "another"}}, 0)
