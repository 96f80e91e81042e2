"""The judge, the reward model, a teacher and a service as clients of a server that does what it must not."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from byte_tokenizer import byte_tokenizer
from waiting import WAIT_S
from worlds import make_config
from yarl import URL

from rlhf.config.environment import EnvironmentPart
from rlhf.config.reward import RubricOptions
from rlhf.config.reward_model import RewardModelConfig
from rlhf.environments.service import Service
from rlhf.rewards import http_client
from rlhf.rewards.http_client import HttpClient, proxy_of
from rlhf.rewards.model_client import endpoint_scorer
from rlhf.rewards.rubric import RubricGrader
from rlhf.run.teachers import Server

pytestmark = pytest.mark.slow

KEY = "sk-0123456789abcdef"
BASIC = base64.b64encode(f"me:{KEY}".encode()).decode()
TIMEOUT_S = 60.0
TOKENIZER = byte_tokenizer()
TOKENS = [50, 51]
TEXTS = [TOKENIZER.decode([token]) for token in (*TOKENS, 65)]
ANSWERS: dict[str, Any] = {
    "/judge": {"choices": [{"message": {"content": '{"scores": [1]}'}}], "usage": {}},
    "/reward_model": {"scores": [1.0]},
    "/teacher/models": {"data": [{"id": "served"}]},
    "/teacher/completions": {"choices": [{"logprobs": {"tokens": TEXTS, "token_logprobs": [None, -1.0, -2.0]}}]},
    "/service": {"score": 1},
}
Answer = Callable[[Any, str], None]  # writes into a file the answer to a request of this path


def good(out: Any, path: str) -> None:
    text = json.dumps(ANSWERS[path]).encode()
    out.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[int, list[str]]]:
    """The port of a server that answers anything, and the requests that it got: head and body."""
    requests: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n") and (line := self.rfile.readline()):
                head += line
            lengths = [int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-l")]
            requests.append((head + self.rfile.read(sum(lengths))).decode())
            with contextlib.suppress(OSError):  # the client has hung up
                answer(self.wfile, urlsplit(head.split()[1].decode()).path if head else "")

    class Threads(socketserver.ThreadingTCPServer):
        daemon_threads, request_queue_size = True, 32

    with Threads(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield server.server_address[1], requests
        server.shutdown()


def judged(address: str, folder: Path, retries: int) -> tuple[Any, str]:
    options = {"url": f"http://{address}/judge", "model": "m", "criteria": [{"text": "is polite"}]}
    limits = {"timeout_s": TIMEOUT_S, "retries": retries, "key_variable_name": "JUDGE"}
    grader = RubricGrader(RubricOptions.model_validate({**options, **limits}))
    about = {"messages": [{"role": "user", "content": "Greet me."}], "in_thought": False}
    try:
        (future,) = grader.submit_many([{"answer": "", "columns": {}, "metadata": about, "response": "Hello."}])
        grade = future.result(WAIT_S)
        return grade.value, grade.detail
    finally:
        grader.close()


def scored(address: str, folder: Path, retries: int) -> tuple[Any, str]:
    config = RewardModelConfig(endpoint=f"http://me:{KEY}@{address}/reward_model", timeout_s=TIMEOUT_S, retries=retries)
    return raised(lambda: endpoint_scorer(config)([[{"role": "user", "content": "Hello."}]]))


def taught(address: str, folder: Path, retries: int) -> tuple[Any, str]:
    teacher = {"endpoint": f"http://me:{KEY}@{address}/teacher", "timeout_s": TIMEOUT_S, "retries": retries}
    config = make_config(folder / "model", algo={"teacher": teacher})
    return raised(lambda: Server(config, teacher["endpoint"], TOKENIZER).logprobs(TOKENS))


def played(address: str, folder: Path, retries: int) -> tuple[Any, str]:
    part = EnvironmentPart(
        name="service", url=f"http://{address}/service", timeout_s=TIMEOUT_S, key_variable_name="JUDGE"
    )
    message = {"row": {}, "seeds": {"group": 1}, "endpoint": {"url": "http://127.0.0.1:9", "key": "sk-1"}}
    return raised(lambda: Service(part, 8).play(message))


def raised(call: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return asyncio.run(call()), ""
    except Exception as error:
        return None, str(error)


CLIENTS = {"judge": judged, "reward_model": scored, "teacher": taught, "service": played}


def asked(address: str, folder: Path, retries: int = 0) -> dict[str, tuple[Any, str]]:
    """What each client, all at the same time, gets from its path of a server: a value, or an error's message."""
    with ThreadPoolExecutor(len(CLIENTS)) as threads:
        futures = {name: threads.submit(ask, address, folder, retries) for name, ask in CLIENTS.items()}
    return {name: future.result() for name, future in futures.items()}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", KEY)  # a name that does not say that it is a secret
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def says(*texts: bytes, again_s: float | None = None) -> Answer:
    """Writes the texts; `again_s`: then the last one again and again, after so many seconds."""

    def answer(out: Any, path: str) -> None:
        for text in texts:
            out.write(text)
        while again_s is not None:
            time.sleep(again_s)
            out.write(texts[-1])

    return answer


