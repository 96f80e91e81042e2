"""Damaged, half-written, foreign and missing checkpoints: a run goes on from what is whole, or says in one message why.

The disk, the processes and the mirror are real; only the ranks are stood in for, by ones that write real files.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Ranks, write_checkpoint
from fsspec.implementations.local import LocalFileSystem
from transformers import AutoTokenizer
from waiting import WAIT_S
from worlds import make_config

from rlhf.config.sections import CheckpointConfig
from rlhf.learner.rank_checkpoint import WEIGHTS, SliceReader
from rlhf.run.checkpoint_files import find_damage, manifest_files
from rlhf.run.checkpoint_mirror import Mirror
from rlhf.run.checkpoint_saver import CheckpointSaver
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState

TENSORS = {"w": torch.arange(60_000.0), "b": torch.ones(3)}
SMALLER = {"w": torch.arange(600.0)}


def write(folder: RunFolder, step: int, *, keep: int = 9) -> Path:
    return asyncio.run(write_checkpoint(folder, RunState(step=step), TENSORS, keep=keep))


def run_with(path: Path, *steps: int) -> RunFolder:
    folder = RunFolder(path, resume=False)
    for step in steps:
        write(folder, step)
    return folder


# --- damage ---


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def put_a_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps(Bomb(file.with_name("exploded"))))


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, empty, Path.unlink, make_a_folder, put_a_pickle])
@pytest.mark.parametrize("name", ["weights-00001.safetensors", "learner.json", "driver.json", "manifest.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run_with(tmp_path, 2, 4)
    oldest, newest = (tmp_path / "checkpoints" / f"step-00000{step}" for step in (2, 4))
    damage(newest / name)
    resumed = RunFolder(tmp_path, resume=True)
    assert resumed.restored == oldest
    (warning,) = resumed.warnings
    flipped_in_text = name == "manifest.json" and damage is flip_a_byte  # may be another number in the manifest
    assert "step-000004: " in warning
    assert "step-000002" not in warning
    assert name in warning or flipped_in_text
    assert not (newest / "exploded").exists()
    damage(oldest / name)
    with pytest.raises(ValueError, match=rf"(?s)^run\.dir={tmp_path}: --resume .*step-000004: .*step-000002: "):
        RunFolder(tmp_path, resume=True)


def test_a_pickle_that_the_manifest_vouches_for_is_refused_and_never_run(tmp_path: Path) -> None:
    run_with(tmp_path, 2)
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    shard = checkpoint / "weights-00000.safetensors"
    put_a_pickle(shard)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    from rlhf.run.checkpoint_files import checksum

    manifest["files"][shard.name] = {"bytes": shard.stat().st_size, "crc32": checksum(shard)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert find_damage(checkpoint) == ""
    with pytest.raises(ValueError, match=r"weights-00000\.safetensors: "):
        SliceReader(checkpoint, WEIGHTS, ranks=range(2))
    assert not (checkpoint / "exploded").exists()


def test_files_that_nobody_wrote_change_nothing(tmp_path: Path) -> None:
    run_with(tmp_path, 2)
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    put_a_pickle(checkpoint / "optimizer.pt")
    put_a_pickle(checkpoint / "weights-00002.safetensors")
    (tmp_path / "checkpoints" / "step-000009").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    resumed = RunFolder(tmp_path, resume=True)
    assert resumed.restored == checkpoint
    assert "step-000009: manifest.json is missing" in resumed.warnings[0]


def test_a_manifest_that_names_a_file_elsewhere_is_refused() -> None:
    for name in ("/etc/hosts", "../step-000002/driver.json", "model/../../x"):
        text = json.dumps({"format": 2, "files": {name: {"bytes": 1, "crc32": "00000000"}}}).encode()
        with pytest.raises(ValueError, match=rf"manifest\.json.*{re.escape(name)}"):
            manifest_files(text)


def test_a_checkpoint_of_the_format_before_is_refused_by_name(tmp_path: Path) -> None:
    run_with(tmp_path, 2)
    manifest = tmp_path / "checkpoints" / "step-000002" / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["format"]
    manifest.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"step-000002: .*\bformat 1\b.*\bformat 2\b"):
        RunFolder(tmp_path, resume=True)


# --- the disk ---


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """The kernel refuses to let a file grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def as_an_ordinary_user(*owned: Path) -> Iterator[None]:
    """Permissions do not bind root: files of `owned` are given to another user, whom the block runs as."""
    if os.geteuid() != 0:
        yield
        return
    for folder in owned:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534)
    opened = [parent for folder in owned for parent in folder.parents if (parent.stat().st_mode & 0o055) != 0o055]
    modes = [(parent, parent.stat().st_mode) for parent in opened]
    for parent, mode in modes:
        parent.chmod(mode | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in modes:
            parent.chmod(mode)


class Saves:
    """A saver of two ranks, and what it warned of. `scores`: the evaluations so far, by step."""

    def __init__(self, folder: RunFolder, tokenizer_of: Path, mirror: Mirror | None = None) -> None:
        self.scores: dict[int, float] = {}
        self.warnings: list[str] = []
        cluster: Any = Ranks(TENSORS, 2)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
        config = CheckpointConfig(keep=2, best="score")
        self.saver = CheckpointSaver(config, folder, cluster, tokenizer, mirror, self.warnings.append)

    def save(self, step: int) -> str:
        """Save, and wait for the end; why it failed, or "" """

        async def whole() -> None:
            await self.begin(step)
            await self.saver.finish()

        asyncio.run(whole())
        return self.saver.save_error

    async def begin(self, step: int) -> None:
        await self.saver.save(RunState(step=step, evaluations={at: {"score": s} for at, s in self.scores.items()}))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


@pytest.fixture
def model(tiny_model_dir: Path) -> Path:
    return tiny_model_dir / "model"


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_and_the_next_save_is_whole(
    tmp_path: Path, model: Path
) -> None:
    saves = Saves(run_with(tmp_path, 2), model)
    with files_limited_to(100_000):
        assert "File too large" in saves.save(4)
    assert names(tmp_path) == ["step-000002"]
    assert "step 4 could not be written" in saves.warnings[0]
    assert "tried again after the next step" in saves.warnings[0]
    assert saves.save(5) == ""
    assert names(tmp_path) == ["step-000002", "step-000005"]
    assert RunFolder(tmp_path, resume=True).restored == tmp_path / "checkpoints" / "step-000005"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000005\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_save_that_the_disk_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(run)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    needed = 3 * 4 * 60_003

    def leave(free: int) -> None:
        (run / "filler").unlink(missing_ok=True)
        (run / "filler").write_bytes(bytes(shutil.disk_usage(run).free - free))

    try:
        saves = Saves(run_with(run, 2), model)
        assert saves.save(4) == ""
        leave(needed - 4096)
        assert f"checkpoints: a checkpoint takes {needed:,} bytes, but only " in saves.save(6)
        leave(needed + 8192)  # until the small files, too, want room
        assert "exp_avg_sq-00001.safetensors: Error while serializing: I/O error: No space left" in saves.save(7)
        assert names(run) == ["step-000002", "step-000004"]
        assert RunFolder(run, resume=True).restored == run / "checkpoints" / "step-000004"
        (run / "filler").unlink()
        assert saves.save(8) == ""
        assert names(run) == ["step-000004", "step-000008"]
    finally:
        subprocess.run(["umount", str(run)], check=True)


def test_a_folder_that_becomes_read_only_costs_no_checkpoint(tmp_path: Path, model: Path) -> None:
    saves = Saves(run_with(tmp_path / "run", 2), model)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.chmod(0o555)
    with as_an_ordinary_user(tmp_path / "run"):
        assert "Permission denied" in saves.save(4)
        assert names(tmp_path / "run") == ["step-000002"]
        checkpoints.chmod(0o755)
        assert saves.save(5) == ""
    assert names(tmp_path / "run") == ["step-000002", "step-000005"]


def test_a_run_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o555)
    folder = RunFolder(tmp_path / "run", resume=False)
    with (
        as_an_ordinary_user(tmp_path / "run"),
        pytest.raises(ValueError, match=r"^run\.dir=.*rollouts: Permission"),
    ):
        folder.create(make_config(tmp_path / "model"))


