"""The start of Ray on this machine, and after a failure the cause from what the actors printed."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import proxy_bypass_environment

import psutil
import pytest
import ray
from ray_cluster import ray_folder

from rlhf.cluster import session
from rlhf.cluster.actors import ClusterError
from rlhf.cluster.session import START_TRIES, RaySession, error_in_logs

TOO_SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[Exception]) -> list[str]:
    """Start a session where `ray.init` fails like this before it succeeds; Ray's folders that were made."""
    folders: list[str] = []

    def init(*, _temp_dir: str, **_: Any) -> None:
        folders.append(_temp_dir)
        if len(folders) <= len(failures):
            raise failures[len(folders) - 1]

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = RaySession()
    started.start(None)
    started.stop()
    return folders


def test_a_start_that_ray_gives_up_on_a_busy_machine_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = start(monkeypatch, tmp_path, [Exception(TOO_SLOW)])
    assert len(set(folders)) == 2
    assert list(tmp_path.iterdir()) == []  # of the first try nothing is left


def test_after_some_tries_one_message_says_why_and_other_failures_are_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match=rf"\b{START_TRIES} tries\b.*busy"):
        start(monkeypatch, tmp_path, [Exception(TOO_SLOW)] * START_TRIES)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PermissionError):
        start(monkeypatch, tmp_path, [PermissionError("no")])


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, []), ({"no_proxy": ".here,10.0.0.1"}, [".here", "10.0.0.1"]), ({"NO_PROXY": ".here"}, [".here"])],
)
def test_this_machine_asks_no_proxy_for_itself_and_the_users_own_exceptions_stay(
    given: dict[str, str], kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    monkeypatch.setattr(os, "environ", {**proxies, **given})
    for _ in range(2):  # a second run in the same program adds nothing
        RaySession()
        names = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
        here = ",".join([*kept, "127.0.0.1", "localhost", "::1"])
        assert os.environ == {**proxies, **dict.fromkeys(names, here)}
    monkeypatch.setattr(os, "environ", {"no_proxy": "*"})
    RaySession()
    assert proxy_bypass_environment("judge.example")


def test_a_part_of_ray_that_is_dying_thread_by_thread_is_lost() -> None:
    first_thread_ends = (
        "import ctypes, os, sys, threading, time\n"
        "sys.stdin.readline()\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), os._exit(3))).start()\n"
        "ctypes.CDLL(None).pthread_exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", first_thread_ends], stdin=subprocess.PIPE) as dying:
        process, running = psutil.Process(dying.pid), RaySession()
        running.temp, running._watched = "its folder", {"gcs_server": process}
        assert running.lost() == ""
        assert dying.stdin is not None
        dying.stdin.write(b"\n")
        dying.stdin.flush()
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert running.lost().endswith("status 3.")


def test_ray_without_its_token_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match=r"^RAY_AUTH_MODE=disabled: "):
        start(monkeypatch, tmp_path, [])


def test_the_nodes_may_remove_the_working_directory_before_they_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def ask(*_: Any, **__: Any) -> dict[str, Any]:
        folder.mkdir()  # where the last node has unpacked it
        return {}

    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(ray, "init", lambda **_: folder.rmdir())
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(session, "check_address", lambda _: None)
    monkeypatch.setattr(session, "ask_nodes", ask)
    joined = RaySession()
    joined.start("host:6379")
    asyncio.run(joined.compare_nodes(deadline_s=1.0))
    assert Path.cwd() == folder


def test_the_first_error_that_is_no_consequence_is_the_cause() -> None:
    first = (
        "(EngineCore pid=7) INFO 11-22 ready\n"
        "(EngineCore pid=7) ERROR 11-22 11:29:20 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-22 11:29:20 [core.py:1] RuntimeError: CPU Generator does not use offset\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    second = "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    assert error_in_logs({"b.log": second, "a.log": first}) == "a.log: RuntimeError: CPU Generator does not use offset"
    assert error_in_logs({"b.log": second}) == ""


def write_logs(folder: Path, **texts: str) -> None:
    logs = folder / "session_latest" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (logs / f"worker-abc-01-{name.removeprefix('p').replace('_', '.')}").write_text(text)


def test_logs_are_named_by_role_and_the_cause_is_from_the_log_of_the_actor_that_failed(tmp_path: Path) -> None:
    session, run = RaySession(), tmp_path / "run"
    run.mkdir()
    session.temp = str(tmp_path / "ray")
    actors = {"7": "engine 0", "8": "engine 1", "9": "reward model 0"}
    write_logs(
        tmp_path / "ray",
        p8_out="RuntimeError: of the other engine\n",
        p7_out="INFO ready\n",
        p7_err="ERROR core: RuntimeError: out of memory\n",
        p9_out="loaded\n",
        p3_err="of no actor\n",
    )
    error = ClusterError("engine 0, sampling a/1 failed: engine 0 on node x is lost")
    session.keep_logs(error, run, actors)
    logs = run / "logs"
    names = {"engine-0.log", "engine-1.log", "reward-model-0.log", "worker-abc-01-3.log"}
    assert {log.name for log in logs.iterdir()} == names
    assert sorted((logs / "engine-0.log").read_text().splitlines()) == [
        "ERROR core: RuntimeError: out of memory", "INFO ready",
    ]  # fmt: skip
    assert error.__notes__ == ["engine-0.log: RuntimeError: out of memory", f"What the actors printed is in {logs}."]

    write_logs(tmp_path / "ray", p7_out="a second life\n", p7_err="")
    session.keep_logs(ClusterError("engine 0 again"), run, actors)
    assert (logs / "engine-0.log").read_text() == "a second life\n"
    assert "out of memory" in (logs / "engine-0.old").read_text()


def test_without_a_run_folder_the_cause_is_told_too_and_nothing_is_left_where_nothing_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    session, error = RaySession(), ClusterError("engine 0 is lost")
    session.temp = str(tmp_path / "ray")
    session.keep_logs(error, tmp_path / "no run", {})
    assert list(tmp_path.iterdir()) == []
    write_logs(tmp_path / "ray", p7_err="ERROR core: RuntimeError: out of memory\n")
    session.keep_logs(error, tmp_path / "no run", {"7": "engine 0"})
    (kept,) = tmp_path.glob("rlhf-logs-*")
    assert error.__notes__ == ["engine-0.log: RuntimeError: out of memory", f"What the actors printed is in {kept}."]


@pytest.mark.private
@pytest.mark.stack
def test_other_users_do_not_reach_the_folder_of_ray_and_its_end_spares_who_reads_a_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ray_folder() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        session = RaySession()
        session.start(None)
        try:
            assert session.temp is not None
            (private,) = Path(folder).iterdir()
            assert Path(session.temp).is_relative_to(private)
            assert stat.S_IMODE(private.stat().st_mode) == 0o700
            log = next(Path(session.temp).glob("session_latest/logs/*"))
            follow = "import sys; log = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
            reader = subprocess.Popen(
                [sys.executable, "-c", follow, log], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert reader.stdout is not None
            assert reader.stdout.readline() == "open\n"
        finally:
            session.stop()
        assert not private.exists()
        assert reader.poll() is None
        reader.communicate()
