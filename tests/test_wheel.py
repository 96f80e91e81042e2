"""What `make wheel` builds, and that it works in an empty environment and an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import rlhf
from rlhf.config import cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SHIPPED = "rlhf", "configs", "recipes"


def tracked(*folders: str) -> set[str]:
    """Committed and new files of the checkout, without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make wheel` fills, for a copy of the checkout in which people's commands have left files."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    (copy / "configs/grpo.schema.json").write_text("{}")
    (copy / "configs/__pycache__").mkdir()
    (copy / "configs/__pycache__/calculator_agent.cpython-311.pyc").write_bytes(b"")
    make = ["make", "--no-print-directory", "wheel", "-o", "environment", f"PY={sys.executable}"]
    done = subprocess.run(make, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("uv pip install ")
    return copy / "dist"


def wheel_of(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def test_the_wheel_holds_the_package_with_configs_and_recipes_and_nothing_else(built: Path) -> None:
    names = set(zipfile.ZipFile(wheel_of(built)).namelist())
    info = next(name.split("/")[0] for name in names if name.endswith("/METADATA"))
    assert re.fullmatch(r"rlhf_trainer-[\d.]+\.dist-info", info)
    place = f"{info.removesuffix('.dist-info')}.data/data/{cli.INSTALLED.relative_to(sys.prefix)}/"
    about = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    assert {name.removeprefix(place) for name in names} - about == tracked(*SHIPPED) | {f"{info}/licenses/LICENSE"}


def test_the_source_distribution_builds_the_same_wheel_and_holds_no_tests(built: Path) -> None:
    """The wheel was built from it."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert tracked(*SHIPPED) | {"setup.py", "LICENSE"} <= names
    assert not [name for name in names if name.split("/")[0] in ("tests", "docs", "tools")]


@pytest.mark.faults
@pytest.mark.registry
def test_the_wheel_works_in_an_empty_environment_and_an_empty_folder(built: Path, tmp_path: Path) -> None:
    environment, folder = tmp_path / "env", tmp_path / "folder"
    folder.mkdir()
    settings = {**os.environ, "VENV": str(environment), "PROJECT": str(wheel_of(built))}
    installed = subprocess.run(
        [ROOT / "tools/setup.sh", "cpu"], env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if "no package registry" in installed.stderr or "uv could not install" in installed.stderr:
        pytest.skip(f"no package registry answers: {installed.stderr}")
    assert installed.returncode == 0, installed.stderr

    def run(*arguments: str) -> str:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [environment / "bin/rlhf", *arguments]
        done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("--version") == f"rlhf {rlhf.__version__}\n"
    assert run("configs").startswith(f"{environment}/share/rlhf/configs:\n  cispo ")
    run("quickstart", "--warmup-steps", "0")
    assert "optimizer steps" in run("grpo", "--config", "configs/quickstart.yaml", "--plan")
    assert "1. Sums" in run("recipe")
    assert "usage: rlhf report" in run("report", "--help")