def replies(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


def with_length(body: bytes, *headers: str, status: str = "200 OK") -> Answer:
    return says(replies(body, f"Content-Length: {len(body)}", *headers, status=status))


LATE = "0.4 seconds"
LONG = "over [0-9]+ bytes"
FAULTS: dict[str, tuple[Answer, str]] = {
    "drips its body": (says(replies(b"", "Content-Length: 1000"), b" ", again_s=0.1), LATE),
    "drips its headers": (says(replies(b"")[:-2], b"X: y\r\n", again_s=0.1), LATE),
    "drips its first line": (says(b"HTTP/1.1 200 ", b"O", again_s=0.1), LATE),
    "drips chunks": (says(replies(b"", "Transfer-Encoding: chunked"), b"1\r\n \r\n", again_s=0.1), LATE),
    "drips early hints": (says(replies(b"", status="103 Early Hints"), again_s=0.1), LATE),
    "says nothing": (says(b"", again_s=0.1), LATE),
    "endless headers": (says(replies(b"")[:-2], b"X: y\r\n" * 1000, again_s=0), "headers|400"),
    "endless header": (says(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 10_000, again_s=0), "more than|400"),
    "endless first line": (says(b"HTTP/1.1 200 ", b"y" * 10_000, again_s=0), "more than|400"),
    "endless early hints": (says(replies(b"", status="103 Early Hints") * 100, again_s=0), LATE),
    "endless body": (says(replies(b""), b" " * 65536, again_s=0), LONG),
    "endless chunks": (
        says(replies(b"", "Transfer-Encoding: chunked"), b"1\r\n \r\n" * 9999, again_s=0), f"{LATE}|{LONG}",
    ),
    "endless chunk extension": (
        says(replies(b"", "Transfer-Encoding: chunked"), b"1;", b"y" * 9999, again_s=0), f"{LATE}|400",
    ),
    "gzip bomb": (with_length(gzip.compress(bytes(1 << 27), 1)[: 1 << 19], "Content-Encoding: gzip"), "gzip"),
    "longer length": (says(replies(b"1", "Content-Length: 100")), "ClientPayloadError"),
    "no number of a length": (says(replies(b"1", "Content-Length: -1")), "Content-Length"),
    "hangs up at once": (says(), "ServerDisconnectedError"),
    "hangs up in its headers": (says(replies(b"")[:-2]), "ServerDisconnectedError|Payload"),
    "hangs up in a chunk": (says(replies(b"9\r\n1", "Transfer-Encoding: chunked")), "ClientPayloadError"),
    "no HTTP": (says(b"SSH-2.0-OpenSSH_9.2\r\n"), "400|Expected HTTP"),
    "no JSON": (with_length(b"<html>Log in</html>"), "JSON|no reward"),
    "deep JSON": (with_length(b"[" * 100_000), "RecursionError|recursion"),
    "no text": (with_length(b"\xff\xfe\xff"), "codec|UTF-8|no reward"),
    "another form": (with_length(b'{"error": "overloaded"}'), "KeyError|no reward"),
    "nothing": (with_length(b"", status="204 No Content"), "JSON|no reward|Expecting"),
    "switches protocols": (says(replies(b"", "Upgrade: h2c", "Connection: Upgrade", status="101 Upgrade")), "101"),
    "not modified": (says(replies(b"", status="304 Not Modified")), "HTTP status 304"),
    "shows the key": (with_length(f"Wrong key: {KEY}".encode() * 9, status="401 No"), "HTTP status 401: Wrong key: <"),
    "moves the cursor": (with_length(b"\x1b[2J\x07 no\r\n luck", status="500 X"), r"500: \\u001b\[2J\\u0007 no luck"),
    "says much": (with_length(b"x" * 100_000, status="418 Teapot"), "HTTP status 418: x{900,1000}"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_can_neither_hold_a_request_nor_fill_the_memory_nor_write_into_a_message(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, why = FAULTS[fault]
    if LATE in why:
        monkeypatch.setitem(globals(), "TIMEOUT_S", 0.4)
        monkeypatch.setattr(http_client, "CONNECT_SHARE", 1000)  # a busy machine may be late to connect
    with serving(answer) as (port, _):
        results = asked(f"127.0.0.1:{port}", tmp_path)
    for name, (value, message) in results.items():
        assert value is None, name
        assert re.search(why, message), (name, message)
        assert KEY not in message
        assert BASIC not in message
        assert len(message) < 2500
        assert message.isprintable()


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [
        ({"CONNECT_S": 0.1}, "See whether this machine can reach it"),
        (
            {"CONNECT_SHARE": 0.002},
            "See whether this machine can reach it; a larger a.timeout_s gives a connection more time",
        ),
    ],
)
def test_a_server_that_accepts_no_connection_is_told_apart_with_the_limit(
    limit: dict[str, float], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limit.items():
        monkeypatch.setattr(http_client, name, value)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        address = f"http://127.0.0.1:{full.getsockname()[1]}"
        client = HttpClient("a.", "b", address, timeout_s=50.0, retries=0, at_once=1)
        with pytest.raises(http_client.UnconnectedError) as error:
            asyncio.run(client.ask(None, bytes))
    assert str(error.value) == f"a.b={address}: no connection within 0.1 seconds. {remedy}"


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_redirect_is_an_error_with_its_target_which_gets_no_request_and_no_key(status: int, tmp_path: Path) -> None:
    with serving(good) as (other, others), contextlib.ExitStack() as opened:
        location = f"http://me:{KEY}@localhost:{other}/?page=1"
        redirects = says(replies(b"", f"Location: {location}", "Content-Length: 0", status=f"{status} Moved"))
        port, requests = opened.enter_context(serving(redirects))
        results = asked(f"127.0.0.1:{port}", tmp_path, 3)
    assert len(requests) == len(CLIENTS), "none is tried again"
    assert others == []
    for value, message in results.values():
        assert value is None
        assert f"HTTP status {status}: it redirects to http://me:<secret>@localhost:{other}/?page=1" in message


HERE = ("127.0.0.1", "127.1", "127.9.9.9", "0x7f.1", "2130706433", "localhost", "LOCALHOST.", "judge.localhost",
        "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]", "\uff11\uff12\uff17.0.0.1", socket.gethostname())  # fmt: skip
ELSEWHERE = ("judge.example", "10.0.0.1", "localhost.example", "127.0.0.1.example", "notlocalhost", "[2001:db8::1]")


def test_a_proxy_of_the_environment_is_asked_for_other_machines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(good) as (port, requests), serving(good) as (proxy, through):
        monkeypatch.setenv("http_proxy", f"http://user:{KEY}@127.0.0.1:{proxy}")
        values = {name: value for name, (value, _) in asked(f"localhost:{port}", tmp_path).items()}
        assert None not in values.values()
        assert (len(requests), len(through)) == (len(CLIENTS) + 1, 0)  # a teacher is asked for its model first
        assert {name: value for name, (value, _) in asked("judge.example:81", tmp_path).items()} == values
        assert len(through) == len(requests)
        assert all(" http://judge.example:81/" in request for request in through)
    addresses = (address for card in psutil.net_if_addrs().values() for address in card)
    own = {address.address for address in addresses if address.family == socket.AF_INET}
    proxies = {host: proxy_of(URL(f"http://{host}:81/x")) for host in (*HERE, *own, *ELSEWHERE)}
    assert {host for host, asked_first in proxies.items() if asked_first is None} == {*HERE, *own}
    for value, message in asked("judge.example:81", tmp_path).values():  # it has ended
        assert value is None
        assert f"through the proxy http://user:<secret>@127.0.0.1:{proxy}: Cannot connect" in message
    monkeypatch.setenv("no_proxy", ".example,10.0.0.1:81")
    assert [host for host in ELSEWHERE if proxy_of(URL(f"http://{host}:81/"))] == ["notlocalhost", "[2001:db8::1]"]
    monkeypatch.setenv("https_proxy", "proxy:3128")
    assert proxy_of(URL("https://judge.test/")) == "http://proxy:3128"
    with serving(with_length(b"", status="407 Who?")) as (proxy, _):
        monkeypatch.setenv("https_proxy", f"http://user:{KEY}@127.0.0.1:{proxy}")
        client = HttpClient("a.", "b", "https://judge.test/", timeout_s=TIMEOUT_S, retries=0, at_once=1)
        _, message = raised(lambda: client.ask(None, bytes))
    assert f"through the proxy http://user:<secret>@127.0.0.1:{proxy}: 407, message='Who?'" in message
    assert KEY not in message


@pytest.mark.parametrize(
    ("status", "later", "least_s"),
    [(429, "0", 0), (408, "no", 0), (503, "9" * 400, 0.2), (500, "-1", 0), (599, "0.1", 0), (404, "9", None)],
)  # fmt: skip
def test_who_is_busy_is_asked_again_when_it_says_and_who_refuses_is_not(
    status: int, later: str, least_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_RETRY_AFTER_S", 0.2)
    busy, tries = with_length(b"", f"Retry-After: {later}", status=f"{status} X"), Counter[str]()

    def answer(out: Any, path: str) -> None:
        tries[path] += 1
        (busy if tries[path] == 1 else good)(out, path)

    with serving(answer) as (port, _):
        began = time.monotonic()
        results = asked(f"127.0.0.1:{port}", tmp_path, 5)
        assert time.monotonic() - began >= (least_s or 0)
    again = {name for name, (value, _) in results.items() if value is not None}
    assert again == (set() if least_s is None else {"judge", "reward_model", "teacher"})
    assert f"HTTP status {status}" in results["service"][1]


@pytest.mark.parametrize(
    "address", ["", "judge", "localhost:8000/v1", "ftp://h", "http://", "http://:80", "http://h:99999", "http://[::1",
                "http://xn--/", f"http://me:{KEY}@h:x/",
                *(f"http://me:{mark}{KEY}@h/" for mark in ("a/", "a?", "a#", "#"))],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_before_anything_is_asked(address: str) -> None:
    with pytest.raises(ValueError, match=r"^a\.b=.*: it is no address\. ") as refused:
        HttpClient("a.", "b", address, timeout_s=1, retries=0, at_once=1)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("key", [None, f"{KEY}\n", f"{KEY}\r"])
def test_a_key_that_is_not_there_or_cannot_be_sent_is_refused_by_the_name_of_its_variable(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE", key) if key else monkeypatch.delenv("JUDGE")
    with pytest.raises(ValueError, match=r"^a\.key_variable_name=JUDGE: ") as refused:
        HttpClient("a.", "b", "http://h", timeout_s=1, retries=0, at_once=1, key_variable_name="JUDGE")
    assert KEY not in str(refused.value)
