"""Tables and picture of the study of Adam's epsilon (adam.py), next to what its source published.

first.md      statistics after one update        ratios.md  of the two variants, torch / tensorflow
eps.md        the KL by epsilon                  controls.md  with changes of one size
sizes.md      by the size of the policy          kinds.md   by kind of layer
adam.png      all of that
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import adam_update as update
from benchmarks.studies import report

Records = dict[str, list[report.Row]]  # by policy, one per seed

EPS = 1e-5  # of the original RLHF code
WIDTHS = {"quickstart, 2.6 M": 256, "quickstart, 10 M": 512}  # hidden size; the quickstart's own is 128
COLOURS = {"torch": "tab:red", "tensorflow": "tab:blue"}
LINES = {"torch": "-", "tensorflow": "--"}
KIND_COLOURS = {"attention": "tab:orange", "MLP": "tab:green", "norm": "tab:purple", "embedding": "0.4"}
# github.com/vwxyzjn/lm-human-preference-details and huggingface.co/blog/the_n_implementation_details_of_rlhf_with_ppo:
# GPT-2 (124 M), 64 queries, lr 1e-5, eps 1e-5; statistics printed before the second pass, so after one update
PUBLISHED_NAME, PUBLISHED_ELEMENTS = "GPT-2, published", 124_439_808
PUBLISHED = {
    "log-prob difference: mean": (0.00810, 0.00407),
    "log-prob difference: variance": (0.004669, 0.000733),
    "log-prob difference: max": (0.594, 0.223),
    "log-prob difference: min": (-0.913, -0.315),
    "ratio: mean": (1.01055, 1.00446),
    "ratio: variance": (0.005374, 0.000794),
    "ratio: max": (1.812, 1.250),
    "ratio: min": (0.401, 0.730),
    "approximate KL": (0.002367, 0.000375),
    "policy loss": (-0.03419, -0.01457),
    "clip fraction": (0.02018, 0.00521),
}
# github.com/vwxyzjn/minimal-adam-layer-norm-bug-repro: after one step, weights of the two codes, difference / lr
PUBLISHED_CHANGES = {"attention": "0.5 to 0.6", "MLP": "0.5 to 0.6", "embedding": "0.04", "norm": ""}
RATIOS = (
    "log-prob difference: variance", "ratio: variance", "approximate KL", "policy loss", "clip fraction",
    "ratios outside 1 ± 0.2",
)  # fmt: skip


# --- tables ---


def spread(values: Sequence[float]) -> str:
    """The median with the lowest and the highest."""
    median, low, high = (report.number(float(f(values))) for f in (statistics.median, min, max))
    return median if len(values) == 1 else f"{median} ({low} to {high})"


def quotients(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Of each seed's two values; not a number where the second is 0."""
    return [one / other if other else float("nan") for one, other in zip(first, second, strict=True)]


def of_variant(records: Sequence[report.Row], variant: str, statistic: str) -> list[float]:
    """One value per seed."""
    return [row[statistic] for record in records for row in record["first"] if row["variant"] == variant]


def as_published(by_policy: Records) -> Records:
    """Those of the policies that have a column next to the published numbers."""
    return {policy: records for policy, records in by_policy.items() if policy not in WIDTHS}


def first_update_table(by_policy: Records) -> list[report.Row]:
    rows = []
    for statistic in next(iter(by_policy.values()))[0]["first"][0]:
        if statistic == "variant":
            continue
        less = 1.0 if statistic == "ratio: mean" else 0.0  # three digits of 1.01 would say nothing
        row: report.Row = {"after one update": f"{statistic}, minus 1" if less else statistic}
        published = [number - less for number in PUBLISHED.get(statistic, ())] or ["", ""]
        row |= {f"{PUBLISHED_NAME}: {name}": x for name, x in zip(update.VARIANTS, published, strict=True)}
        for policy, records in as_published(by_policy).items():
            for variant in update.VARIANTS:
                row[f"{policy}: {variant}"] = spread([x - less for x in of_variant(records, variant, statistic)])
        rows.append(row)
    return rows


