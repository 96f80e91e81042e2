"""A hub that does not answer ends the start in seconds, with one message for each name that only it has."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from worlds import make_config

from rlhf.data import hub_reachable
from rlhf.log import reachable
from rlhf.plan.start_checks import input_problems

MODELS, DATA = {"model.path": "someone/model"}, {"data.train": "someone/data"}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(reachable, "ANSWER_S", 0.2)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(params=["nothing listens", "nobody answers"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "nobody answers":
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield url


def test_every_name_that_only_a_silent_hub_has_is_a_message_of_its_own(silent: str) -> None:
    model, data = hub_reachable.hub_problems(MODELS, DATA)
    assert model.startswith("model.path=someone/model: there is no such folder, the cache of this machine does not")
    assert f"the hub cannot be asked ({silent}: " in model
    assert model.endswith("Name a local folder, or fetch it where the hub answers: hf download someone/model")
    assert data.startswith("data.train=someone/data: there is no such file, ")
    assert data.endswith("hf download someone/data --repo-type dataset")


def test_what_is_in_a_cache_needs_no_hub(empty_cache: Path, silent: str) -> None:
    (empty_cache / "hub" / "models--someone--model").mkdir(parents=True)
    (empty_cache / "datasets" / "someone___data").mkdir(parents=True)
    assert hub_reachable.hub_problems(MODELS, DATA) == []


def test_a_hub_that_answers_with_any_status_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Forbidden) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_reachable.hub_problems(MODELS, DATA) == []
        server.shutdown()


def test_offline_mode_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "(HF_HUB_OFFLINE is set)" in hub_reachable.hub_problems(MODELS, {})[0]


def test_the_start_of_a_run_asks_for_every_name_at_the_hub_and_for_no_local_path(
    tiny_model_dir: Path, silent: str
) -> None:
    assert input_problems(make_config(tiny_model_dir / "model")) == []
    config = make_config(tiny_model_dir / "model", data={"train": "a/b", "eval": "c/d"}, model={"path": "e/f"})
    named = [problem.split(":")[0] for problem in input_problems(config)]
    assert named == ["model.path=e/f", "data.eval=c/d", "data.train=a/b"]
