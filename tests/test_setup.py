"""Set-up: what was installed, and the one line for each thing that a machine may lack."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
from installed import PLUGIN

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "gpu-constraints.txt"


def free_disk(folder: Path, gib: int) -> None:
    """A stand-in for `df`."""
    folder.mkdir(exist_ok=True)
    (folder / "df").write_text(f"#!/bin/sh\nprintf 'head\\ndisk 0 0 {gib * 2**20} 0%% /\\n'\n")
    (folder / "df").chmod(0o755)


@pytest.fixture(autouse=True)
def room_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How full the disk of this machine is has nothing to do with these tests."""
    free_disk(tmp_path / "bin", 100)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


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
    assert line.startswith("setup: no C++ compiler (no-such-compiler)")


@pytest.mark.parametrize(("kind", "needed"), [("cpu", 5), ("gpu", 16)])
def test_a_disk_that_is_too_full_is_named(tmp_path: Path, kind: str, needed: int) -> None:
    free_disk(tmp_path / "bin", 4)
    line = setup_refuses(tmp_path, kind)
    assert re.fullmatch(rf"setup: 4 GiB free in {re.escape(str(ROOT))}, .*\b{needed}\b.*\bVENV=\.", line)


@pytest.mark.parametrize("kind", ["tpu", "--help"])
def test_an_unknown_kind_names_the_known_ones(tmp_path: Path, kind: str) -> None:
    assert re.fullmatch(rf"setup: {kind} .*: cpu or gpu\.", setup_refuses(tmp_path, kind))


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("precious")
    line = setup_refuses(tmp_path, "cpu", VENV=str(tmp_path / "mine"))
    assert line.startswith(f"setup: VENV={tmp_path}/mine exists")
    assert (tmp_path / "mine/file").read_text() == "precious"


def test_an_environment_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/rlhf-setup").write_text("cpu\ncpu,dev\n0 0\n")
    line = setup_refuses(tmp_path, "gpu", VENV=str(tmp_path / "mine"))
    assert re.fullmatch(rf"setup: {tmp_path}/mine .*\bfor cpu\b.*\bVENV=\.", line)


def write_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel with the command and the plug-in of this package, and nothing else."""
    info, wheel = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        written.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        plugin = PLUGIN.format("rlhf = rlhf.weights.transfer:register_with_vllm")
        written.writestr(f"{info}/entry_points.txt", f"[console_scripts]\nrlhf = rlhf.command:start\n{plugin}")
        written.writestr(f"{info}/RECORD", "")
    return wheel


def test_an_older_distribution_named_rlhf_does_not_stay_next_to_the_new_one(tmp_path: Path) -> None:
    pytest.importorskip("uv")
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    found = find_spec("uv")
    assert found is not None
    assert found.origin is not None
    (packages / "uv.pth").write_text(f"{Path(found.origin).parents[1]}\n")
    (packages / "torchvision.py").write_text("")
    (packages / "torch.py").write_text("class version:\n    cuda = None\n")
    older, newer = write_wheel(tmp_path, "rlhf", "0.2.0"), write_wheel(tmp_path, "rlhf_trainer", "0.2.0")
    install = ["-m", "uv", "pip", "install", "--quiet", "--offline", "--python", str(environment), str(older)]
    subprocess.run([sys.executable, *install], check=True)
    settings = {**os.environ, "VENV": str(environment), "PROJECT": str(newer), "UV_OFFLINE": "1"}
    subprocess.run([ROOT / "tools/setup.sh", "cpu"], env=settings, check=True, stdin=subprocess.DEVNULL)
    assert [folder.name for folder in packages.glob("rlhf*.dist-info")] == ["rlhf_trainer-0.2.0.dist-info"]
    assert (environment / "bin/rlhf").is_file()


# --- the set-up for GPUs ---


def nvidia_smi(folder: Path, driver: str, *capabilities: str) -> None:
    """A stand-in for `nvidia-smi` of a machine with these GPUs."""
    answers = f"*driver*) printf '{driver}\\n' ;; *) printf '%s\\n' {' '.join(capabilities)} ;;"
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$1" in {answers} esac\n')
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("driver", "capabilities", "says"),
    [
        ("570.86.10", ["9.0"], r"driver .*\b570\.86\.10\b.*\bCUDA 13 needs 580\b"),
        ("580.65.06", ["7.0", "7.5"], r"capability 7\.5\b.*\b8\.0\b.*\bA100\b"),
        ("No devices were found", [], r"nvidia-smi .*\bdriver_version\b.*\(No devices were found\)"),
    ],
)
def test_a_driver_or_a_gpu_that_is_too_old_is_named_before_anything_is_installed(
    tmp_path: Path, driver: str, capabilities: list[str], says: str
) -> None:
    nvidia_smi(tmp_path / "bin", driver, *capabilities)
    assert re.match(rf"setup: .*{says}", setup_refuses(tmp_path, "gpu"))


def test_a_machine_with_one_gpu_that_will_do_is_set_up(tmp_path: Path) -> None:
    nvidia_smi(tmp_path / "bin", "1000.10", "7.5", "10.0")  # numbers, not texts, are compared
    line = setup_refuses(tmp_path, "gpu", PYTHON=str(tmp_path / "nowhere"))
    assert line.startswith("setup: no Python 3.11 to 3.13 to make ")  # the check that comes next


def test_the_cuda_bindings_are_pinned_to_one_major_version() -> None:
    """Otherwise flashinfer and cutlass, and so vllm, cannot be imported."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE))
    assert {"torch", "vllm", "deepspeed", "ray", "transformers", "flashinfer-python", "nvidia-nccl-cu13"} <= pins.keys()
    major = {name: int(pins[name].split(".")[0]) for name in ("cuda-python", "cuda-bindings")}
    assert major["cuda-python"] == major["cuda-bindings"] >= 13


@pytest.mark.registry
def test_the_pins_for_gpus_resolve_and_leave_no_package_open(tmp_path: Path) -> None:
    """uv keeps the versions of a file that it writes again; it changes those that do not resolve any more."""
    pytest.importorskip("uv")
    (command,) = re.findall(r"-m (uv pip compile .*\\\n.*)-o", (ROOT / "Makefile").read_text())
    copy = tmp_path / CONSTRAINTS.name
    copy.write_text(CONSTRAINTS.read_text())
    words = shlex.split(command.replace("\\\n", " "))
    made = subprocess.run(
        [sys.executable, "-m", *words, "-o", copy], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if re.search("Failed to fetch|network was disabled", made.stderr):
        pytest.skip(f"no package registry answers: {made.stderr}")
    assert made.returncode == 0, made.stderr
    assert copy.read_text() == CONSTRAINTS.read_text()
