"""`status.json` in the folder of a run: what the run is doing, written every two seconds while it lives.

`rlhf watch` reads it. A run that was killed leaves an old file, so its age tells a lost run from a slow one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.config.cli import NothingToDoError
from rlhf.log.patient_files import NEW

STATUS = "status.json"
PERIOD_S = 2.0  # between two writings
LOST_S = 60.0  # a status older than this is that of a run that was lost; imports and loading may block a thread

# What a run waits for, by the phases that the driver is in; the first line that fits.
STATES = {
    "starting": ("start",),
    "evaluating": ("evaluation",),
    "sampling": ("sampling",),
    "learning": ("logprobs", "update", "transfer", "canary"),
    "saving": ("checkpoint", "export"),
}


@contextlib.contextmanager
def status_file(folder: Path, status: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """A context in which a thread writes `status()` and the time to `folder/status.json`; its end is written too.

    A run is worth more than its status: where the file cannot be written, it is not.
    """
    over = threading.Event()

    def write(ended: str | None = None) -> None:
        row = {"time": round(time.time(), 3), **status(), "ended": ended}
        new = (folder / STATUS).with_suffix(NEW)
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(row))
            new.replace(folder / STATUS)

    def keep_writing() -> None:
        while not over.wait(PERIOD_S):
            write()

    write()
    thread = threading.Thread(target=keep_writing, name="status", daemon=True)
    thread.start()
    ended = "failed"
    try:
        yield
        ended = "done"
    except (NothingToDoError, asyncio.CancelledError, KeyboardInterrupt):
        ended = "stopped"
        raise
    finally:
        over.set()
        thread.join()
        write(ended)
