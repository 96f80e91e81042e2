"""wandb: what a run is told, and a server that is not reached, which costs a message and seconds."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import URLError

import numpy as np
import pytest
import wandb
from waiting import WAIT_S

from rlhf.config.sections import WandbConfig
from rlhf.log import wandb_sink
from rlhf.log.reachable import ANSWER_S, connection_problem
from rlhf.log.sinks import COLUMNS, Details
from rlhf.log.wandb_sink import WANDB_RETRIES

PROGRAM = """
import sys
from pathlib import Path
from rlhf.config.sections import WandbConfig
from rlhf.log.wandb_sink import WandbSink
sink = WandbSink(WandbConfig(), Path(sys.argv[1]), {"a": 1}, {}, resume=None, warn=lambda text: print("warning:", text))
sink.log(1, {"reward/mean": 0.5})
sink.close()
"""


class OutOfOrder(http.server.BaseHTTPRequestHandler):
    """A server that answers, and takes nothing."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def asked_for_run(cls) -> int:
        return sum("otel" not in path for path in cls.asked)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(500)

    do_POST = do_GET  # noqa: N815 - named by http.server

    def log_message(self, *_: object) -> None:
        return


@dataclass
class Server:
    """A server that does not take the run, how often it was asked, and how often it may be."""

    url: str
    asked: Callable[[], int]
    most: int


