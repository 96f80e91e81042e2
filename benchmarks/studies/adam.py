"""Study: the first PPO update with Adam as PyTorch and as TensorFlow write it, next to the published one.

    python -m benchmarks.studies.adam --output runs/studies/adam

Both variants take the same batch from the same policy. They differ by a per-step epsilon (rlhf/algo/adam.py): at the
first update TensorFlow's is eps / sqrt(1 - 0.999) = 32 eps, and an element with gradient g moves by lr g / (|g| +
eps_t). Policies, update and statistics are in benchmarks/studies/adam_update.py. Each policy and seed is a JSON file
under `runs` of the output; what is there is not computed again.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import adam_update as update
from benchmarks.studies import report

EPS = 1e-5  # of the original RLHF code
LR = 1e-5
QUICKSTART_LR = 1e-4  # a small policy moves less per element's change
SCAN = (1e-8, 1e-6, 2e-5, 1e-4, 1e-3)
LARGE_SCAN = (2e-5,)
TINY_GPT2 = update.GPT2 | {"vocab_size": 2000, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64}
REAL_MODEL = Path("runs/real-model-data/SmolLM2-135M-Instruct")  # where `make real-model` puts it
COLOURS = {"torch": "tab:red", "tensorflow": "tab:blue"}
KIND_COLOURS = {"attention": "tab:orange", "MLP": "tab:green", "norm": "tab:purple", "embedding": "0.4"}
# github.com/vwxyzjn/lm-human-preference-details and huggingface.co/blog/the_n_implementation_details_of_rlhf_with_ppo:
# GPT-2 (124 M), 64 queries, lr 1e-5, eps 1e-5; statistics printed before the second pass, so after one update
PUBLISHED_NAME = "GPT-2, published"
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


def computed_once(file: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file holds; it is computed and written first if it is not there."""
    if not file.is_file():
        result = compute()
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(file)
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def real_model(folder: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct; it is made first if it is not there."""
    if not (folder / "config.json").is_file():
        print(f"making {folder} first (tools/real_model.py)", flush=True)
        subprocess.run([sys.executable, "tools/real_model.py", str(folder)], check=True)
    return folder


def policies(data: Path, real: Path, *, quick: bool) -> dict[str, tuple[Callable[[int], update.Case], Sequence[float]]]:
    """By name: how the case of a seed is made, and the values of eps next to 1e-5 that are tried with it."""
    if quick:
        name = "GPT-2's shape, tiny"
        gpt2 = {name: (lambda seed: update.gpt2_case(seed, lr=LR, name=name, sizes=TINY_GPT2), SCAN)}
        return gpt2 | {"quickstart": (lambda seed: update.quickstart_case(seed, data, lr=QUICKSTART_LR), SCAN)}
    return {
        "GPT-2's shape": (lambda seed: update.gpt2_case(seed, lr=LR), LARGE_SCAN),
        "SmolLM2-135M": (lambda seed: update.pretrained_case(seed, real_model(real), lr=LR), LARGE_SCAN),
        "quickstart": (lambda seed: update.quickstart_case(seed, data, lr=QUICKSTART_LR), SCAN),
    }


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


def first_update_table(by_policy: dict[str, list[report.Row]]) -> list[report.Row]:
    rows = []
    for statistic in next(iter(by_policy.values()))[0]["first"][0]:
        if statistic == "variant":
            continue
        less = 1.0 if statistic == "ratio: mean" else 0.0  # three digits of 1.01 would say nothing
        row: report.Row = {"after one update": f"{statistic}, minus 1" if less else statistic}
        published = [number - less for number in PUBLISHED.get(statistic, ())] or ["", ""]
        row |= {f"{PUBLISHED_NAME}: {name}": x for name, x in zip(update.VARIANTS, published, strict=True)}
        for policy, records in by_policy.items():
            for variant in update.VARIANTS:
                row[f"{policy}: {variant}"] = spread([x - less for x in of_variant(records, variant, statistic)])
        rows.append(row)
    return rows


def ratio_table(by_policy: dict[str, list[report.Row]]) -> list[report.Row]:
    rows = []
    for statistic in RATIOS:
        row: report.Row = {"torch / tensorflow": statistic, PUBLISHED_NAME: ""}
        if statistic in PUBLISHED:
            row[PUBLISHED_NAME] = PUBLISHED[statistic][0] / PUBLISHED[statistic][1]
        for policy, records in by_policy.items():
            row[policy] = spread(quotients(*(of_variant(records, variant, statistic) for variant in update.VARIANTS)))
        rows.append(row)
    return rows


def kinds_table(by_policy: dict[str, list[report.Row]]) -> list[report.Row]:
    """Medians over seeds; quotients of KLs with their range."""
    rows = []
    for policy, records in by_policy.items():
        for kind in update.KINDS:
            of_seeds = [row for record in records for row in record["kinds"] if row["kind"] == kind]
            seen = {name: [row[name] for row in of_seeds] for name in of_seeds[0] if name != "kind"}
            row: report.Row = {"policy": policy, "kind": kind, "elements": int(seen.pop("elements")[0])}
            row |= {name: statistics.median(values) for name, values in seen.items() if not name.startswith("KL")}
            row["difference, published"] = PUBLISHED_CHANGES[kind]
            for label in ("alone", "all but"):
                both = [seen[f"KL, {label}: {variant}"] for variant in update.VARIANTS]
                row |= {f"KL, {label}: {v}": statistics.median(x) for v, x in zip(update.VARIANTS, both, strict=True)}
                row[f"KL, {label}: ratio"] = spread(quotients(*both))
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


def eps_table(by_policy: dict[str, list[report.Row]]) -> list[report.Row]:
    return [
        {"policy": policy, "eps": f"{row['eps']:g}"}
        | {f"KL, {variant}": spread(row[variant]) for variant in update.VARIANTS}
        | {"KL, torch / tensorflow": spread(quotients(*(row[variant] for variant in update.VARIANTS)))}
        for policy, records in by_policy.items()
        for row in eps_rows(records)
    ]


# --- picture ---


def draw(by_policy: dict[str, list[report.Row]], path: Path, caption: str) -> None:
    drawn, axes = report.figure(2, 2, width=10, height=6)
    _draw_kl(axes[0, 0], by_policy)
    _draw_eps(axes[0, 1], by_policy)
    large = [policy for policy in by_policy if policy != "quickstart"]
    for panel, policy in zip(axes[1], [*large, "quickstart"][:2], strict=True):
        _draw_layers(panel, by_policy[policy], policy)
    drawn.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside right lower", fontsize=7)
    drawn.supxlabel(caption, fontsize=6.5)
    report.save(drawn, path)


def _draw_kl(panel: Any, by_policy: dict[str, list[report.Row]]) -> None:
    names = [PUBLISHED_NAME, *by_policy]
    for position, variant in enumerate(update.VARIANTS):
        seen = [[PUBLISHED["approximate KL"][position]]]
        seen += [of_variant(records, variant, "approximate KL") for records in by_policy.values()]
        middles = [statistics.median(values) for values in seen]
        below = [middle - min(values) for middle, values in zip(middles, seen, strict=True)]
        above = [max(values) - middle for middle, values in zip(middles, seen, strict=True)]
        at = [index + 0.38 * (position - 0.5) for index in range(len(names))]
        panel.bar(at, middles, 0.36, yerr=[below, above], capsize=2, color=COLOURS[variant], label=variant)
    panel.set_xticks(range(len(names)), names)
    panel.set(title="approximate KL after one update, eps 1e-5", yscale="log")
    panel.legend(fontsize=7)


def _draw_eps(panel: Any, by_policy: dict[str, list[report.Row]]) -> None:
    for policy, records in by_policy.items():
        rows = eps_rows(records)
        ratios = [quotients(*(row[variant] for variant in update.VARIANTS)) for row in rows]
        (line,) = panel.plot([r["eps"] for r in rows], [statistics.median(r) for r in ratios], "o-", ms=3, label=policy)
        panel.fill_between(
            [row["eps"] for row in rows], [min(r) for r in ratios], [max(r) for r in ratios], alpha=0.25,
            color=line.get_color(), lw=0,
        )  # fmt: skip
    published = PUBLISHED["approximate KL"][0] / PUBLISHED["approximate KL"][1]
    panel.plot([EPS], [published], "*", color="black", label=f"{PUBLISHED_NAME}: {published:.1f}")
    panel.set(title="approximate KL: torch / tensorflow", xlabel="eps", xscale="log", yscale="log")
    panel.legend(fontsize=7)


def _draw_layers(panel: Any, records: Sequence[report.Row], policy: str) -> None:
    for kind, colour in KIND_COLOURS.items():
        rows = [row for record in records for row in record["layers"] if row["kind"] == kind]
        inside = kind != "embedding"
        layers = sorted({row["layer"] for row in rows if row["layer"] >= 0 or not inside})
        for variant, line in zip(update.VARIANTS, ("-", "--"), strict=True):
            values = [statistics.median(row[variant] for row in rows if row["layer"] == n) for n in layers]
            if inside:
                panel.plot(layers, values, line, color=colour, label=f"{kind}, {variant}")
            else:
                panel.axhline(values[0], ls=line, color=colour, label=f"{kind}, {variant}")
    panel.set(title=f"{policy}: mean |change of a weight| / lr", xlabel="layer", ylim=(0, 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("adam", "The first PPO update with both forms of Adam.", trains=True)
    parser.add_argument("--real-model", type=Path, default=REAL_MODEL, help="SmolLM2-135M; made if not there")
    options = report.parse(parser, arguments)
    began = time.monotonic()
    seeds = options.seeds[:1] if options.quick else options.seeds
    cases = policies(report.ensure_data(options.data), options.real_model, quick=options.quick)
    by_policy: dict[str, list[report.Row]] = {policy: [] for policy in cases}
    for seed in seeds:
        for policy, (make, scan) in cases.items():
            file = options.output / "runs" / f"{re.sub('[^a-z0-9]+', '-', policy.lower())}-{seed}.json"
            record = computed_once(file, lambda: update.measure(make(seed), eps=EPS, scan=scan))  # noqa: B023
            by_policy[policy].append(record)
            print(f"{policy}, seed {seed}: {time.monotonic() - began:.0f} s so far", flush=True)
    tables = {
        "adam": first_update_table(by_policy), "adam-ratios": ratio_table(by_policy),
        "adam-kinds": kinds_table(by_policy), "adam-eps": eps_table(by_policy),
    }  # fmt: skip
    command = "python -m benchmarks.studies.adam" + " --quick" * options.quick
    drawn_from = f"seeds {', '.join(map(str, seeds))}; median (lowest to highest); {command}; {datetime.date.today()}"
    for name, rows in tables.items():
        report.write_table(options.output / name, rows)
        with (options.output / f"{name}.md").open("a") as table:
            table.write(f"\n{drawn_from}\n")
        print(report.markdown(rows))
    draw(by_policy, options.output / "adam.png", drawn_from)
    print(f"{drawn_from}; {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
