"""wandb: what an offline run holds, and a server that is not reached, which costs a message and seconds."""

from __future__ import annotations

import http.server
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from rlhf.config.sections import WandbConfig
from rlhf.log import wandb_sink
from rlhf.log.reachable import ANSWER_S, no_answer
from rlhf.log.wandb_sink import WANDB_START_S

LOAD_S = 20.0  # importing wandb, its service and the end of both, on a busy machine
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

    def do_GET(self) -> None:
        self.send_error(500)

    do_POST = do_GET  # noqa: N815 - named by http.server

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(params=["closed", "silent", "out of order"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, float]]:
    """Address of a port that refuses, of one that accepts and never answers, of one that answers 500; and the wait."""
    if request.param == "out of order":
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OutOfOrder) as answering:
            threading.Thread(target=answering.serve_forever, args=[0.02], daemon=True).start()
            yield f"http://127.0.0.1:{answering.server_port}", WANDB_START_S
            answering.shutdown()
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", ANSWER_S if request.param == "silent" else 0.0


@pytest.mark.slow
def test_a_server_that_does_not_take_the_run_costs_seconds_and_one_message(
    server: tuple[str, float], tmp_path: Path
) -> None:
    url, wait_s = server
    environment = os.environ | {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < wait_s + LOAD_S
    assert done.stdout.count("warning:") == 1
    assert f"{url} does not take the run" in done.stdout
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))) == 1


@pytest.mark.slow
def test_a_server_that_answers_anything_is_reached() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OutOfOrder) as answering:
        threading.Thread(target=answering.serve_forever, args=[0.02], daemon=True).start()
        assert no_answer(f"http://127.0.0.1:{answering.server_port}") == ""
        answering.shutdown()
    assert "refused" in no_answer(f"http://127.0.0.1:{answering.server_port}")


