"""Shared by all benchmarks: fresh processes, interleaving, peak memory, the machine's description, tables and JSON.

A benchmark is a list of cases. Each case runs in a fresh process, so that its peak memory is its own. The cases are
interleaved (round after round over all of them), so that a slow minute of the machine affects all alike. The table
shows the fastest round of each case, with the largest peak of all its rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path("runs/benchmarks")  # runs/ is not in git
MARK = "BENCHMARK-RESULT "
MIB = 2**20

Case = dict[str, Any]
Row = dict[str, Any]


def parser(doc: str) -> argparse.ArgumentParser:
    options_parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options_parser.add_argument(
        "--quick", action="store_true", help="small sizes, one round: a check that it runs, not a measurement"
    )
    options_parser.add_argument("--output", type=Path, default=RESULTS, help=f"folder of the JSON (default: {RESULTS})")
    options_parser.add_argument("--case", help=argparse.SUPPRESS)
    options_parser.set_defaults(load=os.getloadavg()[0])  # before the benchmark adds its own
    return options_parser


def run_if_case(options: argparse.Namespace, cases: dict[str, Callable[[Case], Row]]) -> None:
    """In a fresh process: run the case that it was started for, and exit."""
    if options.case is None:
        return
    case = json.loads(options.case)
    print(MARK + json.dumps(cases[case["function"]](case)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the case has ended its engines and Ray; exit hooks of libraries would only delay the next case


def fresh(module: str, case: Case, *, timeout_s: float = 1800.0, environment: dict[str, str] | None = None) -> Row:
    """The result of a case in a process of its own."""
    command = [sys.executable, "-m", module, "--case", json.dumps(case)]
    started = time.perf_counter()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"{module} {case} failed ({done.returncode}):\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    row: Row = json.loads(lines[-1].removeprefix(MARK))
    return row | {"process_seconds": time.perf_counter() - started}


def interleaved(module: str, cases: Sequence[Case], rounds: int, **options: Any) -> list[Row]:
    """Run each case `rounds` times, in turn; -> the row with the least `seconds`, with the largest `peak_mib`."""
    rounds_of_cases: list[list[Row]] = [[] for _ in cases]
    for _ in range(rounds):
        for rows, case in zip(rounds_of_cases, cases, strict=True):
            rows.append(fresh(module, case, **options))
    merged = []
    for rows in rounds_of_cases:
        row = dict(min(rows, key=lambda r: float(r["seconds"])))
        row |= {"peak_mib": max(r["peak_mib"] for r in rows)} if "peak_mib" in row else {}
        merged.append(row)
    return merged


class Peak:
    """Largest memory of this process while the context is open, over what it had before, MiB."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.mib = 0.0

    def __enter__(self) -> Peak:
        if self.device == "cuda":
            import torch

            synchronize(self.device)
            torch.cuda.reset_peak_memory_stats()
            self._before = float(torch.cuda.memory_allocated())
        else:
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory; the context would take it again unseen
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self._before = status_kib("VmRSS") * 1024.0
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            import torch

            synchronize(self.device)
            self.mib = (torch.cuda.max_memory_allocated() - self._before) / MIB
        else:
            self.mib = (status_kib("VmHWM") * 1024.0 - self._before) / MIB


def status_kib(key: str, pid: int | str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def synchronize(device: str) -> None:
    """Wait until the GPU has finished its work, so that the clock can be read."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def available_mib() -> float:
    return float(psutil.virtual_memory().available) / MIB


def machine(device: str) -> dict[str, Any]:
    """The machine on which the numbers were measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()

    def first(key: str) -> str | None:
        return next((line.split(":")[1].strip() for line in lines if line.startswith(key)), None)

    flags = set((first("flags") or "").split())
    matrix = "AMX" if "amx_bf16" in flags else "AVX-512 BF16, no AMX" if "avx512_bf16" in flags else "no bf16 products"
    parts = [first("model name") or platform.machine(), f"{os.cpu_count()} cores"]
    mhz = first("cpu MHz")  # only x86 says it
    parts += [f"{float(mhz) / 1000:.1f} GHz", matrix] if mhz else []
    description = {"cpu": ", ".join(parts), "python": platform.python_version()}
    return description | ({"gpu": gpu_names()} if device == "cuda" else {})


def gpu_names() -> str:
    """By nvidia-smi: torch is imported in the fresh processes alone."""
    if shutil.which("nvidia-smi") is None:
        return "GPU of unknown name"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    names = [name.strip() for name in listed if name.strip()]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "GPU of unknown name"


def place(result: Mapping[str, Any]) -> str:
    """The machine of a written result, its load before the benchmark, and whether it was a quick run."""
    here = result["machine"]
    gpu = f"{here['gpu']}; " if "gpu" in here else ""
    return f"{gpu}{here['cpu']}, load {here['load']:.1f}{', quick' if result['quick'] else ''}"


def report(
    name: str,
    title: str,
    rows: Iterable[Row],
    options: argparse.Namespace,
    notes: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the rows as JSON with the machine they were measured on, and print them as a table.

    Args:
        more: keys of the JSON that are not printed.
    """
    rows = list(rows)
    here = machine(options.device) | {"load": options.load}
    result = {"title": title, "machine": here, "quick": options.quick, "rows": rows, "notes": list(notes)}
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{name}.json"
    file.write_text(json.dumps(result | dict(more or {}), indent=1))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=f"{title}\n{place(result)}")
    for row in rows:
        table.add_row(*(shown(row.get(column, "")) for column in columns))
    console = Console(soft_wrap=True, width=180)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    console.print(f"written: {file}", highlight=False)


def not_measured(name: str, title: str, why: str, options: argparse.Namespace) -> int:
    """Report why nothing was measured; exit status 0, so that other benchmarks continue."""
    report(name, title, [{"not measured": why}], options)
    return 0


def shown(value: Any) -> str:
    """A value for a table; numbers have four digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the processes that are still alive."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def tree(pid: int) -> dict[int, str]:
    """This process and all below it: pid -> command line."""
    root = psutil.Process(pid)
    commands = {}
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            commands[process.pid] = " ".join(process.cmdline())
    return commands
