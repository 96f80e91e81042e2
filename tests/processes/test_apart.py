"""A call in a process of its own costs itself alone, whatever it does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from rlhf.processes.apart import ApartError, apart
from rlhf.processes.outside import children_of

pytestmark = pytest.mark.slow


def call(function: Callable[[], Any], seconds: float = 20.0) -> Any:
    return asyncio.run(apart(function, seconds=seconds))


def test_the_value_comes_back_and_the_state_of_the_caller_stays() -> None:
    values = [1]

    def grow() -> int:
        values.append(2)
        return len(values)

    assert call(grow) == 2
    assert values == [1]


def test_what_it_raises_is_the_error() -> None:
    with pytest.raises(ApartError, match="ZeroDivisionError: division by zero"):
        call(lambda: 1 / 0)


def test_a_call_that_computes_forever_ends_at_its_limit_and_leaves_no_process() -> None:
    before = children_of(os.getpid())
    with pytest.raises(ApartError, match=r"it took over 0\.5 seconds"):
        call(lambda: 9**9**9, seconds=0.5)  # minutes
    assert children_of(os.getpid()) <= before


def test_it_starts_no_process_and_writes_no_file(tmp_path: Any) -> None:
    for attempt in (lambda: os.fork(), lambda: (tmp_path / "a").write_text("a")):
        with pytest.raises(ApartError, match="PermissionError"):
            call(attempt)
    assert not [*tmp_path.iterdir()]


def test_a_process_that_ends_itself_is_an_error() -> None:
    with pytest.raises(ApartError, match="its process was ended"):
        call(lambda: os._exit(3))
