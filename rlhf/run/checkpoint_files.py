"""Which folders are checkpoints of a run, which files they have, and whether these are as they were written.

A checkpoint has a name of the form step-000040, a manifest, and the id of its run in the file `run_id`. Other files and
folders next to it (a copy such as step-000040-mine) belong to the user: they are never read, counted or removed. Only
the files that the manifest of a checkpoint names are read; other files in its folder have no effect.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from rlhf.config.base import error_text
from rlhf.types import WrittenFile

MANIFEST = "manifest.json"
FORMAT = 2  # raised when an older program could not read what this one writes
PARTIAL = ".partial"
LATEST = "latest"  # file in checkpoints/ and in a mirror with the name of the newest complete checkpoint
RUN_ID = "run_id"  # file in a run folder, in each checkpoint and in the mirror with the id of the run
CHECKPOINT = re.compile(r"step-(\d{6}|[1-9]\d{6,})")  # names are written with `step:06d`
BEST = "best"  # file in the same places with the name of the checkpoint with the highest checkpoint.best
CHUNK_BYTES = 2**22
READERS = 8  # threads; a checksum is faster than one disk, and slower than several


def checkpoint_step(name: str) -> int:
    """The step of the checkpoint with this name; -1 if no checkpoint has such a name."""
    return int(match[1]) if (match := CHECKPOINT.fullmatch(name)) else -1


def sorted_checkpoints(names: Iterable[str]) -> list[str]:
    """The names that are names of checkpoints, oldest first."""
    return sorted((name for name in names if checkpoint_step(name) >= 0), key=checkpoint_step)


def all_checkpoints(folder: Path) -> list[Path]:
    """The folders here with the name of a checkpoint, oldest first; some may be damaged, or of another run."""
    return [folder / name for name in sorted_checkpoints(path.name for path in folder.glob("step-*"))]


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in this folder that are complete, judged by the sizes of their files; oldest first."""
    return [path for path in all_checkpoints(folder) if not find_damage(path, contents=False)]


def read_line(file: Path) -> str:
    """The one line of a file such as `latest` or `run_id`; empty if there is no such file."""
    try:
        return file.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def belongs_to_run(checkpoint: Path, run_id: str) -> bool:
    """Whether a folder with the name of a checkpoint is one of this run."""
    return read_line(checkpoint / RUN_ID) == run_id


def write_manifest(folder: Path, written: Mapping[str, WrittenFile]) -> None:
    """Write the size and checksum of every file of a finished checkpoint, and sync all of it to the disk.

    Other processes have written and synced the files of `written`, by path; OSError if one is missing or differs here.
    """
    files = dict(written)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in written:
            files[name] = WrittenFile(path.stat().st_size, checksum(path))
            sync(path)
    for name, file in written.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != file.bytes:
            raise OSError(
                f"{folder / name}: a learner wrote {file.bytes:,} bytes, but here the file "
                f"{'does not exist' if size is None else f'has {size:,}'}. run.dir must be on a file system that "
                "all nodes share."
            )
    manifest = {"format": FORMAT, "files": {name: asdict(files[name]) for name in sorted(files)}}
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=2))
    for inside in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(inside)


def manifest_files(content: bytes) -> dict[str, WrittenFile]:
    """The files that a manifest names; ValueError if it is no manifest of this format."""
    try:
        manifest = json.loads(content)
        files = {name: WrittenFile(int(file["bytes"]), str(file["crc32"])) for name, file in manifest["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{MANIFEST} is not readable") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"it is of format {manifest.get('format', 1)}, but this version reads format {FORMAT}: resume with the "
            "version that wrote it"
        )
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise ValueError(f"{MANIFEST} names {outside[0]}, a path outside of the checkpoint folder")
    return files


def find_damage(folder: Path, *, contents: bool = True) -> str:
    """How a checkpoint differs from its manifest, by file sizes and (`contents`) checksums; empty if it does not."""
    try:
        files = manifest_files((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is missing: the checkpoint was not finished"
    except OSError as error:
        return error_text(error)
    except ValueError as error:
        return str(error)

    def damage(name: str) -> str:
        try:
            size = (folder / name).stat().st_size
            if size != files[name].bytes:
                return f"{name} has {size:,} bytes, but {files[name].bytes:,} were written"
            if contents and checksum(folder / name) != files[name].crc32:
                return f"{name} has another checksum than the one that was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return ""

    with ThreadPoolExecutor(READERS) as pool:
        return next(filter(None, pool.map(damage, files)), "")


def checksum(file: Path) -> str:
    """CRC-32 of a file: any flipped bit changes it, and it is faster than most disks (4 GiB/s and more on one core)."""
    crc, chunk = 0, bytearray(CHUNK_BYTES)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(chunk):
            crc = zlib.crc32(memoryview(chunk)[:count], crc)
    return f"{crc:08x}"


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(file: Path, text: str) -> None:
    file.write_text(text)
    sync(file)


def replace_synced(file: Path, text: str) -> None:
    """Replace a file's content by a rename: every reader, also after a crash, finds the old or the new content."""
    new = file.with_name(f"{file.name}.new")
    write_synced(new, text)
    new.replace(file)
    sync(file.parent)


def remove(checkpoint: Path) -> str:
    """Remove a checkpoint; returns why it is still there, or an empty string."""
    try:  # renamed first, so that a remainder does not count as a checkpoint
        shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(PARTIAL)))
    except OSError as error:
        return error_text(error)
    return ""
