"""Program: makes a wandb dashboard of a project, with panels for all metrics of a run.

    python -m rlhf.dashboard --entity TEAM --project rlhf

The x-axis is the training step. The dashboard has the panels of rlhf/log/panels.py, histograms, the table of sampled
responses, and comparisons of KL estimators, Adam variants and schedules, in which runs are grouped by that key of their
configs. Each call makes a new view and changes no run. It needs wandb-workspaces (pip install -e '.[dashboard]') and an
API key (wandb login).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rlhf.config.base import first_line
from rlhf.config.cli import parser_of, run_program
from rlhf.config.printing import say
from rlhf.log.panels import SECTIONS, Panel

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2.interface as wr
    import wandb_workspaces.workspaces as ws

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
    """The wandb panel for a panel of the report; patterns of metric names become a regular expression."""
    import wandb_workspaces.reports.v2.interface as wr

    title = f"{panel.title}, {panel.unit}" if panel.unit else panel.title
    log_y = panel.log or None
    if any(sign in metric for metric in panel.metrics for sign in "*["):
        patterns = "|".join(metric.replace("@*", "@[0-9]+").replace("*", ".+") for metric in panel.metrics)
        return wr.LinePlot(title=title, metric_regex=f"^({patterns})$", log_y=log_y)
    return wr.LinePlot(title=title, y=list(panel.metrics), log_y=log_y)


def workspace(entity: str, project: str, name: str) -> ws.Workspace:
    """A new view of a project, which is not saved yet."""
    import wandb_workspaces.reports.v2.interface as wr
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=title, panels=[line_plot(panel) for panel in panels], is_open=title in ("Reward", "Evaluation"))
        for title, panels in SECTIONS.items()
    ]
    histograms = [wr.MediaBrowser(title=metric, media_keys=[f"{metric}/histogram"]) for metric in HISTOGRAMS]
    sections.append(ws.Section(name="Histograms", panels=[*histograms]))
    sections.append(ws.Section(name="Responses, sampled", panels=[wr.WeavePanelSummaryTable(table_name="responses")]))
    for title, (key, metrics) in COMPARISONS.items():
        plots = [wr.LinePlot(title=m, y=[m], groupby=wr.Config(key), groupby_aggfunc="mean") for m in metrics]
        sections.append(ws.Section(name=title, panels=[*plots]))
    settings = ws.WorkspaceSettings(x_axis="step")
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("rlhf.dashboard", __doc__)
    parser.add_argument("--entity", required=True, help="team or user")
    parser.add_argument("--project", default="rlhf", help="project (default: rlhf)")
    parser.add_argument("--name", default="rlhf", help="name of the view (default: rlhf)")
    options = parser.parse_args(argv)
    if find_spec("wandb_workspaces") is None:
        raise ValueError("wandb-workspaces is not installed. Run: pip install -e '.[dashboard]'")
    view = workspace(options.entity, options.project, options.name)
    from wandb.errors import Error

    try:
        say(view.save().url)
    except Error as error:
        raise ValueError(
            f"wandb did not accept the dashboard ({first_line(error)}). Log in (`wandb login`), and check --entity and "
            "--project."
        ) from None


if __name__ == "__main__":
    sys.exit(run_program(main))
