"""Compares vocabularies: a model that is fed the policy's ids must read the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.config.model_folder import looks_local
from rlhf.config.program import TrainingProgramConfig
from rlhf.data.model_files import TOKENIZER_FILES, load_tokenizer


def check_vocabulary(own: Mapping[int, str], other: Mapping[int, str], key: str) -> None:
    """Raise a ValueError, with the first difference, unless `other` has every token of `own` at the same id."""
    if own.items() <= other.items():
        return
    number = min(number for number, token in own.items() if other.get(number) != token)
    there = repr(other[number]) if number in other else "nothing"
    raise ValueError(
        f"{key}: different vocabulary: token {number} is {there} there and {own[number]!r} in model.path, so it would "
        "read other words than were sampled. Name a model with the same tokenizer."
    )


def check_vocabularies(config: TrainingProgramConfig, tokenizer: Any) -> Iterator[str]:
    """Run `check_vocabulary` on every model that is fed the policy's ids; yields a warning if one has no tokenizer."""
    own = tokens_by_id(tokenizer)
    for key, path in config.fed_models.items():
        if lacks_tokenizer(path):
            yield (
                f"{key}={path}: the model has no tokenizer, so only the size of its vocabulary was compared with that "
                "of model.path. The ids must be the same words: put the tokenizer of its training into the folder to "
                "compare them."
            )
            continue
        other = load_tokenizer(config.model.model_copy(update={"path": path}), key=key)
        check_vocabulary(own, tokens_by_id(other), f"{key}={path}")


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def lacks_tokenizer(path: str) -> bool:
    """True if a local model has no tokenizer file. Files of a hub model may not be fetched yet."""
    patterns = (*TOKENIZER_FILES, "tekken.json")
    return looks_local(path) and not any(any(Path(path).glob(pattern)) for pattern in patterns)
