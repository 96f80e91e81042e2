"""Study: the first PPO update with Adam as PyTorch and as TensorFlow write it, next to the published one.

    python -m benchmarks.studies.adam --output runs/studies/adam

Both variants take the same batch from the same policy. They differ by a per-step epsilon (rlhf/algo/adam.py): at the
first update TensorFlow's is eps / sqrt(1 - 0.999) = 32 eps, and an element with gradient g moves by lr g / (|g| +
eps_t). So torch with 32 eps is TensorFlow's first update. The other control is a rate at which both changes of the
weights have one size: what then differs is which weights move. Policies, update and statistics are in
benchmarks/studies/adam_update.py. Each policy and seed is a JSON file under `runs` of the output; what is there is not
computed again.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.studies import adam_report, report
from benchmarks.studies import adam_update as update
from rlhf.quickstart import write_quickstart

LR = 1e-5
QUICKSTART_LR = 1e-4  # a small policy moves less per element's change
SCAN = (1e-8, 1e-6, 2e-5, 1e-4, 1e-3)
SHORT_SCAN = (1e-8, 2e-5)  # of the large policies, and of a quick study
LARGE = ("SmolLM2-135M", "GPT-2's shape")
HEAD = 32  # as in the quickstart
TINY_GPT2 = update.GPT2 | {"vocab_size": 2000, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64}
FETCH_MODEL = "recipes/08-lora-smollm2/fetch_model.py"
REAL_MODEL = Path("runs/real-model-data/SmolLM2-135M-Instruct")  # where `make real-model` puts it


def computed_once(file: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file holds; it is computed and written first if it is not there."""
    if not file.is_file():
        report.write_json(file, compute() | report.stamp())
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def real_model(folder: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct; it is made first if it is not there."""
    if not (folder / "config.json").is_file():
        print(f"making {folder} first ({FETCH_MODEL})", flush=True)
        subprocess.run([sys.executable, FETCH_MODEL, str(folder)], check=True)
    return folder


def wide_data(folder: Path, hidden_size: int) -> Path:
    """The quickstart's data with a wider model, which learned by the same imitation; it is made first if not there."""
    if not (folder / "test.jsonl").is_file():
        print(f"making {folder} first", flush=True)
        options = {"hidden_size": hidden_size, "num_heads": hidden_size // HEAD}
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # joins a world that it never leaves
            pool.submit(write_quickstart, folder, model_options=options).result()
    return folder


Make = Callable[[int], update.Case]


def policies(data: Path, real: Path, wide: Path, *, quick: bool) -> dict[str, Make]:
    """By name, how the case of a seed is made: the quickstart's first, its wider ones last."""
    made: dict[str, Make] = {"quickstart": lambda seed: update.quickstart_case(seed, data, lr=QUICKSTART_LR)}
    if quick:
        name = "GPT-2's shape, tiny"
        return made | {name: lambda seed: update.gpt2_case(seed, lr=LR, name=name, sizes=TINY_GPT2)}

    def wider(name: str, hidden_size: int) -> Make:
        folder = wide / str(hidden_size)
        return lambda seed: update.quickstart_case(seed, wide_data(folder, hidden_size), lr=QUICKSTART_LR, name=name)

    return {
        **made,
        "SmolLM2-135M": lambda seed: update.pretrained_case(seed, real_model(real), lr=LR),
        "GPT-2's shape": lambda seed: update.gpt2_case(seed, lr=LR),
        **{name: wider(name, hidden_size) for name, hidden_size in adam_report.WIDTHS.items()},
    }


def measured(make: Make, seed: int, scan: Sequence[float]) -> dict[str, list[report.Row]]:
    return update.measure(make(seed), eps=adam_report.EPS, scan=scan)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("adam", "The first PPO update with both forms of Adam.", trains=True, seeds=range(5))
    parser.add_argument("--real-model", type=Path, default=REAL_MODEL, help="SmolLM2-135M; made if not there")
    parser.add_argument(
        "--only-tables", action="store_true", help="compute nothing: tables and picture of what is there"
    )
    options = report.parse(parser, arguments)
    began = time.monotonic()
    seeds = options.seeds[:1] if options.quick else options.seeds
    data = report.ensure_data(options.data)
    cases = policies(data, options.real_model, options.output / "models", quick=options.quick)
    by_policy: adam_report.Records = {}
    wide_last = [(wide, seed, policy) for wide in (False, True) for seed in seeds for policy in cases]
    for wide, seed, policy in wide_last:
        if wide != (policy in adam_report.WIDTHS):
            continue
        file = options.output / "runs" / f"{re.sub('[^a-z0-9]+', '-', policy.lower())}-{seed}.json"
        if options.only_tables and not file.is_file():
            continue
        scan = SHORT_SCAN if options.quick or policy in LARGE else SCAN
        compute = functools.partial(measured, cases[policy], seed, scan)
        record = computed_once(file, compute)
        by_policy.setdefault(policy, []).append(record | {"seed": seed})
        print(f"{policy}, seed {seed}: {time.monotonic() - began:.0f} s so far", flush=True)
    if not by_policy:
        raise ValueError(f"{options.output}: there are no runs yet. Leave out --only-tables.")
    results = adam_report.study_results(by_policy, "python -m benchmarks.studies.adam" + " --quick" * options.quick)
    for name, rows in results["tables"].items():
        report.write_table(options.output / name, rows)
        print(report.markdown(rows))
    adam_report.draw(by_policy, options.output / "adam.png", results)
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