def ratio_table(by_policy: Records) -> list[report.Row]:
    rows = []
    for statistic in RATIOS:
        row: report.Row = {"torch / tensorflow": statistic, PUBLISHED_NAME: ""}
        if statistic in PUBLISHED:
            row[PUBLISHED_NAME] = PUBLISHED[statistic][0] / PUBLISHED[statistic][1]
        for policy, records in as_published(by_policy).items():
            row[policy] = spread(quotients(*(of_variant(records, variant, statistic) for variant in update.VARIANTS)))
        rows.append(row)
    return rows


def controls_table(by_policy: Records) -> list[report.Row]:
    """Both variants with changes of one size, at torch's (tensorflow's rate is raised) and at tensorflow's."""
    rows = []
    for policy, records in by_policy.items():
        torch, tensorflow = (of_variant(records, variant, "approximate KL") for variant in update.VARIANTS)
        for size in update.SIZES:
            seen = [row for record in records for row in record["controls"] if row["size"] == size]
            raised, lowered = ([row[f"approximate KL: {v}"] for row in seen] for v in ("tensorflow", "torch"))
            rows.append(
                {
                    "policy": policy, "equal": size, "cosine of the changes": spread([row["cosine"] for row in seen]),
                    "rate, times": spread([row["factor"] for row in seen]),
                    "KL: torch": spread(torch), "KL: tensorflow, raised": spread(raised),
                    "ratio": spread(quotients(torch, raised)),
                    "KL: torch, lowered": spread(lowered), "KL: tensorflow": spread(tensorflow),
                    "ratio, lowered": spread(quotients(lowered, tensorflow)),
                    "loss: torch, lowered": spread([row["policy loss: torch"] for row in seen]),
                    "loss: tensorflow": spread(of_variant(records, "tensorflow", "policy loss")),
                }
            )  # fmt: skip
    return rows


def sizes_table(by_policy: Records) -> list[report.Row]:
    """By size: where the gradients of attention and MLPs lie, and what both variants make of them."""
    rows = []
    for policy, records in sorted(by_policy.items(), key=lambda item: item[1][0]["policy"][0]["elements"]):
        of = {key: [record["policy"][0][key] for record in records] for key in records[0]["policy"][0]}
        kls = [of_variant(records, variant, "approximate KL") for variant in update.VARIANTS]
        rows.append(
            {"policy": policy, "elements": int(of["elements"][0]), "mean reward": spread(of["reward"])}
            | {f"gradients {key}": spread(of[key]) for key in ("below eps", "eps to 32 eps")}
            | {f"KL: {variant}": spread(values) for variant, values in zip(update.VARIANTS, kls, strict=True)}
            | {"KL: torch / tensorflow": spread(quotients(*kls))}
        )
    return rows


def kinds_table(by_policy: Records) -> list[report.Row]:
    """Medians over seeds; quotients of KLs with their range."""
    rows = []
    for policy, records in as_published(by_policy).items():
        for kind in update.KINDS:
            of_seeds = [row for record in records for row in record["kinds"] if row["kind"] == kind]
            seen = {name: [row[name] for row in of_seeds] for name in of_seeds[0] if name != "kind"}
            row: report.Row = {"policy": policy, "kind": kind, "elements": int(seen.pop("elements")[0])}
            row |= {name: statistics.median(values) for name, values in seen.items() if not name.startswith("KL")}
            row["difference, published"] = PUBLISHED_CHANGES[kind]
            alone = [seen[f"KL, alone: {variant}"] for variant in update.VARIANTS]
            row |= {f"KL, alone: {v}": statistics.median(x) for v, x in zip(update.VARIANTS, alone, strict=True)}
            row |= {"KL, alone: ratio": spread(quotients(*alone)), "KL, all but: ratio": ""}
            if kind in update.SUSPECTS:
                rest = [seen[f"KL, all but: {variant}"] for variant in update.VARIANTS]
                row["KL, all but: ratio"] = spread(quotients(*rest))
            rows.append(row)
    return rows


