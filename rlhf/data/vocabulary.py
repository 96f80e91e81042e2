"""Which token each id is, by a tokenizer's files: a model that is fed the policy's ids must read the same tokens."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.config.model_folder import local_model_folder, looks_local, read_json
from rlhf.config.program import TrainingProgramConfig
from rlhf.data.model_files import TOKENIZER_FILES, load_tokenizer

FAST, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def check_vocabulary(own: Mapping[int, str], other: Mapping[int, str], key: str) -> None:
    """Raise a ValueError, with the first difference, unless another vocabulary has every token of our own at its id."""
    if own.items() <= other.items():
        return
    number = min(number for number, token in own.items() if other.get(number) != token)
    there = repr(other[number]) if number in other else "nothing"
    raise ValueError(
        f"{key}: different vocabulary: token {number} is {there} there and {own[number]!r} in model.path, so it would "
        "read other words than were sampled. Name a model with the same tokenizer."
    )


def check_stored_vocabulary(own: str, other: str, key: str) -> bool:
    """`check_vocabulary` of two models by their tokenizer.json; whether the files are there to tell."""
    folders = local_model_folder(own), local_model_folder(other)
    if not all((folder / FAST).is_file() for folder in folders):
        return False
    if not all(_same(*(folder / name for folder in folders)) for name in (FAST, SETTINGS)):
        check_vocabulary(stored_vocabulary(folders[0]), stored_vocabulary(folders[1]), key)
    return True


def check_vocabularies(config: TrainingProgramConfig, tokenizer: Any) -> Iterator[str]:
    """`check_vocabulary` of all models that are fed the policy's ids; -> warnings of those that have no tokenizer.

    A tokenizer of another form than tokenizer.json, or one that is on the hub, is loaded with transformers.
    """
    for key, path in config.fed_models.items():
        if check_stored_vocabulary(config.model.path, path, f"{key}={path}"):
            continue
        if lacks_tokenizer(path):
            yield (
                f"{key}={path}: no tokenizer in it, so only the size of its vocabulary was compared with that of "
                "model.path. Its ids must be the same words: put the tokenizer of its training there to compare them."
            )
            continue
        other = load_tokenizer(config.model.model_copy(update={"path": path}), key=key)
        check_vocabulary(_by_id(tokenizer.get_vocab()), _by_id(other.get_vocab()), f"{key}={path}")


def lacks_tokenizer(path: str) -> bool:
    """Whether a local model has no file of a tokenizer; the hub may have some that are not fetched yet."""
    patterns = (*TOKENIZER_FILES, "tekken.json")
    return looks_local(path) and not any(any(Path(path).glob(pattern)) for pattern in patterns)


def _same(one: Path, other: Path) -> bool:
    if one.is_file() and other.is_file():
        return filecmp.cmp(one, other, shallow=False)
    return one.is_file() == other.is_file()


def stored_vocabulary(folder: Path) -> dict[int, str]:
    """The tokens of a tokenizer.json by id, with those that tokenizer_config.json adds."""
    stored = read_json(folder / FAST)
    try:
        vocabulary = stored["model"]["vocab"]
        tokens = _by_id(vocabulary) if isinstance(vocabulary, dict) else dict(enumerate(each[0] for each in vocabulary))
        tokens |= {each["id"]: each["content"] for each in stored.get("added_tokens") or []}
        added = read_json(folder / SETTINGS).get("added_tokens_decoder") or {}
        tokens |= {int(number): token["content"] for number, token in added.items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / FAST}: not a tokenizer of Hugging Face ({error!r}). Download or save the model again."
        ) from None
    return tokens


def _by_id(vocabulary: Mapping[str, int]) -> dict[int, str]:
    return {number: token for token, number in vocabulary.items()}
