"""The pictures of docs/findings.md, one for each finding, from the numbers of the studies.

    python -m benchmarks.studies.findings [--numbers runs/studies] [--quick]

A picture's title is the finding. Blue is what is right or the default, vermilion what goes wrong, grey what both are
compared with. A dot or a thin line is a seed, a bar goes from the lowest to the highest of them, and a tick or a thick
line is their median. `--quick` draws from docs/studies. After the numbers there have changed:

    python -m benchmarks.studies.findings --numbers docs/studies --output docs/studies
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import outcomes, ppo_adam, report, schedule_outcomes
from benchmarks.studies.adam_report import PUBLISHED, PUBLISHED_NAME
from benchmarks.studies.batch_outcomes import ACCUMULATED, OURS, PER_DEVICE, Outcome
from benchmarks.studies.kl_runs import NONE, Run
from benchmarks.studies.objectives_report import interval, short
from rlhf.algo.schedules import learning_rate

RIGHT, WRONG, ALSO_WRONG, OTHER = "#0072B2", "#D55E00", "#CC79A7", "0.4"  # of Okabe and Ito: apart for all eyes
WIDTH, DPI = 8.8, 150
DOCS = Path("docs/studies")
PEAK, HIGH_PEAK = schedule_outcomes.PEAKS

SOURCES_BETA = 0.03  # of k1 in the loss
POLICIES = {
    "quickstart": "quickstart, 0.7 M", "SmolLM2-135M": "SmolLM2-135M, pretrained",
    "GPT-2's shape": "GPT-2's shape, random weights",
}  # fmt: skip

Numbers = dict[str, Any]  # the JSON of a study
Row = dict[str, Any]
Strip = tuple[str, Sequence[float], str, str]  # name, seeds' values, colour, and text beside; a heading has no values


# --- one style ---


def sheet(title: str, about: str, *, rows: int = 1, columns: int, height: float, **options: Any) -> tuple[Any, Any]:
    """A grid of panels below the finding and, in grey, what it was measured on."""
    drawn, axes = report.figure(rows, columns, width=WIDTH, height=height, dpi=DPI, **options)
    above = 0.42 + 0.16 * (1 + about.count("\n"))
    drawn.get_layout_engine().set(rect=(0, 0, 1, 1 - above / height), wspace=0.05, hspace=0.05)
    drawn.text(0.012, 1 - 0.1 / height, title, fontsize=12, weight="bold", va="top")
    drawn.text(0.012, 1 - 0.36 / height, about, fontsize=8.5, color="0.3", va="top")
    for panel in axes.flat:
        panel.tick_params(labelsize=9)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_size(9)
    return drawn, axes if rows > 1 else axes[0]


def write(panel: Any, x: float, y: float, text: str, colour: str, **options: Any) -> None:
    """A label next to what it names, in its colour."""
    panel.text(x, y, text, color=colour, **({"fontsize": 9, "va": "center"} | options))


def strip(panel: Any, at: float, values: Sequence[float], colour: str, *, upright: bool = False) -> None:
    """A dot for each seed, from the lowest to the highest a bar, and a tick at the median."""
    along, across = (panel.vlines, panel.hlines) if upright else (panel.hlines, panel.vlines)
    along(at, min(values), max(values), color=colour, lw=6, alpha=0.25)
    across(statistics.median(values), at - 0.2, at + 0.2, color=colour, lw=2)
    places = [at] * len(values)
    panel.plot(*((places, values) if upright else (values, places)), "o", ms=4, color=colour, mew=0)


def strips(panel: Any, rows: Sequence[Strip]) -> None:
    """Strips below each other, from the top down."""
    for number, (_, values, colour, text) in enumerate(rows):
        if values:
            strip(panel, -number, values, colour)
            beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
            panel.annotate(text, (max(values), -number), color=colour, fontsize=9, **beside)
    panel.set_yticks([-number for number in range(len(rows))], [name for name, *_ in rows])
    for label, (_, values, *_) in zip(panel.get_yticklabels(), rows, strict=True):
        label.set_weight("normal" if values else "bold")
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)
    panel.spines["left"].set_visible(False)
    panel.set_ylim(0.4 - len(rows), 0.6)


def curves(panel: Any, at: Sequence[float], of_seeds: Sequence[Sequence[float]], colour: str) -> None:
    """A thin line for each seed, and their median."""
    for values in of_seeds:
        panel.plot(at, values, color=colour, lw=0.8, alpha=0.6)
    panel.plot(at, np.median(of_seeds, 0), color=colour, lw=2.6)


def plain_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def span(values: Sequence[float]) -> str:
    low, high = (f"{end:.2f}" if end > 0.01 else f"{end:.1g}" for end in (min(values), max(values)))
    return f"{low} to {high}"


def chosen(rows: Sequence[Row], **setting: Any) -> list[Row]:
    """The rows of a setting, by seed."""
    of_setting = [row for row in rows if all(row[key] == value for key, value in setting.items())]
    return sorted(of_setting, key=lambda row: row["seed"])


def seeds_of(rows: Sequence[Row]) -> str:
    return ", ".join(map(str, sorted({row["seed"] for row in rows})))


# --- the pictures ---


def adam(first: Numbers, whole: Numbers) -> Any:
    """Quotients of PyTorch's and TensorFlow's Adam: the KL after one update, and whole PPO runs."""
    rows: list[Strip] = [("KL after one update", [], "", "")]
    elements = {row["policy"]: row["elements"] for row in first["tables"]["sizes"]}
    for policy in sorted(elements, key=lambda policy: elements[policy]):
        values = [run["KL: torch"] / run["KL: tensorflow"] for run in chosen(first["runs"], policy=policy)]
        text = f"{report.number(statistics.median(values))} times, {len(values)} seeds"
        rows.append((POLICIES.get(policy, policy), values, WRONG, text))
    published = PUBLISHED["approximate KL"][0] / PUBLISHED["approximate KL"][1]
    rows.append((PUBLISHED_NAME, [published], "black", f"{report.number(published)} times, another task"))
    rows.append(("whole PPO runs, six pairs", [], "", ""))
    pairs = [p for p in whole["tables"]["pairs"] if (p["first"], p["over"]) == (ppo_adam.TORCH, ppo_adam.TENSORFLOW)]
    for column, name in (("clip_fraction", "clip fraction"), ("kl_response", "KL to the start"), ("reward", "reward")):
        title, begin, end = ppo_adam.METRICS[column]
        values = [float(number) for pair in pairs for number in pair[title].split(", ")]
        rows.append((f"{name}, steps {begin} to {end}", values, WRONG, f"{span(values)} times"))
    of_optimizer = [
        [report.mean(run["reward"][begin - 1 :]) for warmup in (0, ppo_adam.WARMUP)
         for run in chosen(whole["runs"], optimizer=optimizer, warmup=warmup)]
        for optimizer in (ppo_adam.TORCH, ppo_adam.TENSORFLOW)
    ]  # fmt: skip
    mean, half = interval([torch - tensorflow for torch, tensorflow in zip(*of_optimizer, strict=True)])
    text = f"{mean:+.3f}, with a 95% interval of {mean - half:+.2f} to {mean + half:+.2f}: no difference is shown"
    rows[-1] = (rows[-1][0], values, OTHER, text.replace("-", "−"))
    drawn, (panel,) = sheet(
        "At the same epsilon, PyTorch's Adam moves the policy further at first than TensorFlow's",
        "PyTorch's number over TensorFlow's, at eps 1e-5 and betas 0.9 and 0.999; M: million parameters.\n"
        "Dots: seeds; of whole runs, pairs that share seed and warm-up (none or 10 updates). Bars: lowest to highest. "
        "Ticks: medians.",
        columns=1, height=4.5,
    )  # fmt: skip
    strips(panel, rows)
    panel.axvline(1, color=RIGHT, lw=2, zorder=0)
    write(panel, 1.02, 0, "TensorFlow's", RIGHT)
    panel.set(xscale="log", xlim=(0.85, 17), xlabel="times TensorFlow's (logarithmic)")
    plain_ticks(panel.xaxis, (1, 2, 4, 8))
    return drawn


def kl(numbers: Numbers) -> Any:
    """KL and accuracy by beta with k1 and with the default in the loss, and without a penalty."""
    columns = numbers["runs"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in numbers["runs"]["rows"]]
    setting = Run(NONE, "loss", 0.0, 0)
    same = ("place", "aggregation", "minibatches", "advantage", "lag", "responses", "rate")
    own = chosen(rows, **{key: getattr(setting, key) for key in same})
    betas = sorted({row["beta"] for row in own} - {0.0})
    drawn, axes = sheet(
        "k1 in the loss raises the KL that it should lower",
        f"40 steps of the quickstart's task, {setting.aggregation}, {setting.minibatches} minibatches per step, "
        f"lr {short(setting.rate)}. Of steps 21 to 40. Dots: seeds {seeds_of(own)}. Lines: medians.\n"
        "Grey: no penalty, from the lowest to the highest seed.",
        columns=2, height=3.9,
    )  # fmt: skip
    for panel, value in zip(axes, ("KL", "accuracy"), strict=True):
        free = [row[value] for row in chosen(own, estimator=NONE)]
        panel.axhspan(min(free), max(free), color=OTHER, alpha=0.25, lw=0)
        panel.axhline(statistics.median(free), color=OTHER, lw=1.5)
        for estimator, colour in (("k1", WRONG), ("k3 weighted", RIGHT)):
            by_beta = [[row[value] for row in chosen(own, estimator=estimator, beta=beta)] for beta in betas]
            panel.plot(betas, list(map(statistics.median, by_beta)), color=colour, lw=2.6)
            for beta, values in zip(betas, by_beta, strict=True):
                panel.plot([beta] * len(values), values, "o", ms=4, color=colour, mew=0)
        panel.set(xscale="log", xlabel="beta (algo.kl_coef)")
        plain_ticks(panel.xaxis, betas)
        panel.axvline(SOURCES_BETA, color=OTHER, lw=1, ls=":")
    axes[0].set(yscale="log", title="KL to the start, nats per token")
    plain_ticks(axes[0].yaxis, (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5))
    axes[1].set(title="share of right answers", ylim=(-0.03, 0.65))
    write(axes[0], 0.14, 1, "k1", WRONG, ha="right")
    write(axes[0], 0.2, 0.045, "k3, the default", RIGHT, ha="right")
    write(axes[0], 1, 0.15, "no penalty", OTHER, ha="right")
    write(axes[0], SOURCES_BETA * 1.05, 5, "the source's beta", OTHER, ha="left")
    return drawn


def schedule(numbers: Numbers) -> Any:
    """Learning rate and accuracy of a schedule that is right, and of one that is stepped once per process."""
    processes, runs = 4, chosen(numbers["runs"], peak=PEAK, learners=1)
    drawn, axes = sheet(
        "A scheduler that steps once per process ends too early, or rises again",
        f"40 steps of the quickstart's task, 4 minibatches per step, a peak of {short(PEAK)}. Thin lines: seeds "
        f"{seeds_of(runs)}. Thick lines: medians.",
        rows=2, columns=2, height=4.9, sharex=True, sharey="col",
    )  # fmt: skip
    for (rate, accuracy), name in zip(axes, ("linear", "cosine"), strict=True):
        training = schedule_outcomes.Outcome(name, PEAK, 1, 1, 0).config(outcomes.study_config(Path("data"))).training
        updates = range(1, training.total_updates + 1)
        right = [learning_rate(update, **training.schedule_arguments) for update in updates]
        for times, colour in ((1, RIGHT), (processes, WRONG)):
            rates = right if times == 1 else schedule_outcomes.simulated_rates(training, times)
            rate.plot([40 * u / len(updates) for u in updates], [r / PEAK for r in rates], color=colour, lw=2.6)
            own = chosen(runs, schedule=name, steps_per_update=times)
            curves(accuracy, own[0]["step"], [run["held-out"] for run in own], colour)
            ends = [run["held-out"][-1] for run in own]
            write(accuracy, 41, statistics.median(ends), span(ends), colour)
        rate.set_ylabel(name)
    write(axes[0, 0], 19, 0.68, "this trainer, with any number\nof processes", RIGHT)
    write(axes[0, 0], 11, 0.15, f"stepped by each\nof {processes} processes", WRONG)
    axes[0, 0].set_title("learning rate / peak")
    axes[0, 1].set_title("held-out accuracy")
    for panel in axes[1]:
        panel.set_xlabel("training step")
    axes[0, 1].set_xlim(-1, 50)
    axes[0, 1].set_xticks(range(0, 41, 10))
    return drawn


def batch_sizes(numbers: Numbers) -> Any:
    """How far apart minibatches are that are cut in other ways, and what runs with other sizes end at."""
    drawn, (cut, sized) = sheet(
        "Global batch sizes give one run on any number of devices, sizes per device another",
        "Left: the same rollouts in minibatches that are cut in other ways, 20 steps, seeds 0 and 1.\n"
        f"Right: 5,120 rollouts of the quickstart's task. Dots: seeds {seeds_of(numbers['runs'])}. Bars: lowest to "
        "highest. Ticks: medians.",
        columns=2, height=4.2, gridspec_kw={"width_ratios": (0.85, 1)},
    )  # fmt: skip
    key = "gradient norm: largest difference"
    *cuts, recorded = numbers["tables"]["curves"]
    rows: list[Strip] = []
    for row in cuts[1:]:  # the first is the run itself
        learners = f"{row['learners']} learner{'s' * (row['learners'] > 1)}"
        name = f"{learners}, {row['microbatches per update']:.0f} microbatches"
        rows.append((name, [row[key]], RIGHT, short(row[key])))
    itself = [float(end) for end in recorded[key].split(" to ")]
    strips(cut, [*rows, ("the gradient norm itself", itself, OTHER, "")])
    write(cut, min(itself) * 0.7, -len(rows), span(itself), OTHER, ha="right")
    title = "largest difference of the gradient norm\nto one microbatch on one learner"
    cut.set(xscale="log", xlim=(5e-6, 5), title=title)
    strips(sized, [*ends_by_size(numbers, PEAK, ""), *ends_by_size(numbers, HIGH_PEAK, ", too high for 32")])
    sized.set(title="held-out accuracy at the end,\nby rollouts per update", xlim=(-0.03, 1))
    sized.set_xticks([0, 0.2, 0.4, 0.6, 0.8])
    return drawn


def ends_by_size(numbers: Numbers, peak: float, remark: str) -> list[Strip]:
    """The accuracies at the end of runs with right and wrong sizes, with a heading."""
    base = outcomes.study_config(Path("data"))
    rows: list[Strip] = [(f"peak {short(peak)}{remark}", [], "", "")]
    for name, colour, kind in (
        ("global, 1 learner", RIGHT, Outcome(OURS, 1, peak, 1, 0)),
        ("global, 2 learners", RIGHT, Outcome(OURS, 1, peak, 2, 0)),
        ("per device, 8 devices", WRONG, Outcome(PER_DEVICE, 8, peak, 1, 0)),
        ("accumulation count", ALSO_WRONG, Outcome(ACCUMULATED, 8, peak, 1, 0)),
    ):
        setting = {key: getattr(kind, key) for key in ("fault", "factor", "peak", "learners")}
        if ends := [run["held-out"][-1] for run in chosen(numbers["runs"], **setting)]:
            config = kind.config(base)
            size = config.rollouts_per_step // config.learner.minibatches_per_epoch
            rows.append((f"{name}: {size}", ends, colour, span(ends)))
    return rows


def waiting(numbers: Numbers) -> Any:
    """What is trained, what is learned and how long a step takes, by lag, with both rules."""
    share, slowness = 0.25, 6
    played, runs = (chosen(numbers[part], hard_share=share, slowness=slowness) for part in ("played", "runs"))
    lags = sorted({run["lag"] for run in runs})
    drawn, axes = sheet(
        "Discarding late groups removes slow prompts from the data: they are not learned",
        f"Sums, of which a quarter is hard and takes {slowness:g} times as long.\n"
        f"Dots: seeds {seeds_of(played)}; of the "
        f"accuracy, {seeds_of(runs)}. Bars: lowest to highest. Ticks: medians.",
        columns=3, height=3.9,
    )  # fmt: skip
    shown: tuple[tuple[str, list[Row], Callable[[Row], float]], ...] = (
        ("share of hard prompts\nin what is trained", played, lambda row: row["hard, of what is trained"]),
        ("accuracy on hard held-out\nprompts after 40 steps", runs, lambda row: row["hard"][-1]),
        ("time per step, in steps\nthat wait for nothing", played, lambda row: row["time per step"]),
    )
    for panel, (title, rows, value) in zip(axes, shown, strict=True):
        for place, lag in enumerate(lags):
            for rule, colour, aside in (("wait", RIGHT, -0.22), ("drop", WRONG, 0.22)):
                values = [value(row) for row in chosen(rows, lag=lag, on_stale=rule)]
                strip(panel, place + aside, values, colour, upright=True)
        panel.set(title=title, xlabel="max_policy_lag")
        panel.set_ylim(-0.03 * panel.get_ylim()[1], 1.08 * panel.get_ylim()[1])
        panel.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        panel.grid(axis="x", visible=False)
    axes[0].axhline(share, color=OTHER, lw=1, ls=":")
    write(axes[0], 1, 0.15, "on_stale: wait,\nthe default", RIGHT, ha="center")
    write(axes[0], 1, 0.05, "on_stale: drop", WRONG, ha="center")
    write(axes[0], 1, 1.16 * share, "dotted: as drawn", OTHER, ha="center")
    return drawn


PICTURES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {  # and the studies whose numbers they are drawn from
    "finding-adam": (adam, ("adam", "ppo_adam")),
    "finding-kl": (kl, ("kl",)),
    "finding-schedule": (schedule, ("schedule",)),
    "finding-batch-sizes": (batch_sizes, ("batch_sizes",)),
    "finding-waiting": (waiting, ("waiting",)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("findings", "The pictures of the findings, from the numbers of the studies.", trains=False)
    parser.add_argument("--numbers", type=Path, default=Path("runs/studies"), help="folder of the studies' JSON files")
    options = report.parse(parser, arguments)
    folder = DOCS if options.quick else options.numbers
    for name, (draw, studies) in PICTURES.items():
        files = [next(iter(sorted(folder.glob(f"{s}/{s}.json"))), folder / f"{s}.json") for s in studies]
        drawn = draw(*(json.loads(file.read_text()) for file in files))
        report.save_picture(drawn, options.output / f"{name}.png", files)


if __name__ == "__main__":
    main()
