"""Reads the rows of a data set from a local file, a local folder or the hub, each with its number for messages.

Rows are counted from 1. In a .jsonl file the number of a row is its line number, blank lines included.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, starmap
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple

from rlhf.config.base import MISSING, file_problem
from rlhf.config.data import FILE_SUFFIXES, OTHER_SUFFIXES, DatasetConfig, DatasetsConfig, S, SourceConfig
from rlhf.config.model_folder import looks_local
from rlhf.data.messages import WITH_IMAGES, without_nulls
from rlhf.data.model_files import use_cache_if_hub_is_silent

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the beginning
DEFAULT_SPLIT = {"train": "train", "eval": "test"}
MAX_ROW_BYTES = 32 * 2**20  # longest line; a longer one probably lost its line ends
PARQUET_ROWS = 1024  # rows that are decoded at once
IMAGE_COLUMNS = ("images", "image", "videos", "video")
SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")
# format by suffix; `datasets` reads the files of only one format in a folder
FORMATS = {".jsonl": "json", ".json": "json", **{s: s for s in (".parquet", ".csv", ".tsv", ".arrow")}}


class Row(NamedTuple):
    number: int
    columns: dict[str, Any]


def left_out_text(too_long: int, longest: int, bad: Sequence[str]) -> str:
    """How many rows of a source were dropped, and why. Empty if none was."""
    text = f", {too_long} left out as longer than {longest} tokens" if too_long else ""
    return text + (f", {len(bad)} left out as bad rows, the first: {bad[0]}" if bad else "")


def config_sources(config: DatasetsConfig[S], which: str) -> dict[str, S]:
    """The sources of `data.train` or `data.eval` by key: `data.train`, or `data.train.1` if there are several."""
    sources = {"train": config.train, "eval": config.eval}[which]
    return {f"data.{which}.{i}" if len(sources) > 1 else f"data.{which}": source for i, source in enumerate(sources)}


def rows_per_epoch(sources: Collection[SourceConfig], prompts: Mapping[str, Sized]) -> dict[str, int]:
    """Prompts per epoch of each source: by weight, limited by the scarcest source; by row count; or all."""
    sizes = {source.label: len(prompts[source.label]) for source in sources}
    weights = {source.label: source.weight for source in sources if source.weight is not None}
    if weights:
        per_weight = min(sizes[label] / weight for label, weight in weights.items())
        return {label: max(1, min(sizes[label], round(weight * per_weight))) for label, weight in weights.items()}
    return {source.label: min(source.rows or sizes[source.label], sizes[source.label]) for source in sources}


def too_few_prompts(available: int, needed: int) -> str:
    """The problem if one epoch of data.train has too few prompts for a step, else empty."""
    if available >= needed:
        return ""
    return (
        f"rollout.prompts_per_step={needed}: an epoch of data.train has only {available} prompts, so a step would "
        f"train on the same prompt twice. Use at most {available}, or give it more rows."
    )


def count_trained_rows(train: Iterable[Hashable], held_out: Mapping[str, Iterable[Hashable]]) -> dict[str, int]:
    """By held-out set, the number of its rows that are also in data.train. Equal rows have equal keys."""
    hashes = {name: [*map(hash, rows)] for name, rows in held_out.items()}
    wanted = set().union(*hashes.values())
    trained = {number for number in map(hash, train) if number in wanted}
    return {name: sum(number in trained for number in numbers) for name, numbers in hashes.items()}


def check_source(source: DatasetConfig, key: str) -> None:
    """Raise a ValueError for a missing or empty file, an unknown format, or a folder of several formats."""
    path = local_path(source)
    if path is None:
        return
    if path.is_dir():
        if len(files := _file_of_each_format(path)) > 1:
            raise ValueError(
                f"{key}={source.path}: the folder has files of several formats ({', '.join(files)}), of which only one "
                f"would be read. Move the others away, or name files: {key}=[FILE, FILE]."
            )
        return
    if problem := file_problem(path):
        where = f" under {Path.cwd()}" if problem == MISSING and not path.is_absolute() else ""
        raise ValueError(f"{key}={source.path}: {problem}{where}. Correct the path, or make the file.")
    if path.suffix not in FILE_SUFFIXES:
        reason = f"cannot tell how to read a {path.suffix or 'nameless'} file"
        raise ValueError(f"{key}={source.path}: {reason}. Convert it to one of {', '.join(FILE_SUFFIXES)}.")
    if path.stat().st_size == 0:
        raise ValueError(f"{key}={source.path}: the file is empty. Give it at least one row.")


def _file_of_each_format(folder: Path) -> list[str]:
    """One data file of each format in a folder; none if a file of the folder selects the data files."""
    readme = folder / "README.md"
    if any((folder / name).exists() for name in SAVED_BY_DATASETS) or (
        readme.is_file() and "data_files" in readme.read_text(errors="replace")
    ):
        return []
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    by_format: dict[str, str] = {}
    for name in names:
        kind = FORMATS.get(Path(name.removesuffix(".gz").removesuffix(".zst")).suffix)
        if kind and not name.startswith(".") and not Path(name).name.startswith("dataset_info"):
            by_format.setdefault(kind, name)
    return list(by_format.values())


def local_path(source: DatasetConfig) -> Path | None:
    """The file or folder of a source; None for a hub data set."""
    path = Path(source.path)
    return path if path.suffix in FILE_SUFFIXES + OTHER_SUFFIXES or looks_local(source.path) else None


def is_same_data(held_out: DatasetConfig, trained: DatasetConfig, started_in: Path) -> bool:
    """True if a source of data.eval is one of data.train: a file with the same bytes, or the same split.

    `started_in`: the folder that relative paths in `trained` start from.
    """
    here, there = local_path(held_out), local_path(trained)
    splits = [source.split or DEFAULT_SPLIT[w] for source, w in ((held_out, "eval"), (trained, "train"))]
    if here is None or there is None:
        return (held_out.path, held_out.name, splits[0]) == (trained.path, trained.name, splits[1])
    there = started_in / there
    if here.is_file() and there.is_file():
        return here.samefile(there) or filecmp.cmp(here, there, shallow=False)
    return here.resolve() == there.resolve() and (not here.is_dir() or splits[0] == splits[1])


class Source(Generic[S]):
    """The rows of a source of data.train or data.eval.

    The first unusable row is an error; with `skip`, all unusable rows are dropped and counted.

    Attributes:
        key, settings: the key in the config, for messages, and its value.
        reasons: the message of each dropped row.
        notes: parts of rows that a template does not write, with the number of rows.
    """

    def __init__(self, key: str, settings: S, which: str, *, skip: bool = False) -> None:
        self.key, self.settings, self.path, self._skip = key, settings, settings.path, skip
        self._split = settings.split or DEFAULT_SPLIT[which]
        self.reasons: list[str] = []
        self.notes: Counter[str] = Counter()

    @contextlib.contextmanager
    def leave_out(self, row: Row | None = None) -> Iterator[None]:
        """A context that handles one row: an error in it is raised with the number of `row`, or counted with `skip`."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:  # the first two: of a chat template
            problem = str(error) if row is None else f"{self._name(row.number)}: {error}"
            if not self._skip:
                raise ValueError(problem) from error
            self.reasons.append(problem)

    def read(self) -> list[Row]:
        """All rows. ValueError as `stream` raises it, or if there is none."""
        rows = list(self.stream())
        if not rows:
            first = f" that can be used: {self.reasons[0]}" if self.reasons else ". Give it at least one."
            raise ValueError(f"{self.key}={self.path}: the data set holds no row{first}")
        return rows

    def stream(self) -> Iterator[Row]:
        """The rows, one after another; ValueError if the source or a row cannot be read."""
        check_source(self.settings, self.key)
        path = local_path(self.settings)
        if path is None or path.is_dir():
            return self._from_dataset(path)
        return self._from_parquet(path) if path.suffix == ".parquet" else self._from_json(path)

    def _name(self, number: int, unit: str = "row") -> str:
        return f"{self.key}: {unit} {number} of {self.path}"

    def _from_json(self, path: Path) -> Iterator[Row]:
        """JSON lines or one list of objects; a .json file may be either."""
        if (content := _json_list(path)) is not None:
            for number, columns in enumerate(_parse(content, f"{self.key}: {self.path}"), start=1):
                with self.leave_out():
                    yield self._row(number, columns)
            return
        with path.open("rb") as file:
            for number, (line, size) in enumerate(_lines(file), start=1):
                if line.strip():
                    with self.leave_out():
                        yield self._row(number, self._parse_line(line, size, number))

    def _parse_line(self, line: bytes, size: int, number: int) -> Any:
        where = self._name(number, "line")
        if size > MAX_ROW_BYTES:
            reason = (
                f"{size:,} bytes, but a row may have {MAX_ROW_BYTES:,}. Is a line end missing? Correct or remove it."
            )
            raise ValueError(f"{where} has {reason}")
        return _parse(line.removesuffix(b"\n").removeprefix(BYTE_ORDER_MARK), where, first_line=number)

    def _row(self, number: int, columns: Any) -> Row:
        if not isinstance(columns, dict):
            remedy = 'Write each row as {"question": ..., "answer": ...}.'
            raise ValueError(
                f"{self._name(number)} is a {type(columns).__name__}, not an object with columns. {remedy}"
            )
        return Row(number, columns)

    def _from_parquet(self, path: Path) -> Iterator[Row]:
        import pyarrow
        from pyarrow import parquet

        try:
            batches = parquet.ParquetFile(path).iter_batches(batch_size=PARQUET_ROWS)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from starmap(Row, enumerate(map(table_row, rows), start=1))
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.key}={self.path}: not readable as Parquet ({error}). Write it anew.") from error

    def _from_dataset(self, folder: Path | None) -> Iterator[Row]:
        """A hub data set, a folder of data files, or a folder that `datasets` saved."""
        if folder is None:
            use_cache_if_hub_is_silent()
        import datasets

        name, split = self.settings.name, self._split
        try:
            if folder and any((folder / file).exists() for file in SAVED_BY_DATASETS):
                saved = datasets.load_from_disk(str(folder))
                table = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
            else:
                table = datasets.load_dataset(str(folder or self.path), name, split=split)
            yield from starmap(Row, enumerate(map(table_row, table), start=1))
        except Exception as error:  # the hub's client and the file readers raise many types
            what = "the folder could not be loaded" if folder else "the hub did not give this data set"
            remedy = (
                f"Check that the folder holds .jsonl, .json or .parquet files with a split {split!r}, or set `split`."
                if folder
                else f"There is no such local file either. Check the name, its configuration (`name`: {name}) and its "
                f"split ({split}); without a network, name a local .jsonl or .parquet file, or fetch it where the hub "
                f"answers: hf download {self.path} --repo-type dataset"
            )
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"{self.key}={self.path}: {what} ({reason}). {remedy}") from error


