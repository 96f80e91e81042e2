"""What stands in docs/studies: numbers that say where they come from, and pictures that were drawn from them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
NUMBERS = sorted(STUDIES.glob("*.json"))
COMMIT = r"(added in )?[0-9a-f]{8,40}(-dirty)?"


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: path.stem)
def test_the_numbers_of_a_study_name_their_command_their_date_and_the_commits_of_their_runs(path: Path) -> None:
    results = json.loads(path.read_text())
    assert re.match(r"python -m benchmarks\.studies\.\w+", results["command"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", results["date"])
    assert re.fullmatch(f"{COMMIT}(, {COMMIT})*", results["commit"])


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: path.stem)
def test_a_picture_holds_the_digest_of_the_numbers_that_it_was_drawn_from(path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest().encode() in path.with_suffix(".png").read_bytes()
