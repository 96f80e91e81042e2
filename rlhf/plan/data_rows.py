"""How many prompts an epoch has: rows are counted, not read. Rows that a run leaves out later are counted too."""

from __future__ import annotations

from rlhf.config.data import DataConfig
from rlhf.data.read import count_rows, rows_per_epoch


def prompts_per_epoch(config: DataConfig) -> int | str:
    """Rows of data.train in an epoch; a sentence if they cannot be counted here."""
    rows: dict[str, range] = {}
    for source in config.train:
        try:
            counted = count_rows(source)
        except (OSError, ValueError) as error:
            return f"not counted: {source.path}: {error}"
        if counted is None:
            return f"not counted: {source.path} is no local file"
        rows[source.label] = range(counted)
    return sum(rows_per_epoch(config.train, rows).values())
