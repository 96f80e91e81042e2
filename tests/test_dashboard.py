"""The wandb dashboard validates against the models of wandb-workspaces, and shows metrics and keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented import documented
from wandb_workspaces.workspaces.internal import View

from rlhf import dashboard
from rlhf.config.describe import describe_keys
from rlhf.config.ppo import PPOConfig
from rlhf.log.panels import SECTIONS, matching

NAMES = [re.sub(r"<[^>]+>", "1", name) for name in documented()]


def test_the_view_validates_and_shows_every_panel_histograms_responses_and_comparisons() -> None:
    view = dashboard.workspace("team", "rlhf", "mine")._to_model()
    again = View.model_validate_json(view.model_dump_json(by_alias=True))
    assert (again.entity, again.project) == ("team", "rlhf")
    sections = {section.name: section.panels for section in again.spec.section.panel_bank_config.sections}
    assert [*SECTIONS, "Histograms", "Responses, sampled", *dashboard.COMPARISONS] == list(sections)
    for title, panels in SECTIONS.items():
        for panel, shown in zip(panels, sections[title], strict=True):
            pattern = shown.config.metric_regex
            by_regex = [name for name in NAMES if pattern and re.match(pattern, name)]
            exact = [name for name in shown.config.metrics if name in NAMES]
            assert by_regex or exact == list(panel.metrics), panel
    assert {shown.config.group_by for shown in sections["Compare KL estimators"]} == {"algo.value.kl_estimator"}


def test_panels_and_comparisons_name_metrics_and_keys_that_exist() -> None:
    empty = [panel for panels in SECTIONS.values() for panel in panels if not matching(panel, NAMES)]
    assert empty == []
    keys = {key.name for key in describe_keys(PPOConfig)}
    for key, metrics in dashboard.COMPARISONS.values():
        assert key in keys
        assert set(metrics) <= set(NAMES)


@pytest.mark.slow
def test_without_an_api_key_it_says_how_to_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"wandb login.*--entity"):
        dashboard.main(["--entity", "team"])
