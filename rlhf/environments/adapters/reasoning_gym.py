"""A data set of the package reasoning_gym: one question, one answer, and the score of the data set.

A run has new problems in each epoch: epoch e has those of the data set with its seed + e * EPOCH_SEEDS, and evaluation
has those of seed + EVAL_SEED. A problem is made from the sum of seed and index, so nearer seeds would share problems.
After EPOCHS epochs, the seeds begin again, and never reach those of evaluation.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from rlhf.environments.adapters import load_package
from rlhf.processes.apart import ApartError, apart

EPOCH_SEEDS, EVAL_SEED, SEEDS = 2**20, 2**31, 2**32
EPOCHS = EVAL_SEED // EPOCH_SEEDS
SCORE_S = 10.0  # for one answer; some scores evaluate it as an expression
COMPOSITE = "composite"


class ReasoningGym:
    """Plays one-turn rollouts with the problems of a data set.

    Args:
        dataset: its name in the package; `composite` mixes several.
        args: its config, such as {size: 2000, max_animals: 5}, and `system_prompt`: a name of the package's own prompts
            (default: `default`, which asks for an answer in <answer> tags), a text, or None.

    Raises ValueError if the package is missing, or cannot make this data set.
    """

    def __init__(self, dataset: str, args: Mapping[str, Any]) -> None:
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it cannot save its cache of fonts
        self._factory = load_package("reasoning_gym.factory", install="reasoning-gym")
        self._utils = load_package("reasoning_gym.utils", install="reasoning-gym")
        names = self._factory.DATASETS
        if dataset == COMPOSITE:
            load_package("reasoning_gym.composite", install="reasoning-gym")
        if dataset not in names:
            near = difflib.get_close_matches(dataset, names, 1) or [f"one of {', '.join(sorted(names))}"]
            raise ValueError(f"environment.dataset={dataset}: reasoning_gym has no such data set. Use {near[0]}.")
        self._name, self._args = dataset, dict(args)
        prompt = self._args.pop("system_prompt", "default")
        self._system = self._utils.SYSTEM_PROMPTS.get(prompt, prompt)
        self._seed = self._args.pop("seed", None) or 0
        self._check_args()
        self._dataset = lru_cache(2)(self._make)  # of an epoch, and for evaluation
        try:
            made = self._dataset(self._seed)
            made[0]
        except (TypeError, ValueError, AssertionError, KeyError, AttributeError) as error:
            takes = ", ".join(field.name for field in fields(names[dataset][1]))
            raise ValueError(
                f"environment.args={args}: {dataset}: {error or type(error).__name__}. It takes {takes}."
            ) from None
        self.rows = dict.fromkeys(("train", "eval"), len(made))

    def _check_args(self) -> None:
        """Raise ValueError for a seed or size with which two sets of problems would be the same."""
        if not isinstance(self._seed, int):
            raise ValueError(f"environment.args.seed={self._seed!r}: not a whole number. Write one.")
        size = self._args.get("size")
        if isinstance(size, int) and size > EPOCH_SEEDS:
            reason = "later problems would come again in the next epoch"
            raise ValueError(f"environment.args.size={size}: {reason}. Use at most {EPOCH_SEEDS}.")
        parts = self._args.get("datasets") if self._name == COMPOSITE else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, Mapping) and "seed" in (part.get("config") or {}):
                reason = "it would have the same problems in each epoch, and in evaluation"
                raise ValueError(
                    f"environment.args.datasets: {part.get('name')}: config.seed={part['config']['seed']}: {reason}. "
                    "Remove it, or set environment.args.seed."
                )

    def _make(self, seed: int) -> Any:
        args = self._args
        if self._name == COMPOSITE and "datasets" in args:
            spec = load_package("reasoning_gym.composite", install="reasoning-gym").DatasetSpec
            usual = {"weight": 1.0, "config": {}}
            args = {**args, "datasets": [spec(**usual | dict(part)) for part in args["datasets"]]}
        return self._factory.create_dataset(self._name, **args, seed=seed)

    async def play(self, row: Mapping[str, Any], generate: Any) -> dict[str, Any]:
        """Ask the question, and score the answer between the last <answer> tags."""
        shift = EVAL_SEED if row["split"] == "eval" else EPOCH_SEEDS * (row["epoch"] % EPOCHS)
        dataset = self._dataset((self._seed + shift) % SEEDS)
        entry = dataset[row["number"] - 1]
        system = [{"role": "system", "content": self._system}] if self._system else []
        turn = await generate([*system, {"role": "user", "content": entry["question"]}])
        answer = self._utils.extract_answer(turn.get("content") or "")
        result: dict[str, Any] = {"answered": float(answer is not None), "score_failed": 0.0, "answer": entry["answer"]}
        if self._name == COMPOSITE:
            result["dataset"] = entry["metadata"]["source_dataset"]
        if type(dataset).score_answer is self._factory.ProceduralDataset.score_answer:  # it compares texts
            return result | {"score": dataset.score_answer(answer, entry)}
        try:
            score = await apart(lambda: float(dataset.score_answer(answer, entry)), seconds=SCORE_S)
        except ApartError as error:
            return result | {"score": 0.0, "score_failed": 1.0, "score_error": str(error)}
        return result | {"score": score}
