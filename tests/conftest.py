"""What all tests share: no network, a tiny model, and a guard against processes that outlive their test."""

from __future__ import annotations

import gc
import logging
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read when the libraries are imported, so set before any test module is; inherited by every process of the stack.
os.environ["HF_HUB_OFFLINE"] = "1"
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU, Triton's interpreter runs the kernels
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["RAY_raylet_start_wait_time_s"] = "90"  # noqa: SIM112 - Ray spells it so; 30 are too few on a busy machine
os.environ.pop("RAY_ADDRESS", None)  # a run of a test never joins a cluster that happens to be there

import pytest
from hypothesis import HealthCheck, settings
from processes import Watch
from waiting import STACK_WAIT_S

from rlhf.check.resources import visible_gpus

# A shell starts its background jobs with SIGINT ignored, nohup with SIGHUP, and children inherit that: tests of these
# signals would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # while tests are collected; it would look through what is being imported again and again

# Random cases state nothing about time: hypothesis would fail an example that takes 0.2 s on a busy machine.
settings.register_profile("without time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without time")

# Small enough for a test, and still with several layers and heads; vLLM on CPU takes heads of 32 or more.
TINY_MODEL = {"hidden_size": 64, "num_layers": 2, "num_heads": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits and order; a `stack` test may start several programs, one after another, next to other jobs."""
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") and not visible_gpus():
            item.add_marker(no_gpu)
        if item.get_closest_marker("stack"):
            item.add_marker(pytest.mark.timeout(3 * STACK_WAIT_S))
    # The long ones first: with two workers, the quick ones fill what is left, and none waits for one long last test.
    long = {item.path for item in items if item.get_closest_marker("stack")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind calls it a leak, on the terminal


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/`, `train.jsonl` and `test.jsonl` of the quickstart, small and untrained; tests only read them."""
    from rlhf.quickstart import write_quickstart

    output = tmp_path_factory.mktemp("tiny") / "quickstart"
    write_quickstart(output, seed=0, warmup_steps=0, train_rows=256, test_rows=64, model_options=TINY_MODEL)
    return output


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """SmolLM2-135M-Instruct, made once per machine and kept in the user's cache; skips where it cannot be had."""
    import fcntl

    fetch = runpy.run_path(str(Path(__file__).parent.parent / "recipes/08-lora-smollm2/fetch_model.py"))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhf-tests"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:  # several workers of pytest may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / fetch["NAME"]).is_dir():
            try:
                fetch["write_real_model"](cache / fetch["NAME"])
            except RuntimeError as error:
                pytest.skip(str(error))
    return cache / fetch["NAME"]


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """What a test draws without a generator of its own does not depend on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would keep a traceback of each call
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.fixture
def log_records() -> Iterator[list[logging.LogRecord]]:
    """What is logged during the test. pytest's `caplog` is off: it took a fifth of the time of the fast tests."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(), logging.getLogger("vllm")]  # the latter's do not come to the root
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def whole_lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs do not break what they print into lines of 80 columns: tests look for parts of a message."""
    if request.node.get_closest_marker("stack") is not None:
        monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A `stack` test fails when a process that it started outlives it; the process is killed."""
    if request.node.get_closest_marker("stack") is None:
        yield
        return
    watch = Watch()
    watch.start()
    yield
    left = watch.end_what_is_left()
    assert not left, "left behind by this test, and killed:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind_at_the_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for what fixtures of a module or of the session start."""
    if not any(item.get_closest_marker("stack") for item in request.session.items):
        yield
        return
    watch = Watch()
    watch.start()
    yield
    left = watch.end_what_is_left()
    assert not left, "left behind by the tests, and killed:\n" + "\n".join(left)


@pytest.fixture
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes its norms in float32, also in a float64 model: a sum of gradients is rounded otherwise."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    for norm in (Qwen2RMSNorm, LlamaRMSNorm, MistralRMSNorm):
        monkeypatch.setattr(norm, "forward", forward)
