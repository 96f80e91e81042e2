"""The curriculum: draws prompts less often if the policy nearly always or never solves them.

The order of the data proposes a row for each position of the stream. With r, the pass rate of its last group, it is
kept with a probability of 4 r (1 - r): 1 for a rate of a half, 0 outside of the bounds, but at least KEPT_FRACTION, so
that its rate is measured again. Else another row of its source is drawn in its place, each in proportion to its own
4 r (1 - r). Shares by source stay as they are. A choice depends on the seed, the position and the rates alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rlhf.config.data import CurriculumConfig

KEPT_FRACTION = 0.25  # smallest probability of keeping a proposed row
DRAWS_PER_EPOCH = 8  # most replacements by one row; few useful rows must not fill a step
CHOICE_SEED = 1  # tells the generators of choices from those of the orders of epochs


class Curriculum:
    """Chooses the row of each position, and keeps the recent pass rates from which it chooses.

    Args:
        rows: of all sources together. epoch_size: positions in an epoch.
        seed: of the stream.
    """

    def __init__(self, config: CurriculumConfig, *, rows: int, epoch_size: int, seed: int) -> None:
        self._config, self._epoch_size, self._seed = config, epoch_size, seed
        self._rates = np.full(rows, np.nan)  # pass rate of the last group; NaN: no group yet
        self._measured = np.full(rows, -1)  # position of that group
        self._last = np.full(rows, -epoch_size)  # position of the last draw
        self._times = np.zeros(rows, np.int64)  # number of draws
        self._chosen: dict[int, tuple[int, int]] = {}  # position -> row, and how often it was drawn before
        self._replaced = 0

    def choose(self, position: int, row: int, source: range) -> tuple[int, int]:
        """The row that is drawn in place of `row`, one of its `source`, and how often it was drawn before."""
        if position not in self._chosen:  # else a resumed run repeats it
            if position >= self._config.warmup_epochs * self._epoch_size:
                row = self._kept_or_replaced(position, row, source)
            self._chosen[position] = row, int(self._times[row])
            self._times[row] += 1
            self._last[row] = position
        return self._chosen[position]

    def _kept_or_replaced(self, position: int, row: int, source: range) -> int:
        kept, pick = np.random.default_rng([self._seed, position, CHOICE_SEED]).random(2)
        if kept < max(KEPT_FRACTION, self._usefulness(slice(row, row + 1))[0]):
            return row
        rows, gap = slice(source.start, source.stop), self._epoch_size // DRAWS_PER_EPOCH
        weights = np.where(self._last[rows] < position - gap, self._usefulness(rows), 0.0)
        weights[row - source.start] = 0.0
        upper = weights.cumsum()
        if not upper[-1]:
            return row
        self._replaced += 1
        return source.start + int(np.searchsorted(upper, pick * upper[-1], side="right"))

    def record(self, position: int, pass_rate: float) -> None:
        """Store the pass rate of the group that was drawn at a position."""
        row, _ = self._chosen[position]
        if position >= self._measured[row]:  # groups end in any order
            self._rates[row], self._measured[row] = pass_rate, position

    def _usefulness(self, rows: slice) -> np.ndarray:
        """Usefulness of each row from 0 to 1: how far the responses of its next group may differ; 1 without a group."""
        rates = self._rates[rows]
        outside = (rates <= self._config.min_pass_rate) | (rates >= self._config.max_pass_rate)
        return np.where(outside, 0.0, np.where(np.isnan(rates), 1.0, 4 * rates * (1 - rates)))

    def metrics(self) -> dict[str, float]:
        """Fractions of prompts with a pass rate at or beyond each bound, and the number of replaced draws."""
        measured = int(np.count_nonzero(self._measured >= 0)) or 1
        return {
            "data/curriculum/too_hard_fraction": np.count_nonzero(self._rates <= self._config.min_pass_rate) / measured,
            "data/curriculum/too_easy_fraction": np.count_nonzero(self._rates >= self._config.max_pass_rate) / measured,
            "data/curriculum/replaced": self._replaced,
        }

    def state(self, outstanding: Collection[int]) -> dict[str, Any]:
        """JSON values for `restore`. Only choices at the `outstanding` positions are kept."""
        self._chosen = {position: self._chosen[position] for position in outstanding if position in self._chosen}
        drawn = np.flatnonzero(self._times)
        columns = (drawn, self._times[drawn], self._last[drawn], self._measured[drawn])
        rates = [None if np.isnan(rate) else float(rate) for rate in self._rates[drawn]]
        return {
            "rows": [*(column.tolist() for column in columns), rates],
            "chosen": [[position, *chosen] for position, chosen in self._chosen.items()],
            "replaced": self._replaced,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`."""
        drawn, *columns, rates = state["rows"]
        for kept, column in zip((self._times, self._last, self._measured), columns, strict=True):
            kept[drawn] = column
        self._rates[drawn] = [np.nan if rate is None else rate for rate in rates]
        self._chosen = {position: (row, times) for position, row, times in state["chosen"]}
        self._replaced = state["replaced"]
