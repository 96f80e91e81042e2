"""Groups runs by setting: their configs are equal, except for the seed and for names and paths of a single run.

A page shows the runs of a setting as one line: their mean, with an interval over the seeds as a band.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf.report.run_files import RunFiles
from rlhf.run.evaluation import bootstrap_interval

# keys that belong to a single run; `data.date` is filled in when a run starts
RUN_KEYS = re.compile(r"run\.(?:seed|dir)|logging\..*|checkpoint\.mirror|data\.date")
FEW = 3  # seeds; with three, 1 of 27 bootstrap samples has the lowest seed alone, which is more than 2.5%


def settings_of(runs: Sequence[RunFiles]) -> list[list[int]]:
    """The indices of the runs of each setting, in order of the first run. A missing key counts as null."""
    settings: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        kept = {k: v for k, v in run.config.items() if v is not None and not RUN_KEYS.fullmatch(k)}
        settings.setdefault(json.dumps(kept, sort_keys=True), []).append(number)
    return list(settings.values())


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values differ between the configs, without keys that belong to a single run."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key for key in keys if not RUN_KEYS.fullmatch(key) and len({repr(config.get(key)) for config in configs}) > 1
    ]


def over_seeds(values: np.ndarray) -> np.ndarray:
    """Mean over seeds and its 95% bootstrap interval; for two or three seeds, from the lowest to the highest value.

    Args:
        values: [S, P], of S seeds at P points; NaN where a seed has no value.

    Returns:
        [3, P]: mean, low, high; NaN where no seed has a value.
    """
    result = np.full((3, values.shape[1]), np.nan)
    present = ~np.isnan(values)
    for pattern in np.unique(present, axis=1).T:
        points = (present == pattern[:, None]).all(axis=0)
        seeds = values[np.ix_(pattern, points)]
        if len(seeds):
            interval = (seeds.min(axis=0), seeds.max(axis=0)) if len(seeds) <= FEW else bootstrap_interval(seeds)
            result[:, points] = seeds.mean(axis=0), *interval
    return result
