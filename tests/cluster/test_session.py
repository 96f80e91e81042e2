"""The start of Ray on this machine, and after a failure the cause from what the actors printed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

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


def test_after_some_tries_one_message_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=f"did not start in {START_TRIES} tries.*less busy"):
        start(monkeypatch, tmp_path, [Exception(TOO_SLOW)] * START_TRIES)
    assert list(tmp_path.iterdir()) == []


def test_any_other_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PermissionError):
        start(monkeypatch, tmp_path, [PermissionError("no")])


def test_ray_without_its_token_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match=r"^RAY_AUTH_MODE=disabled: .* Remove the variable"):
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


def test_the_first_error_that_is_no_consequence_is_the_cause(tmp_path: Path) -> None:
    first, second = tmp_path / "worker-a.out", tmp_path / "worker-b.err"
    first.write_text(
        "(EngineCore pid=7) INFO 11-22 ready\n"
        "(EngineCore pid=7) ERROR 11-22 11:29:20 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-22 11:29:20 [core.py:1] RuntimeError: CPU Generator does not use offset\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    second.write_text("ConnectionResetError: [Errno 104] Connection reset by peer\n")
    assert error_in_logs([first, second]) == "worker-a.out: RuntimeError: CPU Generator does not use offset"
    assert error_in_logs([second]) == ""


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
