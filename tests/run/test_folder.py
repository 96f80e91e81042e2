"""The run folder: what is written can be read back line by line, whatever a model says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from worlds import make_groups

from rlhf.run.folder import RunFolder
from rlhf.types import RolloutGroup


def test_a_response_with_any_line_separator_stays_on_one_line(tmp_path: Path) -> None:
    (group,) = make_groups(groups=1, samples=1, vocabulary=9, longest=5, seed=0)
    text = "a\x85b\u2028c\u2029d\ne\x1cf é 三"
    sample = dataclasses.replace(group.samples[0], text=text)
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.rollouts.mkdir(parents=True)
    folder.write_rollouts(1, [RolloutGroup(group.prompt, (sample,))], [0.5])
    content = (folder.rollouts / "step-000001.jsonl").read_text()
    assert "三" in content
    (line,) = content.splitlines()
    assert json.loads(line)["text"] == text
