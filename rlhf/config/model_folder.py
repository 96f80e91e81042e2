"""Where the files of a model are, in a folder of its own or in the cache of the hub, and which tensors they hold."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from rlhf.config.base import MISSING, file_problem, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
AGAIN = "Download or save it again; if it is a Git LFS pointer, run `git lfs pull` there."


def looks_local(path: str) -> bool:
    """True for a local path, False for the name of a hub repository."""
    return path.startswith(("/", ".")) or Path(path).exists() or path.count("/") > 1


def full_name(path: str) -> str:
    """A name that finds the model from any working directory: its hub name, or the absolute path of its folder."""
    folder = os.path.abspath(path)
    in_cache = re.search(r"/models--([^/]+)/snapshots/", folder)
    return in_cache[1].replace("--", "/", 1) if in_cache else folder if looks_local(path) else path


def local_model_folder(path: str) -> Path:
    """The folder of a local model, or of a model in the hub's cache; it may not exist."""
    if looks_local(path):
        return Path(path)
    from huggingface_hub import constants  # the hub's own look-up would import an HTTP client

    repository = Path(constants.HF_HUB_CACHE) / f"models--{path.replace('/', '--')}"
    reference = repository / "refs" / "main"
    revision = reference.read_text().strip() if reference.is_file() else "main"
    return repository / "snapshots" / revision


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if the file is missing. Raises ValueError if it holds something else."""
    if (problem := file_problem(file)) == MISSING:
        return {}
    content: Any = {}
    try:
        content = {} if problem else json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"it is not JSON ({first_line(error)})"
    if problem or not isinstance(content, dict):
        raise ValueError(f"{file}: {problem or 'it holds no JSON object'}. {AGAIN}")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Some may be missing."""
    return [folder / name for name in sorted(set(weight_index(folder).values()) or {SINGLE})]


def torch_files(folder: Path) -> list[Path]:
    """The torch.save files of a model, some of which may be missing. Empty if it has safetensors, which come first."""
    if any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return []
    if (folder / TORCH_SINGLE).is_file():
        return [folder / TORCH_SINGLE]
    return [folder / name for name in sorted(set(weight_index(folder, TORCH_INDEX).values()))]


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a safetensors file. Raises ValueError if the file is not complete."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as stored:
            return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}). {AGAIN}") from None


def weight_index(folder: Path, name: str = INDEX) -> dict[str, str]:
    """Tensor -> name of its file. Empty without an index."""
    file, index = folder / name, read_json(folder / name)
    if not index:
        return {}
    try:
        return {str(tensor): str(name) for tensor, name in index["weight_map"].items()}
    except (KeyError, AttributeError) as error:
        raise ValueError(f"{file}: not an index of weights ({error}). Download or save the model again.") from None
