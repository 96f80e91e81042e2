"""Pins every package of the environment for GPUs: resolves them with uv and writes tools/gpu-constraints.txt.

    python tools/gpu_constraints.py             resolve anew for each Python, and write the file
    python tools/gpu_constraints.py --check     exit status 1 unless the file resolves, and pins exactly what it gives

The file holds names and versions alone, for Linux on x86-64. Where the packages come from is for pip's settings to say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tools/gpu-constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")  # as in pyproject.toml
EXTRAS = ("gpu", "dev", "bench")
PLATFORM = "x86_64-unknown-linux-gnu"
PIN = re.compile(r"([\w.-]+)==([\w.+!-]+)(?: ; (.+))?")
RESOLVED_WITHIN_S = 120

Pins = dict[str, str]  # package -> version


def resolve(python: str, constraints: Path | None = None) -> Pins:
    """The packages that uv chooses for a Python version.

    Raises:
        RuntimeError: they do not resolve, or no registry answers; with uv's message.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", str(ROOT / "pyproject.toml"), "--quiet", "--no-header"]
    command += ["--no-annotate", "--python-platform", PLATFORM, "--python-version", python]
    command += [argument for extra in EXTRAS for argument in ("--extra", extra)]
    command += [] if constraints is None else ["--constraint", str(constraints)]
    run = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=RESOLVED_WITHIN_S, check=False
    )
    if run.returncode:
        raise RuntimeError(f"Python {python}: uv cannot resolve the packages.\n{run.stderr}")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", run.stdout, re.MULTILINE))


def environment() -> dict[str, str]:
    """The environment, with pip's index also for uv."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    index = re.search(r"^\S*\.index-url='(.+)'", settings, re.MULTILINE)
    return {**({"UV_DEFAULT_INDEX": index[1]} if index else {}), **os.environ}


def lines_of(pins: Mapping[str, Pins]) -> list[str]:
    """`name==version` for each package, with a marker where Python versions differ.

    Args:
        pins: by Python version.
    """
    lines = []
    for name in sorted({name for chosen in pins.values() for name in chosen}):
        versions = {python: chosen[name] for python, chosen in pins.items() if name in chosen}
        for version in dict.fromkeys(versions.values()):
            pythons = [python for python in versions if versions[python] == version]
            marker = " or ".join(f'python_version == "{python}"' for python in pythons)
            lines.append(f"{name}=={version}" + ("" if len(pythons) == len(pins) else f" ; {marker}"))
    return lines


def read_pins(lines: Sequence[str]) -> dict[str, Pins]:
    """The pins of each Python version; raises ValueError for a line that is no pin."""
    pins: dict[str, Pins] = {python: {} for python in PYTHONS}
    for line in lines:
        if line.startswith("#") or not line:
            continue
        if (pin := PIN.fullmatch(line)) is None:
            raise ValueError(f"{FILE.name}: {line!r} is not NAME==VERSION. Run tools/gpu_constraints.py.")
        name, version, marker = pin.groups()
        for python in PYTHONS:
            if marker is None or f'"{python}"' in marker:
                pins[python][name] = version
    return pins


def problems(pins: Mapping[str, Pins], resolved: Mapping[str, Pins]) -> list[str]:
    """One line for each package that the file leaves open, or pins in vain."""
    found = []
    for python, chosen in resolved.items():
        found += [f"Python {python}: {name} {chosen[name]} is not pinned" for name in chosen.keys() - pins[python]]
        found += [f"Python {python}: {name} is pinned, but not needed" for name in pins[python].keys() - chosen]
    return sorted(found)


def resolve_all(constraints: Path | None = None) -> dict[str, Pins]:
    """The packages by Python version, resolved side by side."""
    with ThreadPoolExecutor() as pool:
        chosen = pool.map(lambda python: resolve(python, constraints), PYTHONS)
        return dict(zip(PYTHONS, chosen, strict=True))


def main() -> None:
    if "--check" in sys.argv[1:]:
        if found := problems(read_pins(FILE.read_text().splitlines()), resolve_all(FILE)):
            sys.exit("\n".join(found) + f"\n{FILE.name} is out of date: run tools/gpu_constraints.py.")
        print(f"{FILE.name}: every package of Python {', '.join(PYTHONS)} is pinned")
        return
    head = "# Every package of the environment for GPUs; made by tools/gpu_constraints.py, which also checks it."
    FILE.write_text("\n".join([head, *lines_of(resolve_all())]) + "\n")


if __name__ == "__main__":
    main()