def eps_rows(records: Sequence[report.Row]) -> list[report.Row]:
    """By eps, the KLs of all seeds with each variant; eps 1e-5 is the first update itself."""
    rows = []
    for eps in sorted({EPS, *(row["eps"] for record in records for row in record["scan"])}):
        row: report.Row = {"eps": eps}
        for variant in update.VARIANTS:
            tried = [r[variant] for record in records for r in record["scan"] if r["eps"] == eps]
            row[variant] = tried or of_variant(records, variant, "approximate KL")
        rows.append(row)
    return rows


def eps_table(by_policy: Records) -> list[report.Row]:
    return [
        {"policy": policy, "eps": f"{row['eps']:g}"}
        | {f"KL, {variant}": spread(row[variant]) for variant in update.VARIANTS}
        | {"KL, torch / tensorflow": spread(quotients(*(row[variant] for variant in update.VARIANTS)))}
        for policy, records in by_policy.items()
        for row in eps_rows(records)
    ]


# --- picture ---


def draw(by_policy: Records, path: Path, results: report.Row) -> None:
    drawn, axes = report.figure(2, 3, width=13, height=6.5)
    _draw_kl(axes[0, 0], as_published(by_policy))
    _draw_eps(axes[0, 1], as_published(by_policy))
    _draw_sizes(axes[0, 2], by_policy)
    _draw_controls(axes[1, 0], by_policy)
    for panel, policy in zip(axes[1, 1:], sorted(as_published(by_policy)), strict=False):
        _draw_layers(panel, results["layers"][policy], policy)
    drawn.legend(*axes[1, 1].get_legend_handles_labels(), loc="outside right lower", fontsize=6)
    drawn.supxlabel(results["note"], fontsize=6.5)
    report.save(drawn, path, results)


def _bars(panel: Any, names: Sequence[str], bars: dict[str, tuple[str, list[list[float]]]]) -> None:
    """By label a colour and the seeds' values for each name: medians side by side, with the lowest and highest."""
    width = 0.8 / len(bars)
    for position, (label, (colour, seen)) in enumerate(bars.items()):
        middles = [statistics.median(values) for values in seen]
        below = [middle - min(values) for middle, values in zip(middles, seen, strict=True)]
        above = [max(values) - middle for middle, values in zip(middles, seen, strict=True)]
        at = [index + width * (position - (len(bars) - 1) / 2) for index in range(len(names))]
        panel.bar(at, middles, 0.95 * width, yerr=[below, above], capsize=2, color=colour, label=label)
    panel.set_xticks(
        range(len(names)),
        [name.replace(", ", ",\n").replace("2-1", "2-\n1").replace("'s ", "'s\n") for name in names],
        fontsize=7,
    )
    panel.set(yscale="log")
    panel.legend(fontsize=7)


def _draw_kl(panel: Any, by_policy: Records) -> None:
    bars = {}
    for variant, published in zip(update.VARIANTS, PUBLISHED["approximate KL"], strict=True):
        seen = [of_variant(records, variant, "approximate KL") for records in by_policy.values()]
        bars[variant] = (COLOURS[variant], [[published], *seen])
    _bars(panel, [PUBLISHED_NAME, *by_policy], bars)
    panel.set(title="approximate KL after one update, eps 1e-5")


def _draw_controls(panel: Any, by_policy: Records) -> None:
    size = next(iter(update.SIZES))

    def control(records: Sequence[report.Row], variant: str) -> list[float]:
        rows = [row for record in records for row in record["controls"] if row["size"] == size]
        return [row[f"approximate KL: {variant}"] for row in rows]

    def plain(records: Sequence[report.Row], variant: str) -> list[float]:
        return of_variant(records, variant, "approximate KL")

    bars = {
        "torch": ("tab:red", [plain(records, "torch") for records in by_policy.values()]),
        "tensorflow, rate raised": ("tab:cyan", [control(records, "tensorflow") for records in by_policy.values()]),
        "torch, rate lowered": ("tab:orange", [control(records, "torch") for records in by_policy.values()]),
        "tensorflow": ("tab:blue", [plain(records, "tensorflow") for records in by_policy.values()]),
    }
    _bars(panel, list(by_policy), bars)
    panel.set(title=f"KL at equal {size}, two and two")


