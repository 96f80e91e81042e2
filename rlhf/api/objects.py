"""Python objects -> the values of a config: names of functions and classes, files of rows and models."""

from __future__ import annotations

import contextlib
import datetime
import enum
import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.api.names import name_object, shown
from rlhf.config.base import error_text
from rlhf.config.data import SourceConfig
from rlhf.config.model_folder import looks_local
from rlhf.data.read import check_without_images, table_row
from rlhf.processes.objects import get, kept, put
from rlhf.run.checkpoint_files import PARTIAL

IN_THE_DRIVER = ("algo.advantage", "run.callbacks")  # keys whose objects no other process needs
SAME = "Give the same, or start another run.dir."
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.jinja")


class GivenObjects:
    """The objects of one config.

    Args:
        folder: names the folder for rows and models, when it is needed.
        resume: rows of training and a model that are there already are those of the run; others are refused.
    """

    def __init__(self, folder: Callable[[], Path], *, resume: bool = False) -> None:
        self._folder, self._names, self._resume = folder, set[str](), resume
        self._files: dict[Path, Callable[[], None]] = {}  # each call writes one

    def write(self) -> None:
        """Write rows and models, once the config that names them is valid. ValueError if one cannot be written."""
        for write in self._files.values():
            write()

    def of_config(self, config: Any) -> dict[str, Any]:
        """The values of a config, in which names stand for its own objects, also if others took these names since."""
        others = {}
        for name, given in kept(config).items():
            if name in self._names and get(name).value is not given.value:
                others[name] = given.value
            else:
                put(name, given)
                self._names.add(name)

        def renamed(value: Any, key: str) -> Any:
            match value:
                case dict():
                    return {name: renamed(each, f"{key}.{name}".lstrip(".")) for name, each in value.items()}
                case list():
                    return [renamed(each, key) for each in value]
                case str() if value in others:
                    return self.as_value(others[value], key)
            return value

        return dict(renamed(config.model_dump(mode="json"), ""))

    def as_value(self, value: Any, key: str) -> Any:
        """A value of a config with names in place of objects. ValueError for an object that cannot be there."""
        match value:
            case enum.Enum():
                return self.as_value(value.value, key)
            case None | bool() | int() | float() | str():
                return value
            case os.PathLike():
                return os.fspath(value)
            case datetime.date():
                return value.isoformat()
            case Mapping():
                return {str(name): self.as_value(each, f"{key}.{name}".lstrip(".")) for name, each in value.items()}
            case list() | tuple():
                return [self.as_value(each, f"{key}.{number}") for number, each in enumerate(value)]
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy or torch
            return value.item()
        in_driver = key.startswith(IN_THE_DRIVER)
        if callable(value) or (in_driver and not isinstance(value, set | frozenset)):
            return name_object(value, key, names=self._names, is_sent=not in_driver)
        raise ValueError(
            f"{key}={shown(value)}: a config holds text, numbers, true, false, lists and mappings, and "
            "functions and classes where the key names code. Give one of these."
        )

    def data(self, value: Any, key: str, name: str) -> Any:
        """The value of data.train or data.eval.

        Args:
            value: a path or hub name, a mapping with `path`, a list of these; or rows: dicts, in a list, a
                `datasets.Dataset` or another iterable; or several sets of rows by their names.
            name: of the file of rows, and so of the data set in metrics.
        """
        if value is None or isinstance(value, str | os.PathLike):
            return self.as_value(value, key)
        if isinstance(value, Mapping):
            if type(value).__name__ in ("DatasetDict", "IterableDatasetDict") and key == "data.train":
                splits = ", ".join(map(str, value))
                raise ValueError(f"{key}: a {type(value).__name__} of {splits}. Give the split to train on: data[...].")
            if "path" in value:
                return self.as_value(value, key)
            if not value or not all(_are_rows(rows) for rows in value.values()):
                raise ValueError(f"{key}={_short(value)}: neither a `path` nor data sets of rows by name. Give one.")
            return [self._rows(rows, f"{key}.{label}", str(label)) for label, rows in value.items()]
        if isinstance(value, list | tuple) and value and all(map(_is_source, value)):
            return self.as_value(value, key)
        if hasattr(value, "to_dict") and hasattr(value, "itertuples"):
            raise ValueError(f'{key}={shown(value)}: its rows are no dicts. Give its .to_dict("records").')
        if not _are_rows(value):
            raise ValueError(
                f"{key}={shown(value)}: not data. Give a path, a hub name, or rows: a list of dicts, a Dataset "
                "or another iterable of dicts."
            )
        return self._rows(value, key, name)

    def _rows(self, rows: Iterable[Any], key: str, name: str) -> str:
        """The path of a file that `write` writes: rows as JSON lines."""
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"{key}: {name!r} names a data set in metrics and files. Use letters, digits, - and _.")
        file = self._folder() / f"{name}.jsonl"
        if file in self._files:
            raise ValueError(f"{key}: {name} names other rows of this config already. Give another name.")
        self._files[file] = lambda: self._write_rows(rows, file, key)
        return str(file)

    def _write_rows(self, rows: Iterable[Any], file: Path, key: str) -> None:
        with _replacing(file, key) as partial:
            number = 0
            with partial.open("w", encoding="utf-8") as written:
                for number, row in enumerate(rows, start=1):
                    try:
                        written.write(_as_line(row) + "\n")
                    except (TypeError, ValueError) as error:
                        raise ValueError(f"{key}: row {number}: {error}") from None
            if not number:
                raise ValueError(f"{key}: there is no row. Give at least one; an iterator gives its rows only once.")
            is_of_run = self._resume and key.startswith("data.train") and file.exists()
            if is_of_run and not filecmp.cmp(partial, file, shallow=False):
                raise ValueError(f"{key}: other rows than those of the run, which are in {file}. {SAME}")

    def model(self, model: Any, tokenizer: Any) -> Any:
        """The value of model.path: a given path, or the folder in which the objects were saved.

        Args:
            model: a path or hub name, or a transformers model, which may differ from its files.
            tokenizer: None, or a tokenizer that replaces the model's own.
        """
        is_path = isinstance(model, str | os.PathLike)
        if model is None or (is_path and tokenizer is None):
            if tokenizer is not None:
                raise ValueError("tokenizer: without a model. Give model too; the tokenizer is saved with it.")
            return self.as_value(model, "model.path")
        if not is_path and not hasattr(model, "save_pretrained"):
            raise ValueError(f"model={shown(model)}: neither a path, a hub name nor a transformers model.")
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            raise ValueError(f"tokenizer={shown(tokenizer)}: no tokenizer of transformers. Give its object.")
        if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                f"model={shown(model)}: it has adapters of peft, which would be saved without their model. Give "
                "model.merge_and_unload(), and let the run make its own adapters (model.lora)."
            )
        folder = self._folder() / "model"
        self._files[folder] = lambda: self._save_model(model, tokenizer, folder)
        return str(folder)

    def _save_model(self, model: Any, tokenizer: Any, folder: Path) -> None:
        from rlhf.data.model_files import model_fingerprint

        with _replacing(folder, "model") as partial:
            if isinstance(model, str | os.PathLike):
                _copy_model(os.fspath(model), partial)
            else:
                tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model)
                model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            if self._resume and folder.exists() and model_fingerprint(str(partial)) != model_fingerprint(str(folder)):
                raise ValueError(f"model: another one than that of the run, which is in {folder}. {SAME}")