def test_an_old_checkpoint_that_cannot_be_removed_is_named_and_no_longer_taken_for_one(
    tmp_path: Path, model: Path
) -> None:
    run = tmp_path / "run"
    saves = Saves(run_with(run, 2, 4), model)
    (run / "checkpoints" / "step-000002").chmod(0o555)
    with as_an_ordinary_user(run):
        assert saves.save(6) == ""
    assert "an old checkpoint is still there: " in saves.warnings[0]
    assert "Permission denied. Remove it by hand." in saves.warnings[0]
    assert names(run) == ["step-000002.partial", "step-000004", "step-000006"]
    assert RunFolder(run, resume=True).restored == run / "checkpoints" / "step-000006"


def test_a_learner_on_a_node_with_another_disk_is_found_out(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 2)

    async def save_elsewhere() -> None:
        cluster, partial = Ranks(TENSORS, 2), folder.begin_checkpoint(4)
        await cluster.save(partial)
        (partial / "exp_avg-00001.safetensors").unlink()
        folder.finish_checkpoint(partial, RunState(step=4), keep=2, written=await cluster.finish_save())

    with pytest.raises(OSError, match=r"exp_avg-00001.*\brun\.dir\b"):
        asyncio.run(save_elsewhere())


# --- a kill at every write of a save ---