@pytest.mark.parametrize("error", [TimeoutError("timed out"), URLError(TimeoutError("timed out"))])
def test_a_request_that_gives_up_first_has_the_same_reason(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("urllib.request.urlopen", give_up)
    assert no_answer("http://127.0.0.1") == f"no answer within {ANSWER_S:.0f} s"


# --- what an offline run holds, read back from its files ---

LOGGED = """
import sys
from pathlib import Path
import numpy as np
from rlhf.config.sections import WandbConfig
from rlhf.log.patient_files import PatientFiles
from rlhf.log.sinks import Details, JsonlSink
from rlhf.log.wandb_sink import WandbSink

folder, first, last, *resume = sys.argv[1:]
config = WandbConfig(mode="offline", project="p", group="g", run_id="abc")
about = {"code": {"commit": "0123"}}
resumed = (resume[0], int(resume[1])) if resume else None
log = JsonlSink(Path(folder) / "metrics.jsonl", PatientFiles(print), resume_step=resumed and resumed[1])
sink = WandbSink(config, Path(folder), {"run": {"steps": 6}}, about, resume=resumed, warn=print)
row = {"step": 2, "prompt": "1 + 1?", "answer": "2", "text": "2", "extracted": "2", "reward": 1.0, "advantage": 0.5,
       "status": "ok", "finish_reason": "stop", "reward_parts": {"math": 1.0}}
for step in range(int(first), int(last) + 1):
    details = Details({"reward/histogram": np.histogram([step, step + 1.0], bins=4)}, [row] if step == 2 else [])
    values = {"reward/mean": step / 10} | {f"m{i}": 1.0 * i for i in range(900)}  # longer than a block of the file
    log.log(step, values)
    sink.log(step, values, details)
    if step % 2 == 0:
        values = {"eval/test/avg@1": 1.0 - step / 10, "eval/test/response_length": 3.0}
        log.log(step, values)
        sink.log(step, values)
sink.alert("much clipping", "Lower it.")
sink.close()
"""


def run_sink(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-c", LOGGED, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def records(file: Path) -> Iterator[bytes]:
    """The content of each whole record of a .wandb file, which is a log of LevelDB."""
    data, header = file.read_bytes(), struct.Struct("<IHB")
    place = 7
    parts: list[bytes] = []
    while place + header.size <= len(data):
        left = 32768 - place % 32768
        if left < header.size:  # a block ends with zeros where no header fits
            place += left
            continue
        _, length, kind = header.unpack_from(data, place)
        parts.append(data[place + header.size : place + header.size + length])
        place += header.size + length
        if place > len(data) or kind == 0:
            return
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


def read_back(folder: Path) -> tuple[dict[str, list[tuple[int, Any]]], list[Record]]:
    """(step, value) of each metric over all files of the run, in the order of upload; and all records."""
    found = [Record.FromString(r) for file in sorted(folder.glob("wandb/offline-*/*.wandb")) for r in records(file)]
    series: dict[str, list[tuple[int, Any]]] = {}
    for record in found:
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            series.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    return series, found


@pytest.mark.slow
def test_a_resumed_offline_run_goes_on_in_a_second_file_under_the_same_id(tmp_path: Path) -> None:
    run_sink(tmp_path, "0", "5")
    (torn,) = tmp_path.glob("wandb/offline-*/*.wandb")
    torn.write_bytes(torn.read_bytes()[:-7] + b"\xff")  # the program reads none of wandb's files
    run_sink(tmp_path, "4", "6", "abc", "3")  # from the checkpoint of step 3
    series, found = read_back(tmp_path)
    assert [value for _, value in series["step"]] == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert {record.run.run_id for record in found if record.HasField("run")} == {"abc"}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_axes_summaries_histograms_a_table_config_group_and_alerts_are_in_the_files(tmp_path: Path) -> None:
    run_sink(tmp_path, "0", "6")
    series, found = read_back(tmp_path)
    metrics = {m.name or m.glob_name: m for m in (r.metric for r in found if r.HasField("metric"))}
    assert metrics["*"].step_metric == "step"
    assert metrics["eval/*"].summary.max
    assert [value for _, value in series["reward/histogram._type"]] == ["histogram"] * 7
    assert [sum(value) for _, value in series["reward/histogram.values"]] == [2] * 7
    assert series["responses._type"] == [(2, "table-file")]
    assert (series["responses.nrows"], series["responses.ncols"]) == ([(2, 1)], [(2, 10)])
    run = next(record.run for record in found if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.project, run.run_group, config["run"]["steps"]) == ("p", "g", 6)
    assert config["about"]["code"]["commit"] == "0123"
    assert [record.alert.title for record in found if record.HasField("alert")] == ["much clipping"]


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
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "error: no answer with {'api_key': '<secret>', 'other': '<secret>'}" in done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    contents = {"output": (done.stdout + done.stderr).encode()} | {str(path): path.read_bytes() for path in files}
    assert [(name, s) for name, text in contents.items() for s in secrets if s.encode() in text] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("login", "server", "found"),
    [
        ("api.wandb.ai", None, True),  # wandb's own server, by the name that an older wandb has stored
        ("api.wandb.ai", "http://wandb.company:8080", False),
        ("wandb.company:8080", "http://wandb.company:8080", True),
    ],
)
def test_a_key_is_found_for_the_server_of_wandbs_settings_alone(
    login: str, server: str | None, found: bool, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text(f"machine {login}\n  login user\n  password {'0' * 40}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")} | (
        {"WANDB_BASE_URL": server} if server else {}
    )
    program = "from rlhf.log.wandb_sink import has_wandb_key; print(has_wandb_key())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(found)


def test_a_resume_that_the_server_cannot_rewind_is_tried_again_and_at_last_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wandb.init` writes `resume_from` into the settings that it is given, which then allow no `resume`."""
    tried: list[tuple[str, str | None]] = []
    offline = SimpleNamespace(id="run-1", define_metric=lambda *_, **__: None)

    def init(*, mode: str, settings: wandb.Settings, resume_from: str | None = None, **given: Any) -> Any:
        tried.append((mode, resume_from or given["resume"]))
        if resume_from:
            settings.resume_from = resume_from
        else:
            settings.resume = given["resume"]
        if mode == "offline":
            return offline
        raise wandb.errors.CommError("cannot")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb_sink, "server_problem", lambda: ("http://server", ""))
    warned: list[str] = []
    config = WandbConfig(mode="online")
    sink = wandb_sink.WandbSink(config, tmp_path, {}, {}, resume=("run-1", 7), warn=warned.append)
    assert sink.run_id == "run-1"
    assert tried == [("online", "run-1?_step=7"), ("online", "allow"), ("offline", "allow")]
    assert len(warned) == 1
