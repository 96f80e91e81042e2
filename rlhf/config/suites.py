"""Suites of data sets for `rlhf evaluate --suite`: a suite is a config file with `data.eval`.

From a folder (`--suite-dir`) a data set is read as the file or folder that is named like its label, such as
`math500.jsonl`, or like its name at the hub, with or without the owner: `MATH-500`, as `hf download` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from rlhf.config.base import with_home
from rlhf.config.data import FILE_SUFFIXES, SourceConfig
from rlhf.config.load import read_values

CARD = "README.md"  # of a data set at the hub; names its configurations


def suite_values(suite: str, suites: Path, folder: str | None = None, only: str | None = None) -> dict[str, Any]:
    """The config of a suite, as values that `load_config` takes in place of a file.

    Args:
        suite: a name in the folder `suites`, or the path of a YAML file.
        folder: where all data sets are read from; None: from the paths that the suite names.
        only: labels of the data sets to keep, separated by commas; None: all.

    Raises:
        ValueError: no such suite, data set or folder; a data set that the folder lacks.
    """
    file = Path(with_home(suite)) if suite.endswith((".yaml", ".yml")) else suites / f"{suite}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(path.stem for path in suites.glob("*.yaml")))
        raise ValueError(f"--suite {suite}: there is no such suite. Name one ({names}), or a YAML file with data.eval.")
    values = read_values([str(file)], [])
    data = values.get("data")
    written = data.get("eval") if isinstance(data, dict) else None
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in _listed(written)]
    if not entries or not all(isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in entries):
        raise ValueError(f"--suite {suite}: {file} has no data.eval with data sets. List them there, each with a path.")
    by_label = {_label(entry): entry for entry in entries}
    if len(by_label) < len(entries):
        return values  # whose check names the label that two sets have
    if only is not None:
        by_label = _chosen(by_label, [name.strip() for name in only.split(",")])
    if folder is not None:
        by_label = _in_folder(by_label, Path(with_home(folder)))
    return values | {"data": {**values["data"], "eval": list(by_label.values())}}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _label(entry: dict[str, Any]) -> str:
    return SourceConfig.model_construct(path=entry["path"], source=entry.get("source")).label


def _chosen(by_label: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    if unknown := [name for name in names if name not in by_label]:
        raise ValueError(f"--only {','.join(names)}: the suite has no {unknown[0]!r}. It has {', '.join(by_label)}.")
    return {label: entry for label, entry in by_label.items() if label in names}


def _in_folder(by_label: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    if not folder.is_dir():
        raise ValueError(f"--suite-dir {folder}: there is no such folder. Name the one that holds the data sets.")
    local, missing = {}, {}
    for label, entry in by_label.items():
        names = dict.fromkeys((label, entry["path"], PurePath(entry["path"]).name))
        places = [folder / f"{name}{suffix}" for name in names for suffix in ("", *FILE_SUFFIXES)]
        path = next((place for place in places if place.exists()), None)
        if path is None:
            missing[label] = " or ".join(names)
        else:
            card = path / CARD
            has_configurations = card.is_file() and "config_name" in card.read_text(errors="replace")
            local[label] = entry | {"source": label, "path": str(path.absolute())}
            local[label] |= {} if has_configurations else {"name": None}
    if missing:
        absent = "; ".join(f"{label}: no {names}" for label, names in missing.items())
        there = f", or leave them out: --only {','.join(local)}" if local else ""
        raise ValueError(
            f"--suite-dir {folder}: it lacks data sets ({absent}; as a folder or with {', '.join(FILE_SUFFIXES)}). Put "
            f"them there, as `hf download NAME --repo-type dataset --local-dir {folder}/LABEL` does{there}."
        )
    return local
