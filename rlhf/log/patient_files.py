"""Writes the files of a run's log. If the disk is full, text waits in memory until there is room.

A run of weeks is worth more than its log: the run continues, and no row is lost while the process lives.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

MAX_WAITING_BYTES = 256 * 2**20  # in memory; a run ends if its waiting log is longer
NEW = ".new"  # suffix of a file that is being written


class PatientFiles:
    """Appends to files and replaces files, in order; warns once when writing fails, and once when it works again."""

    def __init__(self, warn: Callable[[str], None], *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.warn, self._max_waiting_bytes = warn, max_waiting_bytes
        self._waiting: deque[tuple[Callable[[Path, bytes], None], Path, bytes]] = deque()
        self._failure = ""

    def append(self, path: Path, text: str) -> None:
        """Append text to a file: all of it or nothing."""
        self._add(_append, path, text)

    def replace(self, path: Path, text: str) -> None:
        """Write a file under another name, and rename it when it is complete."""
        self._add(_replace, path, text)

    def check(self) -> None:
        """Write the waiting text; if some still waits, an OSError names the path and the bytes needed and free."""
        self._write()
        if self._waiting:
            raise OSError(self._failure)

    def _add(self, write: Callable[[Path, bytes], None], path: Path, text: str) -> None:
        self._waiting.append((write, path, text.encode()))
        self._write()
        if sum(len(data) for _, _, data in self._waiting) > self._max_waiting_bytes:
            raise OSError(f"{self._failure} The log in memory is at its limit. Make room, and go on with --resume.")

    def _write(self) -> None:
        failed_before, self._failure = self._failure, ""
        while self._waiting:
            write, path, data = self._waiting[0]
            try:
                write(path, data)
            except OSError as error:
                self._failure = self._describe(path, error)
                break
            self._waiting.popleft()
        if self._failure and not failed_before:
            self.warn(f"{self._failure} The run continues and keeps its log in memory; make room.")
        elif failed_before and not self._failure:
            self.warn("the log is written again; no row was lost.")

    def _describe(self, path: Path, error: OSError) -> str:
        needed = sum(len(data) for _, _, data in self._waiting)
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        return f"{path}: cannot write ({error.strerror or error}): {needed:,} bytes are needed, {free:,} are free."


def _append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            _write_all(file.fileno(), data)
        except OSError:
            os.ftruncate(file.fileno(), size)  # a partial line would look like a damaged file
            raise


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(NEW)
    with new.open("wb", buffering=0) as file:
        _write_all(file.fileno(), data)
    new.replace(path)


def _write_all(descriptor: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])
