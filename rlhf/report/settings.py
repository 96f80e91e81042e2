"""Runs of one setting: those whose configs are equal, except for the seed and for names and paths of the run itself.

A page shows them as one line: their mean, and an interval over the seeds as a band.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf.report.run_files import RunFiles
from rlhf.run.evaluation import bootstrap_interval

# `data.date` is filled in when a run starts
OF_ONE_RUN = re.compile(r"run\.(?:seed|dir)|logging\..*|checkpoint\.mirror|data\.date")
FEW = 3  # of so few seeds the lowest alone makes up more than 2.5% of all bootstrap samples (1 of 27)


def settings_of(runs: Sequence[RunFiles]) -> list[list[int]]:
    """The numbers of the runs of each setting, in the order of the first ones. A missing key counts as null."""
    settings: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        kept = {k: v for k, v in run.config.items() if v is not None and not OF_ONE_RUN.fullmatch(k)}
        settings.setdefault(json.dumps(kept, sort_keys=True), []).append(number)
    return list(settings.values())


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that do not have the same value in all configs, without those that belong to a single run."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key for key in keys if not OF_ONE_RUN.fullmatch(key) and len({repr(config.get(key)) for config in configs}) > 1
    ]


class OverSeeds(NamedTuple):
    """[P] each: the mean over the seeds that have a value at a point, and its interval; NaN if no seed has one."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def over_seeds(values: np.ndarray) -> OverSeeds:
    """Mean and 95% bootstrap interval over seeds; for two or three seeds, from the lowest to the highest value.

    Args:
        values: [S, P], of S seeds at P points; NaN where a seed has none.
    """
    found = OverSeeds(*np.full((3, values.shape[1]), np.nan))
    present = ~np.isnan(values)
    for pattern in np.unique(present, axis=1).T:
        points = (present == pattern[:, None]).all(axis=0)
        of_seeds = values[np.ix_(pattern, points)]
        if len(of_seeds):
            few = len(of_seeds) <= FEW
            interval = (of_seeds.min(axis=0), of_seeds.max(axis=0)) if few else bootstrap_interval(of_seeds)
            for column, numbers in zip(found, (of_seeds.mean(axis=0), *interval), strict=True):
                column[points] = numbers
    return found