def _draw_eps(panel: Any, by_policy: Records) -> None:
    for number, (policy, records) in enumerate(by_policy.items()):
        rows = eps_rows(records)
        for variant in update.VARIANTS:
            seen, at = [row[variant] for row in rows], [row["eps"] for row in rows]
            style = {"color": f"C{number}", "ls": LINES[variant], "label": f"{policy}: {variant}"}
            panel.plot(at, [statistics.median(values) for values in seen], "o", ms=3, **style)
            panel.fill_between(at, list(map(min, seen)), list(map(max, seen)), alpha=0.15, color=f"C{number}", lw=0)
    panel.set(title="approximate KL by eps", xlabel="eps", xscale="log", yscale="log")
    panel.legend(fontsize=6)


def _draw_sizes(panel: Any, by_policy: Records) -> None:
    for number, (policy, records) in enumerate(by_policy.items()):
        values = quotients(*(of_variant(records, variant, "approximate KL") for variant in update.VARIANTS))
        middle, elements = statistics.median(values), records[0]["policy"][0]["elements"]
        error = [[middle - min(values)], [max(values) - middle]]
        panel.errorbar([elements], [middle], yerr=error, fmt="o", capsize=3, color=f"C{number}", label=policy)
    published = PUBLISHED["approximate KL"][0] / PUBLISHED["approximate KL"][1]
    panel.plot([PUBLISHED_ELEMENTS], [published], "*", color="black", label=PUBLISHED_NAME)
    panel.set(title="approximate KL, torch / tensorflow, eps 1e-5", xlabel="parameters", xscale="log", yscale="log")
    panel.legend(fontsize=6)


def layer_rows(records: Sequence[report.Row]) -> list[report.Row]:
    """The medians over the seeds of |change| / lr, by layer and kind of the policy."""
    keys = [(row["layer"], row["kind"]) for row in records[0]["layers"]]
    of_seeds = [row for record in records for row in record["layers"]]
    return [
        {"layer": layer, "kind": kind}
        | {
            v: statistics.median(row[v] for row in of_seeds if (row["layer"], row["kind"]) == (layer, kind))
            for v in update.VARIANTS
        }
        for layer, kind in keys
    ]


def _draw_layers(panel: Any, rows: Sequence[report.Row], policy: str) -> None:
    for kind, colour in KIND_COLOURS.items():
        inside = kind != "embedding"
        own = [row for row in rows if row["kind"] == kind and (row["layer"] >= 0 or not inside)]
        for variant, line in LINES.items():
            style = {"ls": line, "color": colour, "label": f"{kind}, {variant}"}
            if inside:
                at = sorted(own, key=lambda row: row["layer"])
                panel.plot([row["layer"] for row in at], [row[variant] for row in at], **style)
            else:
                panel.axhline(own[0][variant], **style)
    panel.set(title=f"{policy}: mean |change of a weight| / lr", xlabel="layer", ylim=(0, 1))


# --- results ---


def study_results(by_policy: Records, command: str) -> report.Row:
    """What the picture is drawn from: tables, layers, and a line for each policy and seed."""
    seeds = {policy: ", ".join(str(record["seed"]) for record in records) for policy, records in by_policy.items()}
    counts = "; ".join(f"{policy}: seeds {own}" for policy, own in seeds.items())
    runs = [
        {"policy": policy}
        | {key: record[key] for key in ("seed", "date", "commit")}
        | {f"KL: {row['variant']}": row["approximate KL"] for row in record["first"]}
        | {f"{row['size']}: {key}": row[key] for row in record["controls"] for key in row if key != "size"}
        | {f"eps {row['eps']:g}: {variant}": row[variant] for row in record["scan"] for variant in update.VARIANTS}
        for policy, records in by_policy.items()
        for record in records
    ]
    tables = {
        "first": first_update_table(by_policy), "ratios": ratio_table(by_policy), "eps": eps_table(by_policy),
        "controls": controls_table(by_policy), "sizes": sizes_table(by_policy), "kinds": kinds_table(by_policy),
    }  # fmt: skip
    layers = {policy: layer_rows(records) for policy, records in as_published(by_policy).items()}
    every = [record for records in by_policy.values() for record in records]
    note = f"{counts}; median (lowest to highest); {command}"
    return report.results(command, every, note=note, tables=tables, layers=layers, runs=runs)
