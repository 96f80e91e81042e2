"""A hub that does not answer ends the start in seconds, with one message for each model that only it has."""

from __future__ import annotations

import http.server
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from worlds import make_config

from rlhf.check.start_checks import input_problems
from rlhf.config.data import SourceConfig
from rlhf.data.model_files import hub_silence
from rlhf.data.read import Source
from rlhf.log import reachable


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(params=["nothing listens", "nobody answers"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(reachable, "ANSWER_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "nobody answers":
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield url


def problems_of(folder: Path, /, **paths: dict[str, str]) -> list[str]:
    return input_problems(make_config(folder, **paths))


def test_a_model_that_only_a_silent_hub_has_is_a_message_of_its_own(tiny_model_dir: Path, silent: str) -> None:
    model = tiny_model_dir / "model"
    assert problems_of(model) == []
    (problem,) = problems_of(model, model={"path": "someone/model"})
    assert problem.startswith("model.path=someone/model: ")
    assert f"({silent}: " in problem
    assert problem.endswith("hf download someone/model")


def test_a_model_in_the_cache_needs_no_hub(tiny_model_dir: Path, empty_cache: Path, silent: str) -> None:
    model = tiny_model_dir / "model"
    shutil.copytree(model, empty_cache / "hub" / "models--someone--model" / "snapshots" / "main")
    assert problems_of(model, model={"path": "someone/model"}) == []


def test_data_that_only_a_silent_hub_has_ends_the_reading_of_it(silent: str) -> None:
    told = r"^data\.train=a/b: .* hf download a/b --repo-type dataset$"
    with pytest.raises(ValueError, match=told):
        Source("data.train", SourceConfig(path="a/b"), "train").read()


@pytest.mark.slow
def test_a_hub_that_answers_with_any_status_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Forbidden) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_silence() == ""
        server.shutdown()


def test_offline_mode_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_silence() == "HF_HUB_OFFLINE is set"
