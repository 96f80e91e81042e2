"""A sink in a separate thread: a slow server does not slow the run, and a row that fails is sent again."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlhf.log.sinks import NO_DETAILS, Details, Sink

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0  # before a row is tried again; the wait doubles
CLOSE_S = 20.0  # at the end of a run, for the rows that wait
MAX_REASON = 200  # characters
MAX_ROWS = 2000  # rows that can wait; after a longer failure the newest are only in metrics.jsonl


class ClosingSink(Sink, Protocol):
    def close(self, *, failed: bool = False) -> None: ...


class BackgroundSink:
    """Rows go to `sink` in order.

    Args:
        key: of the config, for messages.
    """

    def __init__(self, sink: ClosingSink, key: str, warn: Callable[[str], None]) -> None:
        self._sink, self._key, self._warn = sink, key, warn
        self._rows: queue.Queue[Callable[[], None]] = queue.Queue(MAX_ROWS)
        self._lost = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send, name=key, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        try:
            self._rows.put_nowait(lambda: self._sink.log(step, values, details))
        except queue.Full:
            self._lost += 1

    def close(self, *, failed: bool = False) -> None:
        """Send the waiting rows, within CLOSE_S; a warning counts the rows that were not sent."""
        end = time.monotonic() + CLOSE_S
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(lambda: self._sink.close(failed=failed))
        while self._rows.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        if left := self._lost + max(0, self._rows.unfinished_tasks - 1):
            self._warn(f"{self._key}: {left} rows were not sent; metrics.jsonl has them.")

    def _send(self) -> None:
        while True:
            self._send_patiently(self._rows.get())
            self._rows.task_done()

    def _send_patiently(self, send: Callable[[], None]) -> None:
        for tries in itertools.count():
            try:
                return send()
            except Exception as error:  # clients raise many types
                if tries == 0:
                    reason = " ".join(str(error).split())[:MAX_REASON]
                    self._warn(f"{self._key}: it takes no rows ({reason}). The run goes on, and they are sent later.")
            wait_s = min(FIRST_WAIT_S * 2 ** min(tries, 20), LONGEST_WAIT_S)
            if self._closing.wait(wait_s):
                time.sleep(FIRST_WAIT_S)
