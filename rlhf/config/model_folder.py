"""Where the files of a model are: in a folder of its own, or in the cache of the hub."""

from __future__ import annotations

from pathlib import Path


def looks_local(path: str) -> bool:
    """Whether a model or data path is local; otherwise it is the name of a hub repository."""
    return path.startswith(("/", ".")) or Path(path).exists() or path.count("/") > 1


def local_model_folder(path: str) -> Path:
    """The folder of a local model, or of a model in the hub's cache; it may not exist."""
    if looks_local(path):
        return Path(path)
    from huggingface_hub import constants  # the hub's own look-up would import an HTTP client

    repository = Path(constants.HF_HUB_CACHE) / f"models--{path.replace('/', '--')}"
    reference = repository / "refs" / "main"
    revision = reference.read_text().strip() if reference.is_file() else "main"
    return repository / "snapshots" / revision
