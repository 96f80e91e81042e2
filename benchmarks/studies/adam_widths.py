"""Study: does a wider policy suffer more from Adam as PyTorch writes it? The first update at four widths.

    python -m benchmarks.studies.adam_widths [--seeds 0,1,2] [--quick]

The first update of `adam.py`, with both variants on one batch, at one eps and one rate. Two ladders, in each of which
only the width differs (64 to 512):

imitation   the quickstart's model on its own task; each width learned by the same imitation first
random      GPT-2's architecture with as many layers, random weights and an arbitrary reward

SmolLM2-135M is the one pretrained point. A seed is another batch, in the ladder `random` other weights too. Each policy
and seed is a JSON file under `runs` of the output; what is there is not computed again.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import adam, report
from benchmarks.studies import adam_update as update
from benchmarks.studies.adam_report import EPS, quotients, spread
from benchmarks.studies.kl_report import plain_ticks
from benchmarks.studies.objectives_report import interval

WIDTHS = (64, 128, 256, 512)
QUICK_WIDTHS = WIDTHS[:2]
LR = adam.QUICKSTART_LR
IMITATION, RANDOM, PRETRAINED = "imitation", "random", "SmolLM2-135M"
PRETRAINED_WIDTH, PRETRAINED_LR = 576, adam.LR
RANDOM_SIZES = {"vocab_size": 2000, "n_layer": 3, "n_positions": 64}
COLOURS = {IMITATION: "tab:blue", RANDOM: "tab:orange", PRETRAINED: "black"}
COMMAND = "python -m benchmarks.studies.adam_widths"
RATIOS = {"first update": "change", "KL": "KL"}  # torch over TensorFlow


def measured(case: update.Case) -> report.Row:
    """The first update with each variant: the mean |change| / lr of a weight, KL and clip fraction after it."""
    update.backward(case)
    start, ends, row = update.snapshot(case), {}, update.policy_row(case, eps=EPS)
    for variant in update.VARIANTS:
        update.first_step(case, variant, eps=EPS)
        now = update.moved(case)
        row |= {f"KL: {variant}": now["approximate KL"], f"clip fraction: {variant}": now["clip fraction"]}
        ends[variant] = update.snapshot(case)
        update.put(case, start)
    layers = update.weight_changes(case, start, ends)
    for variant in update.VARIANTS:
        row[f"change: {variant}"] = sum(layer["elements"] * layer[variant] for layer in layers) / row["elements"]
    return row


def random_case(seed: int, width: int) -> update.Case:
    sizes = RANDOM_SIZES | {"n_embd": width, "n_head": width // adam.HEAD}
    return update.gpt2_case(seed, lr=LR, name=f"{RANDOM}, {width}", sizes=sizes)


def imitation_case(seed: int, width: int, data: Path, models: Path) -> update.Case:
    folder = report.ensure_data(data) if width == 128 else adam.wide_data(models / str(width), width)
    return update.quickstart_case(seed, folder, lr=LR, name=f"{IMITATION}, {width}")


def pretrained_case(seed: int, folder: Path) -> update.Case:
    return update.pretrained_case(seed, adam.real_model(folder), lr=PRETRAINED_LR)


def ratios(rows: Sequence[report.Row], what: str) -> list[float]:
    """Torch over TensorFlow by row."""
    return quotients(*([row[f"{what}: {variant}"] for row in rows] for variant in update.VARIANTS))


def widths_table(rows: Sequence[report.Row]) -> list[report.Row]:
    """A line per policy: median (lowest to highest) of its seeds."""
    by_policy: dict[tuple[str, int], list[report.Row]] = {}
    for row in rows:
        by_policy.setdefault((row["ladder"], row["width"]), []).append(row)
    return [
        {"policy": ladder, "width": width, "parameters": own[0]["elements"]}
        | {"mean reward": spread([row["reward"] for row in own])}
        | {f"gradients {key}": spread([row[key] for row in own]) for key in ("below eps", "eps to 32 eps")}
        | {f"{name}: torch / tensorflow": spread(ratios(own, what)) for name, what in RATIOS.items()}
        | {f"KL: {variant}": spread([row[f"KL: {variant}"] for row in own]) for variant in update.VARIANTS}
        | {f"clip fraction: {v}": spread([row[f"clip fraction: {v}"] for row in own]) for v in update.VARIANTS}
        for (ladder, width), own in by_policy.items()
    ]


def slope(widths: Sequence[float], values: Sequence[float]) -> float:
    """Of log2 of the values over log2 of the widths, by least squares."""
    return statistics.linear_regression([math.log2(x) for x in widths], [math.log2(y) for y in values]).slope


def trend_table(rows: Sequence[report.Row]) -> list[report.Row]:
    """A line per ladder: by what factor each doubling of the width changes a number.

    The mean over seeds of each seed's slope, with its 95% interval by Student's t, as factors.
    """
    table = []
    for ladder in (IMITATION, RANDOM):
        by_seed: dict[int, list[report.Row]] = {}
        for row in rows:
            if row["ladder"] == ladder:
                by_seed.setdefault(row["seed"], []).append(row)
        if not by_seed:
            continue
        line: report.Row = {"ladder": ladder, "seeds": len(by_seed)}
        for name, what in RATIOS.items():
            slopes = [slope([r["width"] for r in own], ratios(own, what)) for own in by_seed.values()]
            line[f"{name}, torch / tensorflow"] = factor(slopes)
        for variant in update.VARIANTS:
            of_kl = [slope([r["width"] for r in own], [r[f"KL: {variant}"] for r in own]) for own in by_seed.values()]
            line[f"KL: {variant}"] = factor(of_kl)
        table.append(line)
    return table


def factor(slopes: Sequence[float]) -> str:
    """`1.2 (1.1 to 1.3)` of slopes in powers of two."""
    mean, half = interval(slopes)
    bounds = "" if math.isnan(half) else f" ({2 ** (mean - half):.2f} to {2 ** (mean + half):.2f})"
    return f"{2**mean:.2f}{bounds}"


def draw(rows: Sequence[report.Row], path: Path, results: report.Row) -> None:
    drawn, axes = report.figure(1, 2, width=8.5, height=3.6)
    shown: list[tuple[str, Callable[[report.Row], float]]] = [
        ("KL after one update: torch / tensorflow", lambda row: row["KL: torch"] / row["KL: tensorflow"]),
        ("KL after one update with torch, nats per token", lambda row: row["KL: torch"]),
    ]
    for panel, (title, value) in zip(axes[0], shown, strict=True):
        for ladder, colour in COLOURS.items():
            own = [row for row in rows if row["ladder"] == ladder]
            widths = sorted({row["width"] for row in own})
            panel.plot([row["width"] for row in own], [value(row) for row in own], "o", ms=3, color=colour)
            medians = [statistics.median(value(row) for row in own if row["width"] == width) for width in widths]
            panel.plot(widths, medians, color=colour, label=ladder)
        panel.set(title=title, xlabel="width of the policy (hidden size)", xscale="log", yscale="log")
        panel.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
        panel.set_xticks([], minor=True)
        plain_ticks(panel.yaxis, [value(row) for row in rows])
        panel.legend()
    drawn.supxlabel(results["note"], fontsize=6.5)
    report.save(drawn, path, results)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("adam_widths", "Adam's first PPO update by width.", trains=True)
    parser.add_argument("--real-model", type=Path, default=adam.REAL_MODEL, help="SmolLM2-135M; made if not there")
    parser.add_argument("--only-tables", action="store_true", help="compute nothing: what is there")
    options = report.parse(parser, arguments)
    widths, seeds = (QUICK_WIDTHS, options.seeds[:1]) if options.quick else (WIDTHS, options.seeds)
    models = options.output / "models"
    makes: dict[tuple[str, int], Callable[[int], update.Case]] = {
        (RANDOM, width): functools.partial(random_case, width=width) for width in widths
    }
    if not options.quick:
        on_task = functools.partial(imitation_case, data=options.data, models=models)
        makes |= {(IMITATION, width): functools.partial(on_task, width=width) for width in widths}
        makes[PRETRAINED, PRETRAINED_WIDTH] = functools.partial(pretrained_case, folder=options.real_model)
    rows = []
    for (ladder, width), make in makes.items():
        for seed in seeds:
            file = options.output / "runs" / f"{ladder.lower()}-{width}-{seed}.json"
            if options.only_tables and not file.is_file():
                continue
            rows.append(adam.computed_once(file, functools.partial(record, ladder, width, seed, make)))
            print(f"{ladder}, {width}, seed {seed}: {rows[-1]['seconds']} s", flush=True)
    if not rows:
        raise ValueError(f"{options.output}: there are no runs yet. Leave out --only-tables.")
    results = study_results(rows, COMMAND + " --quick" * options.quick)
    for name, table in results["tables"].items():
        report.write_table(options.output / name, table)
        print(report.markdown(table))
    draw(rows, options.output / "adam_widths.png", results)


def record(ladder: str, width: int, seed: int, make: Callable[[int], update.Case]) -> dict[str, Any]:
    """What is kept of one policy and seed."""
    began = time.monotonic()
    row = {"ladder": ladder, "width": width, "seed": seed} | measured(make(seed))
    seconds = round(time.monotonic() - began, 1)
    return row | {"seconds": seconds}


def study_results(rows: Sequence[report.Row], command: str) -> report.Row:
    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    note = f"Dots: seeds {seeds}; lines: medians. eps {EPS:g}, lr {LR:g}, SmolLM2 {PRETRAINED_LR:g}; {command}"
    tables = {"widths": widths_table(rows), "trend": trend_table(rows)}
    of_runs = {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}
    return report.results(command, rows, note=note, tables=tables, runs=of_runs)


if __name__ == "__main__":
    main()
