"""Tables and picture of the KL study, from the runs that are there: medians over seeds, with the smallest and largest.

kl-runs.csv       one line per run, over the second half of its steps
kl.md             the KL by place, estimator and coefficient      kl-reward.md, kl-length.md: the same for those
kl-gradients.md   bias and variance of each estimator's gradient, enumerated and sampled
kl-responses.md   expected gradients of minibatches of whole responses, by aggregation
kl.png            KL and reward by coefficient; bias and variance by estimator
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import kl_gradients, report

COLOURS = {"k1": "tab:red", "k2": "tab:blue", "k3": "tab:orange", "k4": "tab:green", "none": "0.45"}
COMMAND = "python -m benchmarks.studies.kl"
TABLES = {"kl": "KL", "kl-reward": "reward", "kl-length": "length"}
TOKENS = ("on-policy", "off-policy")


def summarize(record: dict[str, Any]) -> report.Row:
    """One line of a run, over the second half of its steps; the median KL, because single steps are outliers."""
    steps = record["steps"]
    late = steps[len(steps) // 2 :]
    return {
        **{key: record[key] for key in ("place", "estimator", "beta", "seed", "date", "seconds")},
        "KL": statistics.median(step["k3"] for step in late),
        "largest KL": max(step["k3"] for step in late),
        "KL by k1": statistics.median(step["k1"] for step in late),
        "reward": report.mean(step["reward"] for step in late),
        "length": report.mean(step["length"] for step in late),
        "entropy": report.mean(step["entropy"] for step in late),
        "updates skipped": steps[-1]["skipped"],
    }


def spread(values: Iterable[float]) -> str:
    """The median (smallest..largest); a single number stays alone."""
    numbers = sorted(values)
    middle = short(statistics.median(numbers))
    return middle if len(numbers) == 1 else f"{middle} ({short(numbers[0])}..{short(numbers[-1])})"


def short(value: float) -> str:
    """Two digits, without an exponent where a number has more."""
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.0f}"


def by_setting(rows: Sequence[report.Row], key: str) -> dict[tuple[str, str], dict[float, list[float]]]:
    """(place, estimator) -> coefficient -> the values of its seeds."""
    values: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in rows:
        values.setdefault((row["place"], row["estimator"]), {}).setdefault(row["beta"], []).append(row[key])
    return values


def by_beta(rows: Sequence[report.Row], key: str) -> list[report.Row]:
    """A line per place and estimator, a column per coefficient; the run without a KL has the column of 0."""
    values = by_setting(rows, key)
    betas = sorted({row["beta"] for row in rows})
    return [
        {"KL in the": place if estimator != "none" else "", "estimator": estimator}
        | {f"beta {beta:g}": spread(of[beta]) if beta in of else "" for beta in betas}
        for (place, estimator), of in values.items()
    ]


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


def response_table(rows: Sequence[report.Row]) -> list[report.Row]:
    """A line per policy that sampled, estimator and aggregation: median and range over the seeds."""
    lines: dict[tuple[str, ...], list[report.Row]] = {}
    for row in rows:
        lines.setdefault((row["tokens"], row["estimator"], row["aggregation"]), []).append(row)
    columns = {"size": "size", "kl": "cosine: KL", "longer": "longer responses", "away": "away from the sampler"}
    table = []
    for (tokens, estimator, aggregation), seeds in lines.items():
        line: report.Row = {"tokens": tokens, "estimator": estimator, "aggregation": aggregation}
        zero = max(row["size"] for row in seeds) < kl_gradients.ROUNDING
        for key, title in columns.items():
            known = not zero and not math.isnan(seeds[0][key])
            line[title] = spread(row[key] for row in seeds) if known else "0" if key == "size" else ""
        table.append(line)
    return table


def caption(records: Sequence[dict[str, Any]], *, planned: int, seeds: Sequence[int]) -> str:
    """Seeds, spread, command and date of what is there."""
    missing = "" if len(records) == planned else f" ({len(records)} of {planned} runs so far)"
    return (
        f"Seeds {', '.join(map(str, seeds))}{missing}: median (smallest..largest) over seeds, of the second half of "
        f"{len(records[0]['steps'])} steps. {COMMAND}, {max(record['date'] for record in records)}"
    )


def draw(rows: Sequence[report.Row], gradients: Sequence[report.Row], note: str, path: Path) -> None:
    """KL and reward by coefficient, for both places; bias and variance of the first seed's gradients."""
    drawn, axes = report.figure(2, 3, width=10.5, height=5.8)
    for line, key in enumerate(("KL", "reward")):
        values = by_setting(rows, key)
        axes[line, 1].sharey(axes[line, 0])
        for column, place in enumerate(("loss", "reward")):
            panel = axes[line, column]
            for number, (estimator, of) in enumerate((e, of) for (p, e), of in values.items() if p == place != e):
                draw_spread(panel, estimator, of, offset=1.05**number)
            free = values.get(("loss", "none"), {}).get(0.0, [])
            if free:
                panel.axhspan(min(free), max(free), color=COLOURS["none"], alpha=0.25, label="no KL")
            panel.set(xscale="log", title=f"KL in the {place}: {key}" + (", nats per token" if key == "KL" else ""))
            panel.set(yscale="log" if key == "KL" else "linear", xlabel="beta")
    axes[0, 0].legend(ncols=2)
    for line, key in enumerate(("bias", "variance")):
        draw_gradients(axes[line, 2], gradients, key)
    right = f"Right: policy of seed {gradients[0]['seed']}, bars enumerated, points sampled with 2 standard errors."
    drawn.suptitle(f"{note}\n{right}", fontsize=7.5)
    report.save(drawn, path)


def draw_spread(panel: Any, estimator: str, of: dict[float, list[float]], *, offset: float) -> None:
    """A line through the medians, with bars from the smallest to the largest seed; `none` is drawn by the caller."""
    if estimator == "none":
        return
    betas = sorted(of)
    middles = [statistics.median(of[beta]) for beta in betas]
    below = [middle - min(of[beta]) for middle, beta in zip(middles, betas, strict=True)]
    above = [max(of[beta]) - middle for middle, beta in zip(middles, betas, strict=True)]
    panel.errorbar(
        [beta * offset for beta in betas], middles, yerr=(below, above), label=estimator, color=COLOURS[estimator],
        marker="o", ms=3, lw=1, capsize=2,
    )  # fmt: skip


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


def write(records: Sequence[dict[str, Any]], output: Path, *, planned: int, seeds: Sequence[int]) -> None:
    """All tables and the picture of the runs that are there."""
    gradients = kl_gradients.all_gradients(seeds)
    report.write_table(output / "kl-gradients-all", gradients)
    names = ", ".join(map(str, seeds))
    note = f"Seeds {names}: median (smallest..largest) over seeds; {kl_gradients.SAMPLES:,} sampled tokens. {COMMAND}"
    write_with_note(output / "kl-gradients", gradient_table(gradients), note)
    responses = kl_gradients.response_rows(kl_gradients.RESPONSE_SEEDS)
    report.write_table(output / "kl-responses-all", responses)
    note = f"{len(kl_gradients.RESPONSE_SEEDS)} policies: median (smallest..largest). {COMMAND}"
    write_with_note(output / "kl-responses", response_table(responses), note)
    if not records:
        print("no run is there yet")
        return
    rows = [summarize(record) for record in records]
    report.write_table(output / "kl-runs", rows)
    note = caption(records, planned=planned, seeds=seeds)
    for name, key in TABLES.items():
        write_with_note(output / name, by_beta(rows, key), f"{key}. {note}")
    draw(rows, gradients, note, output / "kl.png")
