"""A wandb server that goes away while a run is under way, and a service process that is killed."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import WAIT_S

KEY = "0fake" * 8
PROGRAM = """
import sys, time
from pathlib import Path
import psutil
from rlhf.config.sections import WandbConfig
from rlhf.log import wandb_sink
from rlhf.log.sinks import OptionalTracker

mode, folder, finish_s = sys.argv[1:]
wandb_sink.WANDB_FINISH_S, wandb_sink.WANDB_RETRIES = float(finish_s), 1
config = WandbConfig(mode=mode, project="p", entity="e", run_id="abc")
warn = lambda text: print("warning:", text)
wandb_run = wandb_sink.WandbSink(config, Path(folder), {}, {}, resume=None, warn=warn)
sink = OptionalTracker(wandb_run, "logging.wandb", warn)
for step in range(1, 4):
    sink.log(step, {"reward/mean": step / 10})
print("half of it", flush=True)
if sys.stdin.readline() == "kill the service\\n":
    for process in psutil.Process().children(recursive=True):
        process.kill()
    time.sleep(0.5)
for step in range(4, 7):
    sink.log(step, {"reward/mean": step / 10})
sink.attempt(lambda: wandb_run.alert("title", "text"))
sink.close()
"""


class WandbServer(http.server.BaseHTTPRequestHandler):
    """As much of wandb's server as a run needs: it takes the run, its rows and its alerts."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        run = {"id": "QQ==", "name": "abc", "displayName": "d", "projectId": 1, "project": project, "config": "{}"}
        data = {"upsertBucket": {"bucket": run, "inserted": True}, "viewer": {"id": "v", "entity": "e", "flags": "{}"}}
        data |= {"serverInfo": {"features": []}, "createRunFiles": {"runID": "QQ==", "uploadHeaders": [], "files": []}}
        answer = json.dumps({"data": data, "limits": {}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815 - named by http.server

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as answering:
        threading.Thread(target=answering.serve_forever, args=[0.02], daemon=True).start()
        yield answering
        answering.shutdown()


def start(
    folder: Path, server: http.server.ThreadingHTTPServer, mode: str = "online", *, finish_s: float = 60.0
) -> subprocess.Popen[str]:
    """A program that has logged half of its rows."""
    url = f"http://127.0.0.1:{server.server_port}"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mode, str(folder), str(finish_s)],
        env=os.environ | {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout is not None
    while (line := program.stdout.readline()) != "half of it\n":
        assert line, program.communicate()[1]
    return program


@pytest.mark.private
def test_a_server_that_goes_away_costs_seconds_at_the_end_and_one_message(
    server: http.server.ThreadingHTTPServer, tmp_path: Path
) -> None:
    program = start(tmp_path, server, finish_s=2.0)
    server.shutdown()
    server.server_close()
    out, err = program.communicate("\n", timeout=WAIT_S)  # wandb would try for days
    assert (program.returncode, "Traceback" in err) == (0, False), err
    (warning,) = out.splitlines()
    assert warning.startswith("warning: logging.wandb: ")
    assert "metrics.jsonl has all metrics" in warning


def test_a_service_that_is_killed_is_one_message_and_the_run_goes_on(
    server: http.server.ThreadingHTTPServer, tmp_path: Path
) -> None:
    program = start(tmp_path, server, mode="offline")
    out, err = program.communicate("kill the service\n", timeout=WAIT_S)
    assert (program.returncode, "Traceback" in err) == (0, False), err
    (warning,) = out.splitlines()
    assert warning.startswith("warning: logging.wandb: it failed (")


pytestmark = pytest.mark.slow