@pytest.fixture(params=["closed", "silent", "out of order"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A port that refuses, one that accepts and never answers, one that answers 500."""
    if request.param == "out of order":
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OutOfOrder) as answering:
            threading.Thread(target=answering.serve_forever, args=[0.02], daemon=True).start()
            OutOfOrder.asked.clear()
            yield Server(f"http://127.0.0.1:{answering.server_port}", OutOfOrder.asked_for_run, 2 + WANDB_RETRIES)
            answering.shutdown()
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        if request.param == "silent":
            listener.listen(64)
        yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", partial(waiting_connections, listener), 1)


def waiting_connections(listener: socket.socket) -> int:
    count = 0
    with contextlib.suppress(OSError):
        while listener.accept():
            count += 1
    return count


@pytest.mark.slow
def test_a_server_that_does_not_take_the_run_costs_one_wait_and_one_message(server: Server, tmp_path: Path) -> None:
    environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert server.asked() <= server.most  # a silent server costs ANSWER_S with each question
    assert done.stdout.count("warning:") == 1
    assert f"{server.url} does not take the run" in done.stdout
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))) == 1


@pytest.mark.slow
def test_a_silent_server_is_waited_for_for_seconds() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert connection_problem(address) == f"no answer within {ANSWER_S:.0f} s"


@pytest.mark.slow
def test_a_server_that_answers_anything_is_reached() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OutOfOrder) as answering:
        threading.Thread(target=answering.serve_forever, args=[0.02], daemon=True).start()
        assert connection_problem(f"http://127.0.0.1:{answering.server_port}") == ""
        answering.shutdown()
    assert "refused" in connection_problem(f"http://127.0.0.1:{answering.server_port}")


@pytest.mark.parametrize("error", [TimeoutError("timed out"), URLError(TimeoutError("timed out"))])
def test_a_request_that_gives_up_first_has_the_same_reason(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("urllib.request.urlopen", give_up)
    assert connection_problem("http://127.0.0.1") == f"no answer within {ANSWER_S:.0f} s"


class RecordedRun:
    """Stands for a run of wandb, and keeps what it is told."""

    id = "run-1"

    def __init__(self) -> None:
        self.metrics: dict[str, dict[str, Any]] = {}
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.alerts: list[str] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics[name] = options

    def log(self, row: dict[str, Any], *, step: int) -> None:
        self.rows.append((step, row))

    def alert(self, title: str, text: str, *, level: str) -> None:
        self.alerts.append(f"{level} {title}: {text}")

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


def test_a_run_has_its_axes_config_rows_histograms_a_table_alerts_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started = RecordedRun(), []
    monkeypatch.setattr(wandb, "init", lambda **arguments: started.append(arguments) or run)
    config = WandbConfig(mode="offline", project="p", group="g", run_id="abc")
    sink = wandb_sink.WandbSink(config, tmp_path, {"run": {"steps": 6}}, {"code": 1}, resume=None, warn=print)
    response = {**dict.fromkeys(COLUMNS, "x"), "reward": 1.0, "reward_parts": {"math": 0.5}}
    sink.log(2, {"reward/mean": 0.5}, Details({"reward/histogram": np.histogram([1.0, 2.0], bins=4)}, [response]))
    sink.log(2, {"eval/test/avg@1": 0.25})
    sink.alert("much clipping", "Lower it.")
    sink.close(failed=True)
    wandb_sink.WandbSink(config, tmp_path, {}, {}, resume=("run-1", 2), warn=print)

    first, resumed = started
    assert (first["project"], first["group"], first["id"], first["dir"]) == ("p", "g", "abc", tmp_path)
    assert first["config"] == {"run": {"steps": 6}, "about": {"code": 1}}
    assert (resumed["id"], resumed["resume"], resumed["mode"]) == ("run-1", "allow", "offline")
    assert run.metrics["*"] == {"step_metric": "step"}
    assert run.metrics["eval/*"] == {"step_metric": "step", "summary": "max,last"}
    (step, row), (_, evaluation) = run.rows
    assert (step, row["step"], row["reward/mean"]) == (2, 2, 0.5)
    assert row["reward/histogram"].histogram == [1, 0, 0, 1]
    assert row["responses"].columns == [*COLUMNS, "reward/part/math"]
    assert row["responses"].data[0][-1] == 0.5
    assert evaluation == {"step": 2, "eval/test/avg@1": 0.25}
    assert run.alerts == ["WARN much clipping: Lower it."]
    assert run.exit_code == 1


WITH_SECRETS = """
import contextlib, sys
from pathlib import Path
from rlhf.config.cli import run_program
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.run.folder import RunFolder
from rlhf.run.run_log import RunLog
from rlhf.run.state import RunState

def main():
    config = load_config(GRPOConfig, [sys.argv[1]], sys.argv[2:])
    folder = RunFolder(config.run.dir, resume=False)
    log = RunLog(config, RunState())
    folder.create(config)

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            log.open(folder, stack)
            log.write(1, {"reward/mean": 0.5})
            log.print(f"the judge refused {config.reward.parts[0].options}")
            log.alert("judge", config.reward_model.endpoint)
            raise RuntimeError(f"no answer with {config.reward.parts[0].options}")

    import asyncio
    asyncio.run(run())

sys.exit(run_program(main))
"""


@pytest.mark.slow
def test_no_secret_is_in_any_file_of_a_run_or_in_its_output(tmp_path: Path) -> None:
    secrets = ["fake-env-key-123", "fake-argument-59", "fake-password-41", "0fake" * 8]
    base = Path(__file__).parents[2] / "configs/quickstart.yaml"
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        "logging.wandb.mode=offline",
        "evaluation.metric=reward_model",
        f"reward=[{{name: 'a.b:c', api_key: {secrets[1]}, other: '${{oc.env:FAKE_KEY}}'}}]",
        f"reward_model.endpoint=http://me:{secrets[2]}@127.0.0.1:1/score",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITH_SECRETS, str(base), *overrides],
        env=os.environ | {"FAKE_KEY": secrets[0], "WANDB_API_KEY": secrets[3]},
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "error: no answer with {'api_key': '<secret>', 'other': '<secret>'}" in done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    contents = {"output": (done.stdout + done.stderr).encode()} | {str(path): path.read_bytes() for path in files}
    assert [(name, s) for name, text in contents.items() for s in secrets if s.encode() in text] == []


def test_a_resume_that_the_server_cannot_rewind_is_tried_again_and_at_last_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wandb.init` writes `resume_from` into the settings that it is given, which then allow no `resume`."""
    tried: list[tuple[str, str | None]] = []

    def init(*, mode: str, settings: wandb.Settings, resume_from: str | None = None, **given: Any) -> Any:
        tried.append((mode, resume_from or given["resume"]))
        if resume_from:
            settings.resume_from = resume_from
        else:
            settings.resume = given["resume"]
        if mode == "offline":
            return RecordedRun()
        raise wandb.errors.CommError("cannot")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb_sink, "server_problem", lambda: ("http://server", ""))
    warned: list[str] = []
    config = WandbConfig(mode="online")
    sink = wandb_sink.WandbSink(config, tmp_path, {}, {}, resume=("run-1", 7), warn=warned.append)
    assert sink.run_id == "run-1"
    assert tried == [("online", "run-1?_step=7"), ("online", "allow"), ("offline", "allow")]
    assert len(warned) == 1
