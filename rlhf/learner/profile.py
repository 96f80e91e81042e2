"""A trace of one rank by torch's profiler, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import profiler

if TYPE_CHECKING:
    from rlhf.learner.rank import TrainedRank

_running: list[profiler.profile] = []  # this process's profiler, between `start` and `stop`


def start(rank: TrainedRank) -> None:
    """Record operations, their shapes and, on a GPU, its kernels from now on."""
    _running.append(profiler.profile(record_shapes=True))
    _running[0].start()


def stop(rank: TrainedRank, file: str) -> str:
    """Write the trace since `start`. Returns why the file could not be written; empty if it was."""
    trace = _running.pop()
    trace.stop()  # waits for the GPU
    try:
        Path(file).parent.mkdir(exist_ok=True)
        trace.export_chrome_trace(file)
    except OSError as error:
        return error.strerror or str(error)
    return ""
