#!/usr/bin/env python3
"""The wandb dashboard of a project as code: a saved view with sections and panels for everything that a run logs.

    python launch/wandb_dashboard.py --entity TEAM --project rlhf
    python launch/wandb_dashboard.py --entity TEAM --project rlhf --dry-run

Its x-axis is the training step. It has the panels of rlhf/log/panels.py, histograms, the table of sampled responses,
and comparisons of KL estimators, Adam variants and schedules, with the runs grouped by that key of their configs. Each
call makes a new view; runs are not touched. It needs wandb-workspaces (pip install -e '.[dashboard]') and an API key.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import wandb_workspaces.reports.v2.interface as wr
import wandb_workspaces.workspaces as ws

from rlhf.log.panels import SECTIONS, Panel

HISTOGRAMS = ("rollout/response_length", "reward", "policy/advantage", "policy/ratio", "rollout/lag")
COMPARISONS = {
    "Compare KL estimators": (
        "algo.kl_estimator",
        ("policy/kl_k1", "policy/kl_k3", "reward/mean", "policy/entropy", "rollout/response_length/mean"),
    ),
    "Compare Adam variants": (
        "learner.optimizer.variant",
        ("reward/mean", "learner/grad_norm", "policy/kl_old", "policy/clip_fraction"),
    ),
    "Compare schedules": ("learner.schedule.name", ("learner/lr", "reward/mean", "policy/entropy")),
}


def line_plot(panel: Panel) -> wr.LinePlot:
    """A panel of the report as a panel of wandb; its patterns become a regular expression."""
    title = f"{panel.title}, {panel.unit}" if panel.unit else panel.title
    log_y = panel.log or None
    if any(sign in metric for metric in panel.metrics for sign in "*["):
        patterns = "|".join(metric.replace("@*", "@[0-9]+").replace("*", ".+") for metric in panel.metrics)
        return wr.LinePlot(title=title, metric_regex=f"^({patterns})$", log_y=log_y)
    return wr.LinePlot(title=title, y=list(panel.metrics), log_y=log_y)


def workspace(entity: str, project: str, name: str) -> ws.Workspace:
    sections = [
        ws.Section(name=title, panels=[line_plot(panel) for panel in panels], is_open=title in ("Reward", "Evaluation"))
        for title, panels in SECTIONS.items()
    ]
    histograms = [wr.MediaBrowser(title=metric, media_keys=[f"{metric}/histogram"]) for metric in HISTOGRAMS]
    sections.append(ws.Section(name="Histograms", panels=histograms))
    sections.append(ws.Section(name="Responses, sampled", panels=[wr.WeavePanelSummaryTable(table_name="responses")]))
    for title, (key, metrics) in COMPARISONS.items():
        plots = [wr.LinePlot(title=m, y=[m], groupby=wr.Config(key), groupby_aggfunc="mean") for m in metrics]
        sections.append(ws.Section(name=title, panels=plots))
    settings = ws.WorkspaceSettings(x_axis="step")
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entity", required=True, help="team or user")
    parser.add_argument("--project", default="rlhf", help="project (default: rlhf)")
    parser.add_argument("--name", default="rlhf", help="of the view (default: rlhf)")
    parser.add_argument("--dry-run", action="store_true", help="print sections and panels, and make nothing")
    options = parser.parse_args(argv)
    made = workspace(options.entity, options.project, options.name)
    if options.dry_run:
        for section in made.sections:
            print(section.name, *(f"    {getattr(panel, 'title', 'table')}" for panel in section.panels), sep="\n")
        return
    print(made.save().url)


if __name__ == "__main__":
    sys.exit(main())
