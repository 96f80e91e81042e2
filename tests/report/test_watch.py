"""`rlhf watch`: what it reads of a run that goes on, what its server answers and refuses, and the page in a browser."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from test_report import HOSTILE, write_run
from waiting import WAIT_S, eventually

from rlhf.log.status import LOST_S, STATUS, status_file
from rlhf.report import page
from rlhf.report import server as web
from rlhf.report.live import NEWEST_BYTES, LiveRun, LiveRuns
from rlhf.report.server import LOOPBACK, WatchServer

NOW = {"step": 4, "steps": 9, "phases": ["sampling"], "now": "sampling 3 s", "remaining_s": 7.0}


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def line(step: int, **values: float) -> str:
    return json.dumps({"step": step, "time": time.time(), "time/step": 1.0, **values}) + "\n"


def tell(run: Path, *, age_s: float = 0.0, ended: str | None = None) -> None:
    (run / STATUS).write_text(json.dumps({"time": time.time() - age_s, **NOW, "ended": ended}))


# --- what is read ---


def test_only_what_is_new_is_read_and_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    run = LiveRun(path)
    run.look()
    assert run.files is not None
    assert [row["step"] for row in run.files.rows] == [0, 1, 2, 3, 4]
    before = run.files
    run.look()
    assert run.files is before  # nothing new
    text = line(5, **{"reward/mean": 0.5})
    append(path / "metrics.jsonl", text[:20])
    run.look()
    assert run.files.rows[-1]["step"] == 4
    append(path / "metrics.jsonl", text[20:])
    run.look()
    assert run.files.rows[-1]["reward/mean"] == 0.5
    append(path / "metrics.jsonl", json.dumps({"step": 5, "eval/test/avg@1": 1.0}) + "\n")
    run.look()
    assert (run.files.rows[-1]["reward/mean"], run.files.rows[-1]["eval/test/avg@1"]) == (0.5, 1.0)
    assert run.beginnings == 0


@pytest.mark.parametrize("how", ["replaced", "shorter", "another"])
def test_metrics_that_a_resume_has_cut_are_read_anew(tmp_path: Path, how: str) -> None:
    path = write_run(tmp_path / "run")
    run, metrics = LiveRun(path), path / "metrics.jsonl"
    run.look()
    lines = metrics.read_text().splitlines(keepends=True)
    match how:
        case "replaced":  # as a resume does it
            (path / "metrics.new").write_text("".join(lines[:3]))
            (path / "metrics.new").replace(metrics)
        case "shorter":
            metrics.write_text("".join(lines[:3]))
        case "another":  # a new run in the folder of one that had finished no step, in a file that is longer
            metrics.write_text(line(1) + line(2) + " " * metrics.stat().st_size)
    run.look()
    assert run.files is not None
    assert (run.files.rows[-1]["step"], run.beginnings) == (2, 1)


def test_a_run_is_followed_from_before_its_folder_is_there(tmp_path: Path) -> None:
    runs = LiveRuns([str(tmp_path / "run")])
    status = runs.status()
    assert (status["runs"][0]["state"], status["version"]) == ("not started", [0])
    assert runs.rollouts([])["columns"] == {}
    path = write_run(tmp_path / "run")
    metrics = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text("")
    assert runs.status()["version"] == [1]
    assert runs.metrics()["settings"][0]["steps"] == []  # its page before the first step
    (path / "metrics.jsonl").write_text(metrics)
    assert runs.status()["runs"][0]["step"] == 4


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"not a run folder: config.yaml is missing"):
        LiveRun(tmp_path)


def test_the_newest_rollouts_come_first_and_later_only_those_of_new_steps(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    run = LiveRun(path)
    run.look()
    size = (path / "rollouts/step-000004.jsonl").stat().st_size
    first, last, groups = run.newest_groups(0, 2 * size + 9)
    assert (first, last, [group[0]["step"] for group in groups]) == (3, 4, [3, 3, 4, 4])
    assert run.newest_groups(4, size) == (4, 4, [])
    shutil.copy(path / "rollouts/step-000004.jsonl", path / "rollouts/step-000005.jsonl")
    assert run.newest_groups(4, size)[:2] == (5, 5)
    assert sum(map(len, run.newest_groups(4, size // 2)[2])) < 8  # of a step that is too large, its first rollouts
    append(path / "rollouts/step-000005.jsonl", '{"step"')
    assert run.newest_groups(4, size)[2] == []  # until the line has its end


def test_the_state_is_what_the_run_says_and_a_run_that_is_silent_is_lost(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")

    def state() -> tuple[str, Any]:
        (shown,) = LiveRuns([str(path)]).status()["runs"]
        return shown["state"], shown["remaining_s"]

    assert state() == ("not finished", None)  # by a version that writes no status
    tell(path)
    assert state() == ("sampling", 7.0)
    tell(path, age_s=LOST_S + 1)
    assert state() == ("lost", None)
    tell(path, ended="stopped")
    assert state() == ("stopped", None)
    tell(path, ended="failed")
    assert state() == ("failed", None)
    (path / "summary.json").write_text('{"steps": 4}')
    tell(path, ended="done")
    assert state() == ("finished", None)
    tell(path)  # resumed with more steps
    assert state() == ("sampling", 7.0)


def test_a_run_writes_what_it_does_and_how_it_ended(tmp_path: Path) -> None:
    def told() -> dict[str, Any]:
        return json.loads((tmp_path / STATUS).read_text())

    with status_file(tmp_path, lambda: NOW):
        assert (told()["phases"], told()["ended"]) == (["sampling"], None)
    assert told()["ended"] == "done"
    for error, ended in ((RuntimeError, "failed"), (KeyboardInterrupt, "stopped")):
        with pytest.raises(error), status_file(tmp_path, lambda: NOW):
            raise error
        assert told()["ended"] == ended
    shutil.rmtree(tmp_path)
    with status_file(tmp_path, lambda: NOW):  # where it cannot be written, the run goes on
        pass


# --- the server ---


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    started = WatchServer(LiveRuns([str(write_run(tmp_path / "run", text=HOSTILE))]))
    thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield started
    started.shutdown()
    thread.join()
    started.server_close()


def ask(address: str, path: str = "", *, method: str = "GET", host: str = "") -> tuple[int, bytes, dict[str, str]]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)
    connection.request(method, path or parts.path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, gzip.decompress(body) if answer.status == 200 else body, dict(answer.headers)


def test_only_the_address_with_the_token_opens_the_page(server: WatchServer) -> None:
    address, port = server.address, server.server_port
    assert ask(address)[0] == 200
    path = urlsplit(address).path
    others = ("/", "//", "/status", path[:-1], path[:-2] + "/", f"/x{path[2:]}", f"{path}../metrics", f"{path}other")
    for wrong in others:
        assert ask(address, wrong)[:2] == (404, b""), wrong
    for host in ("rebound.example", f"rebound.example:{port}", "127.0.0.1.example"):
        assert ask(address, host=host)[:2] == (403, b""), host
    for host in ("localhost:9000", f"127.0.0.1:{port}"):  # a forwarded port may be another
        assert ask(address, host=host)[0] == 200
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(address, method=method)[0] == 501, method
    assert server.server_address[0] == "127.0.0.1"
    assert WatchServer(LiveRuns([])).token != server.token


def test_the_page_embeds_no_data_and_runs_no_script_but_its_own(server: WatchServer) -> None:
    _, body, headers = ask(server.address)
    page = body.decode()
    assert HOSTILE not in page
    assert "boom" not in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'; script-src 'self' 'sha256-" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert headers["Cache-Control"] == "no-store"
    _, plotly, headers = ask(f"{server.address}plotly.js", f"{urlsplit(server.address).path}plotly.js")
    assert len(plotly) > 10**6
    assert "immutable" in headers["Cache-Control"]  # it is large, and never changes


def test_the_server_answers_with_the_data_of_the_report(server: WatchServer) -> None:
    path = urlsplit(server.address).path
    status, metrics = (json.loads(ask(server.address, path + name)[1]) for name in ("status", "metrics"))
    assert (status["version"], status["runs"][0]["step"]) == ([1], 4)
    assert metrics["settings"][0]["series"]["reward/mean"] == [None, 0.1, 0.2, 0.3, 0.4]
    rollouts = json.loads(ask(server.address, f"{path}rollouts?after=")[1])
    assert (rollouts["first"], rollouts["last"], len(rollouts["columns"]["step"])) == ([1], [4], 32)
    assert rollouts["texts"].count(HOSTILE) == 1
    later = json.loads(ask(server.address, f"{path}rollouts?after=3")[1])
    assert (set(later["columns"]["step"]), later["last"]) == ({4}, [4])


def test_a_browser_that_goes_away_during_an_answer_is_no_error(
    server: WatchServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection((LOOPBACK, server.server_port)) as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
        browser.sendall(f"GET {urlsplit(server.address).path}plotly.js HTTP/1.1\r\nHost: {LOOPBACK}\r\n\r\n".encode())
        assert browser.recv(4) == b"HTTP"
        (handler,) = (thread for thread in threading.enumerate() if "process_request" in thread.name)
    handler.join()
    assert capfd.readouterr().err == ""


def test_the_memory_of_the_server_does_not_grow_with_the_rollouts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1, text="a long response " * 200)
    (first,) = (path / "rollouts").iterdir()
    for step in range(2, 100):  # 10 MB
        text = first.read_text().replace('"step": 1,', f'"step": {step},') * 4
        (path / f"rollouts/step-{step:06d}.jsonl").write_text(text)
    runs = LiveRuns([str(path)])
    runs.status()
    answer = runs.rollouts([])
    assert sum(file.stat().st_size for file in (path / "rollouts").iterdir()) > 4 * NEWEST_BYTES
    assert len(json.dumps(answer)) < 2 * NEWEST_BYTES
    assert answer["last"] == [99]


# --- the program and the page ---


def started(*folders: Path) -> tuple[subprocess.Popen[str], list[str]]:
    command = [sys.executable, "-m", "rlhf.watch", *map(str, folders)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    assert program.stdout is not None
    return program, [program.stdout.readline().strip() for _ in range(2)]


@pytest.mark.slow
def test_the_program_prints_one_address_and_the_line_for_ssh_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    program, (address, ssh) = started(write_run(tmp_path / "run"))
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
    port = urlsplit(address).port
    assert f"ssh -N -L {port}:127.0.0.1:{port} " in ssh
    assert ask(address)[0] == 200
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=WAIT_S)[0] == ""
    assert program.returncode == 0


# Runs in place of a person: it waits for the first data, writes what it sees to the title, and again after a step.
LOOKS = """
const told = [], look = () => told.push([$("live").textContent, $("count").textContent,
  document.querySelectorAll("#rows img").length, data ? Math.max(...data.settings[0].steps) : -1].join("|"));
