"""Calls the user's callbacks (`run.callbacks`) in the driver, after a step or an evaluation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.check.callbacks import load_callback
from rlhf.config.base import error_text
from rlhf.processes.raised import location_of, user_error_text
from rlhf.processes.returned import as_number

METRIC = re.compile(r"[\w.@=+-]+(?:/[\w.@=+-]+)+")
STOP = "stop"  # the key with which a callback ends the run


class Called(NamedTuple):
    """What callbacks returned after a step or an evaluation.

    Attributes:
        metrics: further metrics to log.
        stopped_by: the first callback that asked for the end of the run; empty if none did.
        failure: why the run must end; empty if nothing failed.
    """

    metrics: dict[str, float]
    stopped_by: str = ""
    failure: str = ""


class Callbacks:
    """The callbacks of a run. An object of each class is made here, so a resumed run has new ones.

    ValueError if one cannot be called, or its class cannot be made.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._by_name = {name: _made(name) for name in names}
        self._logged: set[str] = set()  # names of the run's own metrics

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def call(self, method: str, step: int, values: Mapping[str, Any], *further: Any) -> Called:
        """Call `method` of all callbacks that have it, until one fails. Each gets its own copy of the metrics."""
        self._logged |= values.keys()
        metrics: dict[str, float] = {}
        stopped_by = ""
        for name, callback in self._by_name.items():
            function = getattr(callback, method, None)
            if function is None:
                continue
            begin = f"run.callbacks={name}: {method}"
            try:
                returned = function(step, {metric: float(value) for metric, value in values.items()}, *further)
            except (Exception, SystemExit) as error:
                said = user_error_text(error, "Correct it")
                return Called(metrics, stopped_by, f"{begin} failed: {location_of(error)}{said}.")
            try:
                own, stops = self._read(returned, taken=metrics.keys() | self._logged)
            except ValueError as error:
                return Called(metrics, stopped_by, f"{begin} returned {error}")
            metrics |= own
            stopped_by = stopped_by or (name if stops else "")
        return Called(metrics, stopped_by)

    def _read(self, returned: Any, *, taken: set[str]) -> tuple[dict[str, float], bool]:
        """The further metrics that a callback returned, and whether it asked for the end. ValueError if refused."""
        if returned is None:
            return {}, False
        if not isinstance(returned, Mapping):
            raise ValueError(f"{type(returned).__name__}. Return a dictionary of metrics, or None.")
        numbers = dict(returned)
        stops = numbers.pop(STOP, False)
        if as_number(stops) not in (0.0, 1.0):
            raise ValueError(f"{STOP}={_shown(stops)}. It is True or False.")
        for name, value in numbers.items():
            number = as_number(value)
            if not isinstance(name, str) or not METRIC.fullmatch(name):
                raise ValueError(f"the metric {_shown(name)}. Name it `group/name`, in letters, digits and ._@=+-.")
            if name in taken:
                raise ValueError(f"{name}, which is logged already. Name it otherwise.")
            if number is None or not math.isfinite(number):
                raise ValueError(f"{name}={_shown(value)}. A metric is a finite number; leave it out if it has none.")
            numbers[name] = number
        return numbers, bool(stops)


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _made(name: str) -> Any:
    callback = load_callback(name)
    if not isinstance(callback, type):
        return callback
    try:
        return callback()
    except Exception as error:
        where = location_of(error)
        raise ValueError(f"run.callbacks={name}: making it failed: {where}{error_text(error)}. Correct it.") from None
