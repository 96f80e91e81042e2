"""Distributions that look installed, for tests of what is looked up by name."""

from __future__ import annotations

from pathlib import Path

PLUGIN = "[vllm.general_plugins]\n{}\n"


def seems_installed(folder: Path, name: str, version: str, *, more: str = "", plugin: str = "") -> None:
    """A distribution of this name, for a folder on the path of Python."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")
    if plugin:
        (info / "entry_points.txt").write_text(PLUGIN.format(plugin))