addEventListener("error", (event) => told.push(`error ${event.message}`));
const looks = setInterval(() => {
  if (document.body.dataset.ready) { look(); document.title = told.join("#"); }
}, 300);
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
def test_a_browser_shows_the_state_and_gets_a_step_that_comes_later(
    tmp_path: Path, server: WatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    tell(run, age_s=-3600.0)
    program = page.page_program()
    for module in (page, web):
        monkeypatch.setattr(module, "page_program", lambda: program + LOOKS)

    def later() -> None:
        assert eventually(lambda: server.runs._runs[0].files is not None)
        rows = (run / "rollouts/step-000004.jsonl").read_text().replace('"step": 4,', '"step": 5,')
        (run / "rollouts/step-000005.jsonl").write_text(rows)
        append(run / "metrics.jsonl", line(5, **{"reward/mean": 0.5}))

    thread = threading.Thread(target=later)
    thread.start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=8000", "--dump-dom", server.address]
    done = subprocess.run(["chromium", *options], capture_output=True, text=True, timeout=300, check=True)
    thread.join()
    (title,) = re.findall(r"<title>([^<]*)</title>", done.stdout)
    looks = title.split("#")
    assert not [look for look in looks if look.startswith("error")]
    live, count, images, last = looks[-1].split("|")
    assert live.startswith("sampling step ")
    assert "sampling 3 s" in live
    assert (count, images, last) == ("40 of 40 rollouts, 1 to 40", "0", "5")
