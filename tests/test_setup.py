"""Set-up: what was installed, and the one line for each thing that a machine may lack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")  # as in pyproject.toml
RESOLVED_WITHIN_S = 90


def setup_refuses(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """The one line of a set-up that cannot work; nothing is made by it."""
    folder = tmp_path / "env"
    found = subprocess.run(
        [ROOT / "tools/setup.sh", *arguments],
        env={**os.environ, "VENV": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode != 0
    assert found.stdout == ""
    assert not folder.exists()
    (line,) = found.stderr.splitlines()
    return line


def interpreter(tmp_path: Path, answer: str) -> str:
    """A stand-in for a Python that the probe finds wanting."""
    path = tmp_path / "python3"
    path.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exit 1\necho "{answer}"\n')
    path.chmod(0o755)
    return str(path)


def test_vllm_finds_the_plugin() -> None:
    (found,) = {point.value for point in entry_points(group="vllm.general_plugins") if point.name == "rlhf"}
    assert found == "rlhf.weights.transfer:register_with_vllm"


def test_the_first_line_says_that_python_is_not_there(tmp_path: Path) -> None:
    line = setup_refuses(tmp_path, "cpu", PYTHON=str(tmp_path / "nowhere"))
    assert line.startswith("setup: no Python 3.11 to 3.13 to make ")
    assert line.endswith("nowhere does not run.")


def test_what_is_wrong_with_a_python_is_named(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "cp311 has no venv module: install it")
    line = setup_refuses(tmp_path, "cpu", PYTHON=python)
    assert line.endswith(f"{python} has no venv module: install it.")


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    line = setup_refuses(tmp_path, "cpu", CXX="no-such-compiler")
    assert line.startswith("setup: no C++ compiler (no-such-compiler), which DeepSpeed's op needs: install g++")


@pytest.mark.parametrize("kind", ["tpu", "--help"])
def test_an_unknown_kind_names_the_known_ones(tmp_path: Path, kind: str) -> None:
    assert setup_refuses(tmp_path, kind) == f"setup: {kind} is no kind of set-up: cpu or gpu."


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("precious")
    line = setup_refuses(tmp_path, "cpu", VENV=str(tmp_path / "mine"))
    assert line == f"setup: VENV={tmp_path}/mine exists and is no Python environment: name another folder."
    assert (tmp_path / "mine/file").read_text() == "precious"


def test_an_environment_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/rlhf-setup").write_text("cpu\ncpu,dev\n0 0\n")
    line = setup_refuses(tmp_path, "gpu", VENV=str(tmp_path / "mine"))
    assert line == f"setup: {tmp_path}/mine was set up for cpu: delete it first, or name another folder with VENV=."


# --- what the set-up for GPUs would install ---


@pytest.fixture(scope="module")
def gpu_packages() -> dict[str, dict[str, str]]:
    """Python -> package -> version, as uv resolves the extra for Linux on x86-64; skips where no registry answers."""
    pytest.importorskip("uv")
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    index = re.search(r"index-url='(.+)'", re.sub(r".*extra-index-url.*", "", settings))
    environment = {**os.environ, **({"UV_DEFAULT_INDEX": index[1]} if index else {})}
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--extra", "gpu", "--quiet"]
    command += ["--no-header", "--no-annotate", "--python-platform", "x86_64-unknown-linux-gnu", "--python-version"]
    resolutions = [
        subprocess.Popen(
            [*command, python], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for python in PYTHONS
    ]
    deadline, found = time.monotonic() + RESOLVED_WITHIN_S, {}
    try:
        for python, resolution in zip(PYTHONS, resolutions, strict=True):
            listed, problem = resolution.communicate(timeout=max(1.0, deadline - time.monotonic()))
            if "Failed to fetch" in problem or "network was disabled" in problem:
                pytest.skip(f"no package registry answers: {problem.splitlines()[0]}")
            assert resolution.returncode == 0, problem
            found[python] = dict(re.findall(r"^([\w.-]+)==(\S+)", listed, re.MULTILINE))
    except subprocess.TimeoutExpired:
        pytest.skip(f"no package registry answers within {RESOLVED_WITHIN_S} s")
    finally:
        for resolution in resolutions:
            resolution.kill()
            resolution.communicate()
    return found


@pytest.mark.registry
@pytest.mark.parametrize("python", PYTHONS)
def test_the_packages_for_gpus_have_one_major_of_the_cuda_bindings(
    gpu_packages: dict[str, dict[str, str]], python: str
) -> None:
    packages = gpu_packages[python]
    major = {name: int(packages[name].split(".")[0]) for name in ("cuda-python", "cuda-bindings")}
    assert major["cuda-python"] == major["cuda-bindings"] >= 13, (
        "flashinfer and cutlass, and so vllm, cannot be imported"
    )
