"""The order of training prompts: seeded, equal on every machine, resumable from one number.

    epoch 0: permutation(seed, 0) | epoch 1: permutation(seed, 1) | ...
             0 1 2 ... E-1        | E E+1 ...                     |      `drawn` counts along this line

The position is `drawn` alone, so any earlier state can be restored; a curriculum adds its own. Permutations come from
raw PCG64 output, which numpy promises never to change; it does not promise this for its shuffles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from rlhf.config.data import CurriculumConfig
from rlhf.data.curriculum import Curriculum
from rlhf.types import Prompt


class PromptStream:
    """An endless stream of prompts: each epoch is a new permutation of all prompts, or of `rows_per_epoch` per source.

    Args:
        prompts: by source; the order of the mapping does not matter.
        rows_per_epoch: prompts per epoch of each source, drawn anew each epoch; by default all.
        seed: at least 0.
        curriculum: draws some prompts less and others again; `Prompt.epoch` is then how often that prompt came before.
    """

    def __init__(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        *,
        seed: int,
        rows_per_epoch: Mapping[str, int] | None = None,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        self._prompts = {source: prompts[source] for source in sorted(prompts)}
        self._rows_per_epoch = {source: (rows_per_epoch or {}).get(source, len(prompts[source])) for source in prompts}
        self._flat = [prompt for source in self._prompts.values() for prompt in source]
        self._seed = seed
        self.drawn = 0  # prompts taken since the run began
        self._order_epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        assert self._flat, "a stream needs at least one prompt"
        assert all(0 < rows <= len(prompts[source]) for source, rows in self._rows_per_epoch.items())
        self._spans: dict[str, range] = {}
        for source, rows in self._prompts.items():
            first = sum(map(len, self._spans.values()))
            self._spans[source] = range(first, first + len(rows))
        self.curriculum: Curriculum | None = None
        if curriculum is not None:
            self.curriculum = Curriculum(curriculum, rows=len(self._flat), epoch_size=self.epoch_size, seed=seed)

    @property
    def epoch_size(self) -> int:
        """Prompts in one epoch."""
        return sum(self._rows_per_epoch.values())

    @property
    def epochs(self) -> float:
        """Passes over the data since the run began."""
        return self.drawn / self.epoch_size

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across epochs; each carries the number of its epoch."""
        taken = []
        for position in range(self.drawn, self.drawn + count):
            epoch, index = divmod(position, self.epoch_size)
            row = int(self._epoch_order(epoch)[index])
            if self.curriculum is not None:
                row, epoch = self.curriculum.choose(position, row, self._spans[self._flat[row].source])
            taken.append(replace(self._flat[row], epoch=epoch))
        self.drawn += count
        return taken

    def state(self, outstanding: Collection[int] = ()) -> dict[str, Any]:
        """JSON values from which `restore` continues, or draws the `outstanding` positions as they were."""
        chosen = {} if self.curriculum is None else {"curriculum": self.curriculum.state(outstanding)}
        return chosen | {"drawn": self.drawn, "seed": self._seed, "sources": self._sources}

    @property
    def _sources(self) -> dict[str, dict[str, Any]]:
        return {
            source: {
                "rows": len(prompts),
                "rows_per_epoch": self._rows_per_epoch[source],
                "fingerprint": self._fingerprints[source],
            }
            for source, prompts in self._prompts.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. ValueError if the prompts, the mix or the seed are not the same."""
        if state["seed"] != self._seed:
            raise ValueError(
                f"run.seed={self._seed}: the run was started with {state['seed']}, and the seed sets the order of the "
                f"data. Resume with run.seed={state['seed']}, or start a new run."
            )
        saved, present = state["sources"], self._sources
        for source in sorted({*saved, *present}):
            before, now = saved.get(source, "absent"), present.get(source, "absent")
            if before != now:
                raise ValueError(
                    f"data.train: source {source} was {before} when the run was saved and is {now} now. Resume with "
                    "the same rows, template, tokenizer and settings of `data`, or start a new run from the "
                    "checkpoint's model."
                )
        self.drawn = state["drawn"]
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.restore(state["curriculum"])

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """A digest of each source's ids, prompt tokens, answers and other columns, in order."""
        fingerprints = {}
        for source, prompts in self._prompts.items():
            digest = hashlib.blake2b(digest_size=8)
            for prompt in prompts:
                digest.update(f"{prompt.id}\n{prompt.answer}\n".encode())
                digest.update(prompt.token_ids.tobytes())
                digest.update(repr(prompt.columns).encode())
            fingerprints[source] = digest.hexdigest()
        return fingerprints

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """[epoch_size] indices into all prompts, in the order of the epoch."""
        if self._order_epoch != epoch:
            bits = np.random.PCG64([self._seed, epoch])
            drawn_rows = [
                rows.start + _permutation(bits, len(rows))[: self._rows_per_epoch[source]]
                for source, rows in self._spans.items()
            ]
            all_rows = np.concatenate(drawn_rows)
            self._order = all_rows[_permutation(bits, len(all_rows))]
            self._order_epoch = epoch
        return self._order


def _permutation(bits: np.random.PCG64, size: int) -> np.ndarray:
    return np.argsort(bits.random_raw(size), kind="stable")