@contextlib.contextmanager
def _replacing(path: Path, key: str) -> Iterator[Path]:
    """A context that fills a new file or folder in place of `path`, which stays as it was if that fails."""
    partial = path.with_suffix(PARTIAL)
    try:
        _remove(partial)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        _remove(path)
        partial.rename(path)
    except OSError as error:
        raise ValueError(f"{key}: it cannot be written to {path}: {error_text(error)}.") from None
    finally:
        with contextlib.suppress(OSError):
            _remove(partial)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _is_source(value: Any) -> bool:
    """Whether an entry of a list is a data set and no row."""
    is_mapping = isinstance(value, Mapping) and "path" in value and value.keys() <= SourceConfig.model_fields.keys()
    return is_mapping or isinstance(value, str | os.PathLike)


def _are_rows(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _as_line(row: Any) -> str:
    if not isinstance(row, Mapping):
        raise ValueError(f'it is a {type(row).__name__}, not a dict of columns. Write {{"question": ...}}.')
    columns = table_row({str(name): value for name, value in row.items()})
    check_without_images(columns)
    for name, value in columns.items():
        try:
            json.dumps(value, default=_as_json)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"column `{name}`: {error}. Give text, numbers, lists and dicts.") from None
    return json.dumps(columns, default=_as_json, ensure_ascii=True)


def _as_json(value: Any) -> Any:
    """What JSON has for a value that is not of its types."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy, tensors
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}, which no data file can hold")


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    source = getattr(model, "name_or_path", "")
    with contextlib.suppress(Exception):  # the loader raises anything
        if source:
            return AutoTokenizer.from_pretrained(source)
    raise ValueError(
        f"model={shown(model)}: its tokenizer is not known ({source or 'it was made without files'}). Give "
        "tokenizer too."
    )


def _copy_model(source: str, target: Path) -> None:
    """A copy of a model's folder without its tokenizer; large files are linked where the file system can."""
    if not looks_local(source):
        from huggingface_hub import snapshot_download

        try:
            source = snapshot_download(source)
        except Exception as error:  # of the hub's client, many
            raise ValueError(f"model.path={source}: {type(error).__name__}: {error}. Give a local folder.") from None
    if not Path(source).is_dir():
        raise ValueError(f"model.path={source}: no such folder. Correct the path.")

    def link_or_copy(file: str, copy: str) -> None:
        try:
            os.link(os.path.realpath(file), copy)
        except OSError:
            shutil.copyfile(file, copy)

    ignored = shutil.ignore_patterns(*TOKENIZER_FILES)
    shutil.copytree(source, target, copy_function=link_or_copy, ignore=ignored)
