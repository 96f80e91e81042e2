"""A service as an environment: what it is asked, when it is asked again, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import pytest
from waiting import WAIT_S, free_port

from rlhf.config.environment import EnvironmentPart
from rlhf.environments.service import Service
from rlhf.environments.sessions import read_outcome
from rlhf.environments.turns import CallLimitError, FailedError
from rlhf.rewards import http_client
from rlhf.types import Outcome

MESSAGE = {
    "do": "play",
    "environment": "",
    "row": {"question": "1 + 1"},
    "seeds": {"group": 7, "sample": 3},
    "endpoint": {"url": "http://127.0.0.1:9", "key": "sk-1"},
}
Answer = Callable[[BaseHTTPRequestHandler], None]


def says(text: str, status: int = 200, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(text)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(text.encode())

    return answer


@contextmanager
def serving(answer: Answer, port: int = 0) -> Iterator[tuple[str, list[Any]]]:
    """A service, its address, and what it was asked: headers and body."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.headers, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/begin", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(WAIT_S)


def play(url: str, *, times: int = 1, at_once: int = 8, **keys: Any) -> list[Any]:
    async def together() -> list[Any]:
        client = Service(EnvironmentPart(name="service", url=url, **keys), at_once)
        return await asyncio.gather(*(client.play(MESSAGE) for _ in range(times)), return_exceptions=True)

    return asyncio.run(together())


def test_it_is_told_row_and_seed_and_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTS_KEY", "hush hush")
    with serving(says('{"score": 1, "speed": 0.5, "facts": {"steps": 3}}')) as (url, asked):
        (said,) = play(url, timeout_s=9.0, key_variable_name="AGENTS_KEY")
    ((headers, body),) = asked
    assert body == {
        "row": {"question": "1 + 1"},
        "seed": 7,
        "timeout_s": 9.0,
        "openai_base_url": "http://127.0.0.1:9/v1",
        "anthropic_base_url": "http://127.0.0.1:9",
        "key": "sk-1",
    }
    assert (headers["Content-Type"], headers["Authorization"]) == ("application/json", "Bearer hush hush")
    assert read_outcome(said) == Outcome("ok", 1.0, {"speed": 0.5}, {"steps": 3})


def test_a_key_that_is_not_set_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(ValueError, match=r"environment\.key_variable_name=NOT_SET"):
        play("http://127.0.0.1:9", key_variable_name="NOT_SET")


@pytest.mark.parametrize(("text", "reward"), [("0.25", 0.25), ("null", None), ('{"facts": {}}', None)])
def test_it_answers_as_a_program_does(text: str, reward: float | None) -> None:
    with serving(says(text)) as (url, _):
        assert read_outcome(play(url)[0]).reward == reward


def hangs_up(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True


def breaks_off(request: BaseHTTPRequestHandler) -> None:
    says("1", **{"Content-Length": "100"})(request)
    request.close_connection = True


@pytest.mark.parametrize("reward", ["1" * 400, "1e400"])
def test_a_reward_that_no_float_holds_is_one_over_every_bound(reward: str) -> None:
    with serving(says(reward)) as (url, _):
        (said,) = play(url)
    assert said["reward"] == float("inf")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (says("no luck", 500), "HTTP status 500: no luck"),
        (says("", 503), "HTTP status 503"),
        (says("", 307, Location="http://127.0.0.1:9/"), "HTTP status 307"),
        (says("x" * 5000, 400), r"HTTP status 400: x{1000}$"),
        (says(""), "the answer holds no reward"),
        (says("{"), "the answer holds no reward"),
        (says('"1"'), "no finite number"),
        (says("NaN"), "no finite number"),
        (says(" " * (2 << 20)), "it has over 1048576 bytes"),
        (hangs_up, "ServerDisconnectedError"),
        (breaks_off, "ClientPayloadError"),
    ],
)
def test_a_service_that_has_accepted_is_not_asked_again(answer: Answer, why: str) -> None:
    with serving(answer) as (url, asked):
        (error,) = play(url)
    assert len(asked) == 1
    assert isinstance(error, FailedError), error
    with pytest.raises(FailedError, match=why):
        raise error


def test_one_that_is_not_there_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.1)
    port, tries = free_port(), 0
    send = aiohttp.ClientSession.request

    with contextlib.ExitStack() as opened:

        def counted(*given: Any, **keys: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries == 2:  # the first was refused
                asked.append(opened.enter_context(serving(says("1"), port))[1])
            return send(*given, **keys)

        asked: list[list[Any]] = []
        monkeypatch.setattr(aiohttp.ClientSession, "request", counted)
        (said,) = play(f"http://127.0.0.1:{port}/")
    assert said["reward"] == 1.0
    assert tries == 2
    assert len(asked[0]) == 1


@pytest.mark.slow
def test_a_service_that_is_not_reached_in_time_is_not_the_models_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(http_client, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as opened:
        address = full.getsockname()
        for _ in range(4):  # fills the queue, so that a further connection waits
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        (error,) = play(f"http://127.0.0.1:{address[1]}/", timeout_s=WAIT_S)
    assert isinstance(error, FailedError), error


def test_one_that_is_never_there_costs_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    (error,) = play(f"http://127.0.0.1:{free_port()}/")
    assert isinstance(error, FailedError)
    assert "Cannot connect" in str(error)


@pytest.mark.parametrize("begins", [False, True])
def test_one_that_does_not_answer_in_time_is_over_the_limit(begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "CONNECT_SHARE", 1000)  # a busy machine may be late to connect
    ends = threading.Event()

    def waits(request: BaseHTTPRequestHandler) -> None:
        if begins:
            says("1", **{"Content-Length": "2"})(request)
        ends.wait(WAIT_S)

    with serving(waits) as (url, _):
        (error,) = play(url, timeout_s=0.3)
        ends.set()
    assert isinstance(error, CallLimitError), repr(error)
    assert "over 0.3 seconds by the clock" in str(error)


def test_no_more_rollouts_than_places_are_asked_for_at_once() -> None:
    now, most = [0], [0]
    lock = threading.Lock()

    def counted(request: BaseHTTPRequestHandler) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        says("1")(request)

    with serving(counted) as (url, asked):
        assert [said["reward"] for said in play(url, times=9, at_once=3)] == [1.0] * 9
    assert len(asked) == 9
    assert most[0] <= 3
