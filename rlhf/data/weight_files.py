"""The headers of a model's safetensors files: what they hold, and whether they are whole. No weight is read.

A file begins with 8 bytes that give the length of a JSON header, and the header with the place of every tensor after it
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf.config.model_folder import local_model_folder, looks_local

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as in the library safetensors
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GIT_LFS_POINTER = b"version https://git-lfs"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a model consists of; some may be missing.

    Raises:
        ValueError: the index is not readable.
    """
    return [folder / name for name in sorted(set(_index(folder).values()) or {SINGLE})]


def read_header(file: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name: dtype, shape and data_offsets.

    Raises:
        ValueError: it is not a whole safetensors file.
    """
    with file.open("rb") as stream:
        size = file.stat().st_size
        beginning = stream.read(len(GIT_LFS_POINTER))
        if beginning == GIT_LFS_POINTER:
            raise ValueError(f"{file}: not a whole safetensors file but a Git LFS pointer. Run `git lfs pull` there.")
        length = int.from_bytes(beginning[:LENGTH_BYTES], "little")
        stream.seek(LENGTH_BYTES)
        try:
            if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise ValueError("its header would be longer than the file, or than any")
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = LENGTH_BYTES + length + max(map(_end_of, header.values()), default=0)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error}). Download or save it again.") from None
    if end != size:
        raise ValueError(f"{file}: its header describes {end:,} bytes, and it has {size:,}. Download or save it again.")
    return header


def _end_of(tensor: Any) -> int:
    """Where the numbers of a tensor end, counted from the end of the header."""
    match tensor:
        case {"shape": [*_], "data_offsets": [int(), int(end)]}:
            return end
    raise ValueError("a tensor has no shape, or not two data_offsets")


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
        headers = {file.name: read_header(file).keys() for file in files}
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
