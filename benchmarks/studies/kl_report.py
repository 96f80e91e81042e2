"""Tables and picture of the KL study, from the runs that are there: medians over seeds, with the smallest and largest.

kl-runs.csv       one line per run, over the second half of its steps, and what was measured at its end
grid-*.md, betas-*.md, reward-*.md, lag-*.md, ties.md, slower-*.md   the parts of `kl_runs.py`
slower-differences.md   of `slower`: the run with a KL minus that without one, in pairs of a seed, with its 95% interval
kl-gradients.md   bias and variance of each estimator's gradient, enumerated and sampled
responses.md      the gradient of whole responses by estimator and aggregation, enumerated
kl.png, kl.json   accuracy against KL, a curve over coefficients; the grid; bias and variance by estimator; all numbers

A part is shown with the seeds of which all its runs are there, or else with all of its runs that are there.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import kl_gradients, kl_responses, report
from benchmarks.studies.kl_runs import ADVANTAGES, NONE, Run, runs_of_seed
from benchmarks.studies.objectives_report import interval

COLOURS = {
    "k1": "tab:red", "k2": "tab:blue", "k3": "tab:orange", "k3 weighted": "black", "k4": "tab:green", NONE: "0.6"
}  # fmt: skip
COMMAND = "python -m benchmarks.studies.kl"
TOKENS = ("on-policy", "off-policy")
GRADIENT_SEEDS = (0, 1, 2)  # of the policies of `kl_gradients`
SETTING = ("estimator", "place", "beta", "seed", "aggregation", "minibatches", "advantage", "lag", "responses", "rate")
VALUES = ("KL", "accuracy", "length", "entropy", "tied groups", "held-out accuracy", "held-out KL", "held-out length")
COLUMNS = (*SETTING, *VALUES, "seconds", "date", "commit")  # of a run in the JSON
# Table -> part of the study, what is shown, what the lines are, what the columns are.
TABLES = {
    f"{part}-{value.replace(' ', '-').lower()}": (part, value, lines, column)
    for part, lines, column in (
        ("grid", ("aggregation", "minibatches"), "estimator"),
        ("betas", ("estimator",), "beta"),
        ("reward", ("advantage", "estimator"), "beta"),
        ("lag", ("lag", "estimator"), "beta"),
        ("slower", ("minibatches", "estimator"), "beta"),
    )
    for value in ("KL", "accuracy", "held-out accuracy", "length")
}


def summarize(record: dict[str, Any]) -> report.Row:
    """One line of a run, over the second half of its steps; the median KL, because single steps are outliers.

    `accuracy` is that of the responses that the run was trained on, to problems that it saw once.
    """
    steps = record["steps"]
    late = steps[len(steps) // 2 :]
    about = (*SETTING, "seconds", "date", "commit")
    means = {"accuracy": "reward", "length": "length", "entropy": "entropy", "tied groups": "tied"}
    return {
        **{key: record[key] for key in about},
        "KL": statistics.median(step["k3"] for step in late),
        **{name: report.mean(step[key] for step in late) for name, key in means.items()},
        "held-out accuracy": steps[-1]["held-out reward"],
        "held-out KL": steps[-1]["held-out k3"],
        "held-out length": steps[-1]["held-out length"],
    }


def known_rows(path: Path) -> list[report.Row]:
    """The runs in the JSON of a picture, as `summarize` has them."""
    runs = json.loads(path.read_text())["runs"]
    return [dict(zip(runs["columns"], row, strict=True)) for row in runs["rows"]]


def run_of(row: report.Row) -> Run:
    return Run(**{key: row[key] for key in SETTING})


def rows_of(part: str, rows: Sequence[report.Row], seeds: Sequence[int]) -> list[report.Row]:
    """Those of these rows, one per run, that belong to a part: of whole seeds, or of all while there is none."""
    by_run = {run_of(row): row for row in rows}
    planned = [runs_of_seed(seed)[part] for seed in seeds]
    whole = [runs for runs in planned if all(run in by_run for run in runs)]
    return [by_run[run] for runs in whole or planned for run in runs if run in by_run]


def spread(values: Iterable[float], digits: int = 2) -> str:
    """The median (smallest..largest); a single number stays alone."""
    numbers = sorted(values)
    middle = short(statistics.median(numbers), digits)
    if len(numbers) == 1:
        return middle
    return f"{middle} ({short(numbers[0], digits)}..{short(numbers[-1], digits)})"


def short(value: float, digits: int = 2) -> str:
    """So many digits, without an exponent where a number has more."""
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:.0f}"


def pivot(rows: Sequence[report.Row], value: str, lines: Sequence[str], column: str) -> list[report.Row]:
    """A line for each setting of `lines`, a column for each of `column`, both in the order of the rows."""
    cells: dict[tuple[Any, ...], dict[Any, list[float]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in lines), {}).setdefault(row[column], []).append(row[value])
    columns = dict.fromkeys(row[column] for row in rows)
    titles = {each: f"{column} {each:g}" if isinstance(each, float) else str(each) for each in columns}
    digits = 3 if "length" in value else 2
    return [
        dict(zip(lines, setting, strict=True))
        | {title: spread(of[each], digits) if each in of else "" for each, title in titles.items()}
        for setting, of in cells.items()
    ]


def ties_table(rows: Sequence[report.Row]) -> list[report.Row]:
    """A line per size of a group and seed: without a KL, and with one in the reward that is too small to matter."""
    pairs: dict[tuple[int, int], dict[str, report.Row]] = {}
    for row in rows:
        pair = pairs.setdefault((row["responses"], row["seed"]), {})
        pair["without" if row["estimator"] == NONE else "with"] = row
    keys = ("tied groups", "accuracy", "held-out accuracy", "KL")
    return [
        {"responses": responses, "seed": seed}
        | {f"{key}: {which}": of[which][key] if which in of else "" for key in keys for which in ("with", "without")}
        for (responses, seed), of in sorted(pairs.items())
    ]


def differences_table(rows: Sequence[report.Row]) -> list[report.Row]:
    """A line per setting, with its pairs that share a seed and minibatches: factor of the KL, difference of accuracy.

    Both with their 95% interval by Student's t. That of the factor is of its logarithm.
    """
    free = {(row["minibatches"], row["seed"]): row for row in rows if row["estimator"] == NONE}
    pairs: dict[tuple[Any, ...], list[tuple[report.Row, report.Row]]] = {}
    for row in rows:
        key = (row["minibatches"], row["seed"])
        if row["estimator"] != NONE and key in free:
            pairs.setdefault((row["minibatches"], row["estimator"], row["beta"]), []).append((row, free[key]))
    table = []
    for (minibatches, estimator, beta), both in pairs.items():
        factor, half = interval([math.log(one["KL"] / other["KL"]) for one, other in both])
        bounds = "" if math.isnan(half) else f" ({math.exp(factor - half):.2g} to {math.exp(factor + half):.2g})"
        line = {"minibatches": minibatches, "estimator": estimator, "beta": beta}
        line["KL, times that without"] = f"{math.exp(factor):.2g}{bounds}"
        for key in ("accuracy", "held-out accuracy"):
            mean, half = interval([one[key] - other[key] for one, other in both])
            line[f"{key}, minus that without"] = f"{mean:+.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")
        table.append(line)
    return table


def gradient_table(rows: Sequence[report.Row]) -> list[report.Row]:
    """A line per distance, policy that sampled, and estimator: the first seed twice, and all seeds."""
    lines: dict[tuple[str, ...], list[report.Row]] = {}
    for row in rows:
        lines.setdefault((row["distance"], row["tokens"], row["estimator"]), []).append(row)
    table = []
    for (distance, tokens, estimator), seeds in lines.items():
        first = seeds[0]
        line = {"pi and ref": distance, "tokens": tokens, "estimator": estimator}
        for key in ("bias", "variance"):
            sampled, error = first[f"sampled {key}"], first[f"error of sampled {key}"]
            line[f"{key}, seed {first['seed']}: enumerated"] = short(first[key]) if first[key] > 1e-9 else "0"
            line[f"{key}: sampled (s.e.)"] = f"{short(sampled)} ({error:.1g})"
            line[f"{key}, all seeds"] = spread(row[key] if row[key] > 1e-9 else 0.0 for row in seeds)
        table.append(line)
    return table


def responses_table(rows: Sequence[report.Row]) -> list[report.Row]:
    """A line per policy that sampled, estimator and aggregation: all policies. Empty where a gradient is 0."""
    lines: dict[tuple[str, ...], list[report.Row]] = {}
    keys = ("tokens", "estimator", "aggregation")
    for row in rows:
        lines.setdefault(tuple(row[key] for key in keys), []).append(row)
    table = []
    for setting, policies in lines.items():
        line = dict(zip(keys, setting, strict=True))
        sizes = [row["size"] for row in policies]
        line["size"] = spread(sizes) if max(sizes) > kl_responses.ROUNDING else "0"
        for key in ("cosine: KL", "longer responses", "away from the sampler"):
            cosines = [row[key] for row in policies]
            line[key] = "" if any(map(math.isnan, cosines)) else spread(cosines)
        table.append(line)
    return table


def caption(part: str, rows: Sequence[report.Row], what: str) -> str:
    """Seeds, spread, command and date of the runs of a table."""
    numbers = sorted({row["seed"] for row in rows})
    planned = len(numbers) * len(runs_of_seed(0)[part])
    seeds = ", ".join(map(str, numbers)) + ("" if len(rows) == planned else f" ({len(rows)} of {planned} runs)")
    return (
        f"{what}. Seeds {seeds}: median (smallest..largest) over seeds. {COMMAND}, {max(row['date'] for row in rows)}"
    )


def draw(parts: dict[str, list[report.Row]], gradients: Sequence[report.Row], path: Path, results: report.Row) -> None:
    """Accuracy against KL by place and advantage; KL of the grid; bias and variance of the first seed's gradients."""
    drawn, axes = report.figure(2, 3, width=10.5, height=6.2)
    rewards = parts.get("reward", [])
    frontiers = {"KL in the loss": parts.get("betas", [])}
    frontiers |= {f"KL in the reward, {kind}": [r for r in rewards if r["advantage"] == kind] for kind in ADVANTAGES}
    for number, (title, rows) in enumerate(frontiers.items()):
        if not rows:
            continue
        panel = axes[0, number]
        draw_frontier(panel, rows)
        panel.set(xscale="log", title=f"{title}: beta 0.01 to 1", xlabel="KL, nats per token")
        plain_ticks(panel.xaxis, [row["KL"] for row in rows])
        if number:
            panel.sharey(axes[0, 0])
        panel.set_ylabel("accuracy")
        panel.legend()
    if "grid" in parts:
        draw_grid(axes[1, 0], parts["grid"])
    for number, key in enumerate(("bias", "variance")):
        draw_gradients(axes[1, 1 + number], gradients, key)
    seeds = "; ".join(f"{part} {', '.join(map(str, of))}" for part, of in results["seeds"].items())
    drawn.suptitle(
        f"Seeds: {seeds}. Dots are runs, lines go through medians of seeds from beta 0.01 (small) to 1 (large).\n"
        f"Bars of bias and variance: enumerated; points: sampled, with 2 standard errors. {COMMAND}, {results['date']}",
        fontsize=7.5,
    )
    report.save(drawn, path, results)


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Plain numbers at 1, 2 and 5 times powers of ten on a logarithmic axis, around these values."""
    ticks = [digit * 10.0**power for power in range(-5, 3) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if min(values) / 2 < tick < max(values) * 2]
    axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axis.set_ticks([], minor=True)


def draw_frontier(panel: Any, rows: Sequence[report.Row]) -> None:
    """A curve over the coefficients through the medians of the seeds, larger marks for larger ones; dots are runs."""
    of: dict[str, dict[float, list[report.Row]]] = {}
    for row in rows:
        of.setdefault(row["estimator"], {}).setdefault(row["beta"], []).append(row)
    for estimator, by_beta in of.items():
        colour, points = COLOURS[estimator], [row for runs in by_beta.values() for row in runs]
        panel.scatter([row["KL"] for row in points], [row["accuracy"] for row in points], s=4, alpha=0.4, color=colour)
        medians = [[statistics.median(row[key] for row in runs) for runs in by_beta.values()] for key in VALUES[:2]]
        panel.plot(*medians, color=colour, lw=1)
        sizes = [40] if estimator == NONE else [10 * (1 + number) for number in range(len(by_beta))]
        panel.scatter(*medians, s=sizes, color=colour, label=estimator, marker="*" if estimator == NONE else "o")


def draw_grid(panel: Any, rows: Sequence[report.Row]) -> None:
    """The KL at beta 1 by aggregation and minibatches, from the smallest to the largest seed."""
    settings = list(dict.fromkeys((row["aggregation"], row["minibatches"]) for row in rows))
    for number, estimator in enumerate(COLOURS):
        of: dict[int, list[float]] = {}
        for row in rows:
            if row["estimator"] == estimator:
                of.setdefault(settings.index((row["aggregation"], row["minibatches"])), []).append(row["KL"])
        middles = [statistics.median(values) for values in of.values()]
        below = [middle - min(values) for middle, values in zip(middles, of.values(), strict=True)]
        above = [max(values) - middle for middle, values in zip(middles, of.values(), strict=True)]
        at = [place + 0.12 * (number - 2.5) for place in of]
        panel.errorbar(at, middles, yerr=(below, above), fmt="o", ms=3, lw=1, capsize=2, color=COLOURS[estimator])
    labels = [f"{count}\n{aggregation}" if count == 2 else str(count) for aggregation, count in settings]
    panel.set_xticks(range(len(settings)), labels, fontsize=7)
    panel.set(yscale="log", title="KL in the loss, beta 1: KL, nats per token", xlabel="minibatches per step")
    plain_ticks(panel.yaxis, [row["KL"] for row in rows])


def draw_gradients(panel: Any, gradients: Sequence[report.Row], key: str) -> None:
    """Bars are enumerated, points sampled with two standard errors; the far policies of the first seed."""
    for side, tokens in enumerate(TOKENS):
        rows = [
            row
            for row in gradients
            if (row["seed"], row["distance"], row["tokens"]) == (gradients[0]["seed"], "far", tokens)
        ]
        at = [number + 0.4 * side - 0.2 for number in range(len(rows))]
        panel.bar(at, [row[key] for row in rows], width=0.38, color=("tab:blue", "tab:orange")[side], label=tokens)
        panel.errorbar(
            at, [row[f"sampled {key}"] for row in rows], yerr=[2 * row[f"error of sampled {key}"] for row in rows],
            fmt="k.", ms=3, lw=1, capsize=2,
        )  # fmt: skip
    panel.set_xticks(range(len(rows)), [row["estimator"] for row in rows], fontsize=7)
    panel.set(title=f"{key} of the gradient in the loss, relative", yscale="linear" if key == "bias" else "log")
    panel.legend()


def write_with_note(path: Path, rows: Sequence[report.Row], note: str) -> None:
    report.write_table(path, rows)
    text = f"{note}\n\n{report.markdown(rows)}"
    path.with_suffix(".md").write_text(text)
    print(text)


def write(rows: Sequence[report.Row], output: Path, *, seeds: Sequence[int]) -> None:
    """All tables and the picture of these runs, one row each."""
    gradients = kl_gradients.all_gradients(GRADIENT_SEEDS)
    report.write_table(output / "kl-gradients-all", gradients)
    tables = {"gradients": gradient_table(gradients)}
    names = ", ".join(map(str, GRADIENT_SEEDS))
    note = f"Seeds {names}: median (smallest..largest) over seeds; {kl_gradients.SAMPLES:,} sampled tokens. {COMMAND}"
    write_with_note(output / "kl-gradients", tables["gradients"], note)
    tables["responses"] = responses_table(kl_responses.gradient_rows())
    note = f"{kl_responses.POLICIES} policies, enumerated: median (smallest..largest). {COMMAND}"
    write_with_note(output / "responses", tables["responses"], note)
    parts = {part: rows_of(part, rows, seeds) for part in runs_of_seed(0)}
    parts = {part: of_part for part, of_part in parts.items() if of_part}
    if not parts:
        print("no run is there yet")
        return
    report.write_table(output / "kl-runs", rows)
    for name, (part, value, lines, column) in TABLES.items():
        if part not in parts:
            continue
        tables[name] = pivot(parts[part], value, lines, column)
        write_with_note(output / name, tables[name], caption(part, parts[part], value))
    if "ties" in parts:
        tables["ties"] = ties_table(parts["ties"])
        write_with_note(output / "ties", tables["ties"], caption("ties", parts["ties"], "equal rewards"))
    if "slower" in parts:
        tables["slower-differences"] = differences_table(parts["slower"])
        note = caption("slower", parts["slower"], "With a KL minus without, pairs of a seed, mean and 95% interval")
        write_with_note(output / "slower-differences", tables["slower-differences"], note)
    short_rows = [[float(f"{row[key]:.4g}") if key in VALUES else row[key] for key in COLUMNS] for row in rows]
    seeds_of = {name: sorted({row["seed"] for row in part}) for name, part in parts.items()}
    of_runs = {"columns": COLUMNS, "rows": short_rows}
    of_policies = {"columns": list(gradients[0]), "rows": [list(row.values()) for row in gradients]}
    results = report.results(COMMAND, rows, seeds=seeds_of, tables=tables, gradients=of_policies, runs=of_runs)
    draw(parts, gradients, output / "kl.png", results)
