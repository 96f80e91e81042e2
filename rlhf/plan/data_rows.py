"""How many prompts an epoch has: rows are counted, not read. Rows that a run leaves out later are still among them."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf.config.data import DataConfig, SourceConfig
from rlhf.data.read import local_path, rows_per_epoch


def prompts_per_epoch(config: DataConfig) -> int | str:
    """Rows of data.train in an epoch; a sentence if they cannot be counted here."""
    rows: dict[str, range] = {}
    for source in config.train:
        try:
            counted = _count_rows(source)
        except (OSError, ValueError) as error:
            return f"not counted: {source.path}: {error}"
        if counted is None:
            return f"not counted: {source.path} is no local file"
        rows[source.label] = range(counted)
    return sum(rows_per_epoch(config.train, rows).values())


def _count_rows(source: SourceConfig) -> int | None:
    """None for a folder or a data set of the hub."""
    path = local_path(source)
    if path is None or path.is_dir():
        return None
    if path.suffix == ".parquet":
        from pyarrow import parquet  # its errors are ValueError or OSError

        return int(parquet.ParquetFile(path).metadata.num_rows)
    if path.suffix == ".json" and (content := path.read_text().lstrip()).startswith("["):
        return len(json.loads(content))
    return _lines(path)


def _lines(path: Path) -> int:
    """Lines that are not blank."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
