"""tools/upgrade_check.py: our calls fit the installed packages, and what a release changes is named."""

from __future__ import annotations

import http.server
import io
import subprocess
import sys
import sysconfig
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import upgrade_check
from python_sources import Sources, of_folder

pytestmark = pytest.mark.slow

INSTALLED = of_folder(Path(sysconfig.get_path("purelib")))
WORKER = upgrade_check.WORKER
RELOAD = "vllm/model_executor/model_loader/reload/"
# file, what a release has in place of what, what is said of it
CHANGES = [
    ("vllm/v1/engine/async_llm.py", "def sleep(self, level", "def sleep(self, depth", "has no parameter level"),
    ("vllm/v1/worker/gpu_worker.py", "def wake_up(", "def awake(", "asked of a worker: " + WORKER + ".wake_up"),
    (
        "vllm/distributed/weight_transfer/nccl_engine.py",
        "    world_size: int\n",
        "    world_size: int\n    token: str\n",
        "NCCLTrainerInitInfo needs token",
    ),
    ("vllm/engine/arg_utils.py", "    scheduling_policy:", "    policy:", "has no parameter scheduling_policy"),
    ("vllm/usage/usage_lib.py", "class UsageContext", "class Context", "engine.py: vllm.usage.usage_lib.UsageContext"),
    (
        "vllm/distributed/weight_transfer/base.py",
        "    def receive_weights(self, update_info",
        "    def receive_weights(self, update_info, group",
        "takes other parameters in receive_weights than update_info, group",
    ),
    (
        "vllm/distributed/weight_transfer/base.py",
        "    @abstractmethod\n    def receive_weights(",
        "    @abstractmethod\n    def prepare(self) -> None: ...\n\n    @abstractmethod\n    def receive_weights(",
        "CPUWeightTransferEngine, of vllm.distributed.weight_transfer.base.WeightTransferEngine, has no prepare",
    ),
    (RELOAD + "meta.py", "def get_numel_loaded(", "def numel_loaded(", "reload.layerwise.get_numel"),
    (
        "transformers/masking_utils.py",
        "def find_packed_sequence_indices(position_ids:",
        "def find_packed_sequence_indices(config, position_ids:",
        "private: transformers.masking_utils.find_packed_sequence_indices has another signature",
    ),
    ("deepspeed/__init__.py", "    args: Any = None,\n    model:", "    x: Any,\n    model:", "initialize needs x"),
    ("ray/util/placement_group.py", "    strategy: Opt", "    plan: Opt", "placement_group has no parameter strategy"),
    ("torch/_C/_VariableFunctions.pyi", "def hash_tensor(", "def hashed(", ": torch.hash_tensor"),
]  # fmt: skip


def lines(reports: dict[str, upgrade_check.Report]) -> list[str]:
    return [line for report in reports.values() for line in (*report.changed, *report.gone)]


@pytest.fixture(scope="module")
def installed() -> Sources:
    """What is installed, read once."""
    return Sources(INSTALLED)


@pytest.mark.slow
def test_what_we_use_fits_the_installed_packages_and_is_found_in_our_source(installed: Sources) -> None:
    reports = upgrade_check.check(installed)
    assert lines(reports) == []
    assert min(len(report.fits) for report in reports.values()) > 15


def test_the_objects_whose_class_is_given_are_in_our_source() -> None:
    names = {use.name for file in upgrade_check.our_uses() for use in file.found}
    for *_, given in upgrade_check.OBJECTS:
        assert any(name.startswith(f"{given}.") for name in names), given


@pytest.mark.slow
def test_what_a_release_changes_is_named(installed: Sources) -> None:
    changed: dict[str, str] = {}
    for file, old, new, _ in CHANGES:
        text = changed.get(file) or INSTALLED(file)
        assert text is not None
        assert old in text, (file, old)
        changed[file] = text.replace(old, new)
    reports = upgrade_check.check(Sources(lambda path: changed.get(path) or INSTALLED(path)), installed)
    for *_, problem in CHANGES:
        assert any(problem in line for line in lines(reports)), problem
    assert all(report.broken for report in reports.values())


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves files, in the pieces that are asked for unless `whole`."""

    whole = False

    def do_GET(self) -> None:
        content = (Path(self.directory) / self.path.lstrip("/")).read_bytes()
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        in_pieces = bool(last) and not self.whole
        self.send_response(206 if in_pieces else 200)
        self.end_headers()
        self.wfile.write(content[int(first) : int(last) + 1] if in_pieces else content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def files(tmp_path: Path) -> Iterator[str]:
    """A wheel and a source archive of a package, and the address where they are."""
    text = "def f(x): ...\n" * 20_000
    about = "Name: p\nVersion: 2\nRequires-Dist: torch==1.2\nRequires-Dist: ray>3; extra == 'more'\n"
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel:
        wheel.writestr("p/__init__.py", text)
        wheel.writestr("p-2.dist-info/METADATA", about)
        wheel.writestr("p/vendored/q-1.dist-info/METADATA", "Name: q\n")
    with tarfile.open(tmp_path / "p.tar.gz", "w:gz") as archive:
        for name, content in (("p-2/p/__init__.py", text), ("p-2/PKG-INFO", about)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/p"
        server.shutdown()


@pytest.mark.parametrize("kind", ["wheel in pieces", "whole wheel", "source archive"])
def test_files_of_a_release_are_read_where_it_lies(
    files: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Server, "whole", kind == "whole wheel")
    wheel = {"url": f"{files}.whl", "size": (tmp_path / "p.whl").stat().st_size}
    listed = {"sdist": {"url": f"{files}.tar.gz"}} if kind == "source archive" else {"wheels": [wheel]}
    release = upgrade_check.open_release({"version": "2", **listed})
    assert release.read("p/nothing.py") is None
    (signature,) = {*Sources(release.read).signatures("p.f")}
    assert signature.names == ("x",)
    assert {name: str(need.specifier) for name, need in release.asks_for().items()} == {"torch": "==1.2"}
    assert ("gives no parts of it" in capsys.readouterr().err) == (kind == "whole wheel")


def test_the_program_ends_with_status_1_if_something_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(upgrade_check.__file__)), "--sources", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "gone: rollout/engine.py: vllm.v1.engine.async_llm.AsyncLLM\n" in run.stdout
