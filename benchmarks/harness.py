"""What the benchmarks share: fresh processes, interleaving, peak memory, the machine by name, tables and JSON.

A benchmark is a list of cases. Each case runs in a fresh process, so that its peak memory is its own, and the cases are
interleaved: round after round over all of them, so that a slow minute of the machine hits each of them alike. Of k
rounds the fastest time and the largest peak are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path("runs/benchmarks")  # runs/ is not in git
MARK = "BENCHMARK-RESULT "
MIB = 2**20

Case = dict[str, Any]
Row = dict[str, Any]


def parser(doc: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--quick", action="store_true", help="small sizes, one round: shows that it runs, not how fast")
    made.add_argument("--output", type=Path, default=RESULTS, help=f"folder of the JSON (default: {RESULTS})")
    made.add_argument("--case", help=argparse.SUPPRESS)
    return made


def run_if_case(options: argparse.Namespace, cases: dict[str, Callable[[Case], Row]]) -> None:
    """In a fresh process: run the one case that it was started for, and end."""
    if options.case is None:
        return
    case = json.loads(options.case)
    print(MARK + json.dumps(cases[case["function"]](case)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # what a case started (engines, Ray) it has ended; no library's exit hook may delay the next case


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
    """Each case `rounds` times, in turn: fastest `seconds`, largest `peak_mib`, the rest from the last round."""
    found: list[list[Row]] = [[] for _ in cases]
    for _ in range(rounds):
        for rows, case in zip(found, cases, strict=True):
            rows.append(fresh(module, case, **options))
    merged = []
    for rows in found:
        row = dict(rows[-1])
        row |= {"seconds": min(r["seconds"] for r in rows)} if "seconds" in row else {}
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

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = float(torch.cuda.memory_allocated())
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self._before = status_kib("VmRSS") * 1024.0
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
            self.mib = (torch.cuda.max_memory_allocated() - self._before) / MIB
        else:
            self.mib = (status_kib("VmHWM") * 1024.0 - self._before) / MIB


def status_kib(key: str, pid: int | str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def available_mib() -> float:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) / 1024


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()

    def first(key: str) -> str:
        return next((line.split(":")[1].strip() for line in lines if line.startswith(key)), "?")

    flags = set(first("flags").split())
    matrix = "AMX" if "amx_bf16" in flags else "AVX-512 BF16, no AMX" if "avx512_bf16" in flags else "no bf16 products"
    found = {
        "cpu": f"{first('model name')}, {os.cpu_count()} cores, {float(first('cpu MHz')) / 1000:.1f} GHz, {matrix}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        found["gpu"] = sys.modules["torch"].cuda.get_device_name()
    return found


def report(name: str, title: str, rows: Iterable[Row], options: argparse.Namespace, notes: Sequence[str] = ()) -> None:
    """Print the rows as a table and write them as JSON with the machine they were measured on."""
    rows = list(rows)
    here = machine()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    quick = ", quick" if options.quick else ""
    table = Table(*columns, title=f"{title}\n{here['cpu']}, load {here['load']:.1f}{quick}")
    for row in rows:
        table.add_row(*(shown(row.get(column, "")) for column in columns))
    console = Console(soft_wrap=True, width=180)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{name}.json"
    result = {"title": title, "machine": here, "quick": options.quick, "rows": rows, "notes": list(notes)}
    file.write_text(json.dumps(result, indent=1))
    console.print(f"written: {file}", highlight=False)


def shown(value: Any) -> str:
    """A value for a table: four digits of a number."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time that processes have taken, of those that still live."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> dict[int, str]:
    """This process and all below it: pid -> command line."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found, frontier = {pid: commands.get(pid, "")}, {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= {child: commands[child] for child in frontier}
    return found
