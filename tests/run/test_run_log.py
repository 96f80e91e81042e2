"""What the log of a run needs and says of itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import make_config

from rlhf.run.run_log import RunLog, environment_report
from rlhf.run.state import RunState, code_state

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("logging", "key", "package"),
    [
        ({"tensorboard": True}, "tensorboard", "tensorboard"),
        ({"trackio": {"project": "mine"}}, "trackio", "trackio"),
    ],
)
def test_a_sink_whose_package_is_missing_is_refused_with_the_remedy(
    logging: dict[str, Any], key: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    refusal = rf"logging\.{key}: .*\b{package}\b.*pip install -e '\.\[{key}\]'"
    with pytest.raises(ValueError, match=refusal):
        RunLog(make_config(Path("x/model"), logging=logging), RunState())


def test_versions_and_the_commit_of_the_source_are_told() -> None:
    told = environment_report()
    assert told["versions"]["torch"][0].isdigit()
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}", told["code"]["commit"])
        assert told["code"]["uncommitted changes"] in ("yes", "no")


def test_a_commit_is_that_of_the_source_wherever_a_program_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    here = code_state.__wrapped__()
    monkeypatch.chdir("/")
    assert code_state.__wrapped__() == here
