"""wandb whose server is not reached: a message, an offline run and a program that ends, all within seconds."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.log.sinks import WANDB_ANSWER_S, WANDB_START_S, no_answer

LOAD_S = 20.0  # importing wandb, its service and the end of both, on a busy machine
PROGRAM = """
import sys
from pathlib import Path
from rlhf.config.sections import WandbConfig
from rlhf.log.sinks import WandbSink
sink = WandbSink(WandbConfig(), Path(sys.argv[1]), {"a": 1}, run_id=None, warn=lambda text: print("warning:", text))
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
            threading.Thread(target=answering.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{answering.server_port}", WANDB_START_S
            answering.shutdown()
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", WANDB_ANSWER_S if request.param == "silent" else 0.0


@pytest.mark.scripts
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


def test_a_server_that_answers_anything_is_reached() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OutOfOrder) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        assert no_answer(f"http://127.0.0.1:{answering.server_port}") == ""
        answering.shutdown()
    assert "refused" in no_answer(f"http://127.0.0.1:{answering.server_port}")