SAVE = """
import asyncio, os, sys
import torch
from pathlib import Path
from checkpoints import write_checkpoint
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState

run, moments = Path(sys.argv[1]), 0
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}

def watch(event, arguments):
    global moments
    if event in CHANGES or (event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
        moments += 1
        if moments == limit:
            os._exit(9)

async def save():
    folder = RunFolder(run, resume=True)
    await write_checkpoint(folder, RunState(step=4), {"w": torch.arange(600.0)}, keep=1)

sys.addaudithook(watch)
limit = 0
for number in range(1, 1000):
    child = os.fork()
    if child == 0:
        moments, limit = 0, number
        asyncio.run(save())
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    resumed = RunFolder(run, resume=True)
    print(number, status, resumed.restored.name, resumed.read_state(resumed.restored).step, flush=True)
    if status == 0:
        break
    import shutil
    shutil.rmtree(run)
    shutil.copytree(sys.argv[2], run)
"""


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a thousand syncs to a busy disk take a minute."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_kill_at_any_write_of_a_save_leaves_a_whole_checkpoint(quick_disk: Path) -> None:
    asyncio.run(write_checkpoint(RunFolder(quick_disk / "start", resume=False), RunState(step=2), SMALLER))
    shutil.copytree(quick_disk / "start", quick_disk / "run")
    command = [sys.executable, "-c", SAVE, str(quick_disk / "run"), str(quick_disk / "start")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1] for row in rows] == ["9"] * (len(rows) - 1) + ["0"]
    assert len(rows) > 15
    steps = [int(row[3]) for row in rows]
    assert steps == sorted(steps)  # the old one, then from the rename on the new one
    assert {2, 4} == set(steps)
    assert [row[2] for row in rows] == [f"step-{step:06d}" for step in steps]


def test_what_a_killed_save_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", 2)
    (folder.begin_checkpoint(4) / "weights-00000.safetensors").write_bytes(b"half")
    folder.rollouts.mkdir()
    for step in (1, 2, 3):
        (folder.rollouts / f"step-{step:06d}.jsonl").write_text("{}\n")
    (folder.rollouts / "step-000004.new").write_text("{")
    resumed = RunFolder(tmp_path / "run", resume=True)
    resumed.create(make_config(tmp_path / "model"))
    assert names(tmp_path / "run") == ["step-000002"]
    assert sorted(path.name for path in folder.rollouts.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]


# --- the mirror ---