def table_row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table without nulls in its messages: a table gives every message and call the keys of all of them."""
    return {name: without_nulls(value) if _are_messages(value) else value for name, value in columns.items()}


def _are_messages(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and bool({"role", "from"} & first.keys())


def _json_list(path: Path) -> bytes | None:
    """The content of a file that holds one JSON list; None if it holds JSON lines."""
    content = path.read_bytes().removeprefix(BYTE_ORDER_MARK) if path.suffix == ".json" else b""
    return content if content.lstrip().startswith(b"[") else None


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """The lines of a file with their lengths. Of a line over MAX_ROW_BYTES only the beginning is kept."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        size, rest = len(line), line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_ROW_BYTES + 1)
            size += len(rest)
        yield line, size


def _parse(content: bytes, where: str, *, first_line: int = 1) -> Any:
    """The parsed JSON; ValueError if it is not JSON or is nested too deeply."""
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
    except json.JSONDecodeError as error:
        position = f"line {first_line + error.lineno - 1}, column {error.colno}"
        problem = f"is not JSON ({error.msg}, {position}). Correct or remove it."
    except RecursionError:
        problem = "has brackets within brackets, too many to be read. Correct or remove it."
    except ValueError as error:  # a number of thousands of digits
        problem = f"cannot be read ({error}). Correct or remove it."
    raise ValueError(f"{where} {problem}")


def check_without_images(columns: dict[str, Any]) -> None:
    """Raise a ValueError for a row with images or videos. `image` may be a text: the name of a container image."""
    for column in IMAGE_COLUMNS:
        value = columns.get(column)
        if value and not (isinstance(value, str) and not column.endswith("s")):
            raise ValueError(WITH_IMAGES.format(column))


def count_rows(source: DatasetConfig) -> int | None:
    """The number of rows of a local file; None for a folder or a hub data set."""
    path = local_path(source)
    if path is None or path.is_dir():
        return None
    if path.suffix == ".parquet":
        from pyarrow import parquet  # its errors are ValueError or OSError

        return int(parquet.ParquetFile(path).metadata.num_rows)
    if (content := _json_list(path)) is not None:
        return len(_parse(content, "it"))
    with path.open("rb") as file:
        return sum(1 for line, _ in _lines(file) if line.strip())
