"""Checks whether the hub answers, because its own client would try for minutes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rlhf.log.reachable import no_answer


def hub_problems(models: Mapping[str, str], data: Mapping[str, str]) -> list[str]:
    """A message for each model and data set that only the hub has, if the hub does not answer.

    Args:
        models, data: config key -> name on the hub.
    """
    places = [("folder", "model", "", models), ("file", "dataset", " --repo-type dataset", data)]
    missing = [
        (key, name, local, flag)
        for local, kind, flag, named in places
        for key, name in named.items()
        if not _in_cache(name, kind)
    ]
    if not missing or not (reason := _hub_silence()):
        return []
    return [
        f"{key}={name}: there is no such {local}, the cache of this machine does not have it, and the hub cannot be "
        f"asked ({reason}). Name a local {local}, or fetch it where the hub answers: hf download {name}{flag}"
        for key, name, local, flag in missing
    ]


def _in_cache(name: str, kind: str) -> bool:
    """Whether any part of the model or data set is in the cache of the hub's client, or of `datasets`."""
    from huggingface_hub import constants

    folders = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"]
    if kind == "dataset":
        cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition("/")[2]).lower()  # as `datasets` names it
        folders.append(cache / "___".join([*name.split("/")[:-1], snake]))
    return any(folder.is_dir() for folder in folders)


def _hub_silence() -> str:
    """Why the hub cannot be asked; "" if it answers, with any status."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    reason = no_answer(constants.ENDPOINT)
    return reason and f"{constants.ENDPOINT}: {reason}"