def test_a_run_goes_on_from_its_mirror_on_a_bare_node(tmp_path: Path, model: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/far/run", waits_s=())
    folder = RunFolder(tmp_path / "run", resume=False, mirror=mirror)
    folder.path.mkdir()
    folder.metrics.write_text('{"step": 2}\n')
    saves = Saves(folder, model, mirror)
    for step in (2, 4, 6):
        assert saves.save(step) == ""
    assert saves.warnings == []
    there = tmp_path / "far" / "run"
    held = ["latest", "metrics.jsonl", "run_id", "step-000004", "step-000006"]
    assert sorted(path.name for path in there.iterdir()) == held
    assert (there / "latest").read_text() == "step-000006\n"
    shutil.rmtree(tmp_path / "run")  # the node is gone
    flip_a_byte(there / "step-000006" / "exp_avg-00000.safetensors")
    resumed = RunFolder(tmp_path / "run", resume=True, mirror=mirror)
    assert resumed.restored == tmp_path / "run" / "checkpoints" / "step-000004"
    assert find_damage(resumed.restored) == ""
    assert "exp_avg-00000.safetensors has another checksum" in resumed.warnings[0]
    assert resumed.metrics.read_text() == '{"step": 2}\n'
    with pytest.raises(ValueError, match=rf"^run\.dir={tmp_path}/run: "):
        RunFolder(tmp_path / "run", resume=False, mirror=mirror)
    with pytest.raises(ValueError, match=r"^checkpoint\.mirror=.*\bstep-000006\b"):
        RunFolder(tmp_path / "other", resume=False, mirror=mirror)


def test_the_mirror_gives_what_is_damaged_or_older_here(tmp_path: Path, model: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/far", waits_s=())
    saves = Saves(RunFolder(tmp_path / "run", resume=False, mirror=mirror), model, mirror)
    saves.save(2)
    saves.save(4)
    flip_a_byte(tmp_path / "run" / "checkpoints" / "step-000004" / "weights-00001.safetensors")
    resumed = RunFolder(tmp_path / "run", resume=True, mirror=mirror)
    assert resumed.restored == tmp_path / "run" / "checkpoints" / "step-000004"
    assert find_damage(resumed.restored) == ""


def test_a_lost_mirror_is_a_warning_while_the_run_goes_on_and_a_message_where_it_is_needed(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "far").write_text("a file where a folder should be")
    mirror = Mirror(f"file://{tmp_path}/far/run", waits_s=(0.0,))
    with pytest.raises(ValueError, match=r"mirror=s4.*s3fs"):
        Mirror("s4://bucket/run")
    saves = Saves(run_with(tmp_path / "run", 2), model, mirror)
    assert saves.save(4) == ""
    assert "step-000004 was not copied: checkpoint.mirror=file://" in saves.warnings[0]
    assert RunFolder(tmp_path / "run", resume=True, mirror=mirror).restored is not None
    with pytest.raises(ValueError, match=rf"^run\.dir={tmp_path}/nothing: --resume\b"):
        RunFolder(tmp_path / "nothing", resume=True, mirror=mirror)


@pytest.mark.slow
def test_a_mirror_that_fails_half_of_the_time_gets_every_file(tmp_path: Path, model: Path) -> None:
    class Flaky(LocalFileSystem):
        requests = 0

        def put_file(self, *arguments: Any, **options: Any) -> None:
            Flaky.requests += 1
            if Flaky.requests % 2:
                raise ConnectionError("reset by peer")
            super().put_file(*arguments, **options)

    mirror = Mirror(f"file://{tmp_path}/far", waits_s=(0.0, 0.0))
    mirror._fs = Flaky()
    saves = Saves(run_with(tmp_path / "run", 2), model, mirror)
    assert saves.save(4) == ""
    assert saves.warnings == []
    assert Flaky.requests > 10
    assert find_damage(tmp_path / "far" / "step-000004") == ""


class Stuck(LocalFileSystem):
    """Object storage that takes no file until `released` is set."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def put_file(self, *arguments: Any, **options: Any) -> None:
        self.released.wait(WAIT_S)
        super().put_file(*arguments, **options)


class Refusing(LocalFileSystem):
    """Object storage that takes no file whose path holds one of these names."""

    cachable = False

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def put_file(self, local: str, remote: str, **options: Any) -> None:
        if any(name in remote for name in self.names):
            raise PermissionError("no")
        super().put_file(local, remote, **options)


def copies(mirror: Path) -> list[int]:
    """The steps of the checkpoints in a mirror, all of which must be whole."""
    found = sorted(mirror.glob("step-*"))
    assert [find_damage(path) for path in found] == [""] * len(found)
    return [int(path.name[5:]) for path in found]


@pytest.mark.slow
def test_a_mirror_slower_than_the_saves_gets_whole_copies_of_the_newest_and_the_best(
    tmp_path: Path, model: Path
) -> None:
    mirror, far = Mirror(f"file://{tmp_path}/far"), tmp_path / "far"
    mirror._fs = Stuck()
    run = tmp_path / "run"
    saves = Saves(run_with(run, 2), model, mirror)

    async def save_while_one_is_copied() -> None:
        for step in (4, 5, 6, 7):
            saves.scores = {5: 0.5} if step > 4 else {}
            await saves.begin(step)
        await saves.saver._finish_writing()
        here, there = names(run), mirror.checkpoints()
        mirror._fs.released.set()
        await saves.saver.finish()
        assert here == [f"step-00000{step}" for step in (4, 5, 6, 7)]  # copied, best, and the two newest
        assert there == []

    asyncio.run(save_while_one_is_copied())
    assert saves.warnings == []
    assert copies(far) == [5, 7]
    assert [(far / file).read_text() for file in ("latest", "best")] == ["step-000007\n", "step-000005\n"]
    assert saves.save(8) == ""
    assert names(run) == [f"step-00000{step}" for step in (5, 7, 8)]
    assert copies(far) == [5, 7, 8]


@pytest.mark.slow
def test_a_failed_copy_of_the_best_is_repeated_and_the_best_before_it_stays_until_then(
    tmp_path: Path, model: Path
) -> None:
    refused: list[str] = []
    mirror, far = Mirror(f"file://{tmp_path}/far", waits_s=()), tmp_path / "far"
    mirror._fs = Refusing(refused)
    saves = Saves(RunFolder(tmp_path / "run", resume=False, mirror=mirror), model, mirror)
    saves.scores[2] = 0.2
    saves.save(2)
    refused.append("step-000003/w")
    saves.scores[3] = 0.3
    for step in (3, 4, 5):
        saves.save(step)
    assert (far / "best").read_text() == "step-000002\n"
    assert mirror.checkpoints() == ["step-000002", "step-000004", "step-000005"]
    assert any("step-000003 was not copied: checkpoint.mirror=file://" in warning for warning in saves.warnings)
    refused.clear()
    saves.save(6)
    assert (far / "best").read_text() == "step-000003\n"
    assert copies(far) == [3, 5, 6]


def test_resume_from_ends_with_a_message_where_the_mirror_or_the_disk_keeps_newer_checkpoints(
    tmp_path: Path, model: Path
) -> None:
    class ReadOnly(LocalFileSystem):
        def rm(self, *arguments: Any, **options: Any) -> None:
            raise PermissionError("no")

    url, run, config = f"file://{tmp_path}/far", tmp_path / "run", make_config(tmp_path / "model")
    mirror = Mirror(url, waits_s=())
    saves = Saves(RunFolder(run, resume=False, mirror=mirror), model, mirror)
    saves.scores = {4: 0.4}
    saves.save(2)
    saves.save(4)
    works, mirror._fs = mirror._fs, ReadOnly()
    with pytest.raises(ValueError, match=rf"^checkpoint\.mirror={url}: no\. --resume-from step-000002\b"):
        RunFolder(run, resume=True, mirror=mirror, start_at="step-000002").create(config)
    mirror._fs = works
    (run / "checkpoints" / "step-000004").chmod(0o555)
    with (
        as_an_ordinary_user(run),
        pytest.raises(ValueError, match=r"^--resume-from step-000002: .*/step-000004\b.*Permission denied"),
    ):
        RunFolder(run, resume=True, start_at="step-000002").create(config)
    RunFolder(run, resume=True, mirror=mirror, start_at="step-000002").create(config)
    assert "step-000004" not in names(run)
    assert copies(tmp_path / "far") == [2]
    assert (run / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert not (run / "checkpoints" / "best").exists()
    assert not (tmp_path / "far" / "best").exists()


def test_what_a_broken_copy_left_in_the_mirror_is_removed(tmp_path: Path, model: Path) -> None:
    mirror, far = Mirror(f"file://{tmp_path}/far", waits_s=()), tmp_path / "far"
    saves = Saves(RunFolder(tmp_path / "run", resume=False, mirror=mirror), model, mirror)
    works, mirror._fs = mirror._fs, Refusing(["step-000001/w"])
    saves.save(1)
    mirror._fs = works
    assert sorted(path.name for path in far.glob("step-000001/*.json")) == ["driver.json", "learner.json"]
    saves.save(2)
    assert copies(far) == [2]


def test_a_mirror_that_never_answers_is_given_up_within_its_time(tmp_path: Path, model: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/far", waits_s=(0.0,), answer_s=0.05)
    mirror._fs = Stuck()
    saves = Saves(run_with(tmp_path / "run", 2), model, mirror)
    assert saves.save(4) == ""
    assert "step-000004 was not copied: checkpoint.mirror=file://" in saves.warnings[0]
    assert "no answer within 0 s. The next checkpoint will be." in saves.warnings[0]
    mirror._fs.released.set()


def test_a_run_that_ends_leaves_a_request_to_its_mirror(tmp_path: Path, model: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/far")
    mirror._fs = Stuck()
    saves = Saves(run_with(tmp_path / "run", 2), model, mirror)

    async def save_and_end() -> None:
        await saves.begin(4)
        await saves.saver._finish_writing()
        await saves.saver.close(within_s=0.05)

    asyncio.run(save_and_end())  # joins the thread of the copy
    assert saves.warnings[0] == "the last checkpoint was not copied: it took longer than 0.05 s"
    assert not (tmp_path / "far" / "step-000004" / "manifest.json").exists()
    mirror._fs.released.set()
