"""What stands in docs/studies: numbers that say where they come from, and pictures that were drawn from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.studies import report
from benchmarks.studies.findings import PICTURES

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
NUMBERS = sorted(STUDIES.glob("*.json"))
COMMIT = r"(added in )?[0-9a-f]{8,40}(-dirty)?"


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: path.stem)
def test_the_numbers_of_a_study_name_their_command_their_date_and_the_commits_of_their_runs(path: Path) -> None:
    results = json.loads(path.read_text())
    assert re.match(r"python -m benchmarks\.studies\.\w+", results["command"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", results["date"])
    assert re.fullmatch(f"{COMMIT}(, {COMMIT})*", results["commit"])


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.png")), ids=lambda path: path.stem)
def test_a_picture_holds_the_digest_of_the_numbers_that_it_was_drawn_from(path: Path) -> None:
    """If this fails, draw it again, as benchmarks/studies/findings.py and each study say."""
    _, studies = PICTURES.get(path.stem, (None, (path.stem,)))
    assert report.digest([STUDIES / f"{study}.json" for study in studies]).encode() in path.read_bytes()


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_of_a_finding_can_be_drawn_from_the_numbers_that_are_there(name: str) -> None:
    pytest.importorskip("matplotlib")
    draw, studies = PICTURES[name]
    drawn = draw(*(json.loads((STUDIES / f"{study}.json").read_text()) for study in studies))
    assert all(panel.has_data() for panel in drawn.axes)


def test_the_page_of_the_findings_shows_a_picture_of_each_and_says_what_it_states() -> None:
    page = (STUDIES.parent / "findings.md").read_text()
    shown = re.findall(r"^!\[([^\]]{60,})\]\(studies/(finding-[\w-]+)\.png\)$", page, re.MULTILINE)
    assert [name for _, name in shown] == list(PICTURES)
    assert all(re.search(r"\d\.\d", stated) for stated, _ in shown)
