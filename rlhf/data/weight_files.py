"""The headers of a model's safetensors files: what they hold, and whether they are whole. No weight is read."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf.config.model_folder import local_model_folder, looks_local

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a model consists of; some may be missing.

    Raises:
        ValueError: the index is not readable.
    """
    return [folder / name for name in sorted(set(_index(folder).values()) or {SINGLE})]


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a safetensors file by name.

    Raises:
        ValueError: it is not a whole safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as stored:
            return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file}: not a whole safetensors file ({error}). Download or save it again; if it is a Git LFS pointer, "
            "run `git lfs pull` there."
        ) from None


def check_weights(path: str, key: str) -> None:
    """Check the weight files of a model in a folder or in the hub's cache, as far as their headers tell.

    Raises:
        ValueError: a file is missing or not whole, or the index names a tensor that its file does not hold.
    """
    folder = local_model_folder(path)
    try:
        files = weight_files(folder)
        missing = [file.name for file in files if not file.is_file()]
        if missing and (not looks_local(path) or (files == [folder / SINGLE] and any(folder.glob("*.bin")))):
            return  # the hub has them, or they are in another format
        if missing:
            raise ValueError(f"{', '.join(missing)}: no such file. Download or save the model again.")
        headers = {file.name: tensor_shapes(file) for file in files}
        if absent := [f"{name} in {file}" for name, file in _index(folder).items() if name not in headers[file]]:
            more = f" and {len(absent) - 1} more tensors" if len(absent) > 1 else ""
            raise ValueError(f"{INDEX} names {absent[0]}{more}, which is not there. Download or save the model again.")
    except ValueError as error:
        raise ValueError(f"{key}={path}: {error}") from None


def _index(folder: Path) -> dict[str, str]:
    """Tensor -> name of its file; empty without an index."""
    file = folder / INDEX
    if not file.is_file():
        return {}
    try:
        index = {str(tensor): str(name) for tensor, name in json.loads(file.read_text())["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{file}: not an index of weights ({error}). Download or save the model again.") from None
    return index
