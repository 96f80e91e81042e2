"""docs/metrics.md: what it says can be read, and each of its cases is held against a run by some test."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from documented import PAGE, check_documented, documented, matches

from rlhf.log.diagnosis import HEALTHY, healthy_range

TESTS = Path(__file__).parent.parent


def test_every_case_of_the_page_is_held_against_metrics_by_a_test() -> None:
    calls = [
        line
        for file in TESTS.rglob("test_*.py")
        for line in file.read_text().splitlines()
        if "check_documented(" in line or line.strip().startswith(("has = ", "has |= "))
    ]
    checked = set(re.findall(r'"([^"]*)"', "\n".join(calls)))
    assert set(documented().values()) <= checked


def test_the_healthy_ranges_of_the_page_are_those_that_the_report_marks() -> None:
    names, on_page = set(documented()), {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `") and len(cells) == 7:
            (range_in_words, *_) = cells[4].split(";")
            if re.fullmatch(r"above [\d.]+|below [\d.]+|[\d.]+ to [\d.]+", range_in_words):
                on_page |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[1]), range_in_words)
    in_code = {name: str(healthy_range(name)) for name in names if healthy_range(name)}
    assert on_page == in_code
    for pattern in HEALTHY:
        assert any(fnmatchcase(name, pattern) for name in names), f"{pattern} is not on the page"


def test_names_are_of_one_form_and_stand_once() -> None:
    assert len(documented()) > 90
    names = [re.sub(r"<[^>]+>", "x", name) for name in documented()]
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[a-z_]+(/[a-z0-9_@]+)+", name)] == []


def test_a_metric_that_is_not_on_the_page_or_that_is_missing_fails_the_check() -> None:
    assert matches("eval/test/avg@8", "eval/<data set>/avg@<k>")
    assert not matches("eval/test/avg@8/low", "eval/<data set>/avg@<k>")
    with pytest.raises(AssertionError, match=r"not in metrics\.md: \['reward/unheard_of'\]"):
        check_documented([{"step": 1, "reward/unheard_of": 1.0}], logged=())
    with pytest.raises(AssertionError, match="router/max_load"):
        check_documented([{"step": 1, "router/load_entropy": 1.0}], logged={"experts"})
