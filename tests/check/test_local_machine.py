"""What Ray and vLLM need of this machine is said before anything starts, with the real limits of the kernel."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import make_config

from rlhf.check.start_checks import (
    RAY_SOCKET,
    SHARED_MEMORY_MIB,
    machine_problems,
    shared_memory_problems,
    start_problems,
)


@pytest.fixture
def short() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="r"))
    yield folder
    shutil.rmtree(folder)


def use_as_temp(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def bind_as_ray_does(folder: Path) -> None:
    path = f"{folder}{RAY_SOCKET}".replace("NUMBER", str(os.getpid()))
    os.makedirs(os.path.dirname(path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)


def test_a_temporary_folder_is_refused_from_the_length_on_at_which_ray_cannot_make_its_sockets(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 107 - len(RAY_SOCKET.replace("NUMBER", str(os.getpid()))) - len(str(short)) - 1
    bind_as_ray_does(use_as_temp(short / ("x" * room), monkeypatch))
    assert [problem for problem in machine_problems() if "TMPDIR" in problem] == []
    longer = use_as_temp(short / ("x" * (room + 1)), monkeypatch)
    with pytest.raises(OSError, match="too long"):
        bind_as_ray_does(longer)
    (problem,) = (problem for problem in machine_problems() if "TMPDIR" in problem)
    length = len(str(longer))
    assert re.match(rf"TMPDIR={longer}: .*\b{length}\b.*\b{length - 1}\b.* TMPDIR=/tmp\.$", problem)


def test_a_home_folder_that_cannot_be_written_is_named_with_all_other_problems_of_a_run(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_config(tiny_model_dir / "model", run={"dir": str(tmp_path / "run")}, cluster={"learners": 500})
    monkeypatch.setenv("HOME", "/proc/nobody")
    problems = start_problems(config)
    assert any(problem.startswith("HOME=/proc/nobody: /proc ") for problem in problems)
    assert any("500 learners" in problem for problem in problems)
    joined = config.model_copy(update={"cluster": config.cluster.model_copy(update={"ray_address": "auto"})})
    assert start_problems(joined) == []  # its nodes have homes of their own
    monkeypatch.setenv("HOME", str(tmp_path / "is" / "made"))
    assert not any("HOME" in problem for problem in start_problems(config))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_the_shared_memory_that_docker_gives_is_too_small(tmp_path: Path) -> None:
    for size, is_enough in ((64, False), (SHARED_MEMORY_MIB, True)):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(tmp_path)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("no right to mount")
        try:
            problems = list(shared_memory_problems(tmp_path))
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)
        assert not problems if is_enough else re.match(rf"{tmp_path}: 64 MiB .*\b256\b.*--shm-size=8g", problems[0])
