"""Loads other people's code by name and fingerprints it: a run must not change its code while it runs.

Fingerprints cover the file that a name is in and the modules of the same folder (for a package: of the whole package)
that are loaded with it. The standard library, installed packages, modules that a call imports later and files of data
are not.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.processes import objects
from rlhf.processes.confinement import remedy

Sources = Mapping[str, Mapping[str, str]]  # name of a function or class -> file, relative to its folder -> digest

OURS = Path(__file__).resolve().parents[1]
INSTALLED = {"site-packages", "dist-packages"}
STANDARD_LIBRARY = Path(os.__file__).resolve().parent


def load_module(name: str) -> Any:
    """Import the module of `module:attribute` or `path/to/file.py:attribute`. It may raise anything, also SystemExit.

    A file is imported once, with its full path as module name, so that no two files share a name. The module of an
    object that a Python program gave (`objects.py`) has this object alone.
    """
    if objects.is_given(name):
        return objects.namespace(name)
    module_name = name.rpartition(":")[0]
    if not module_name.endswith(".py"):
        return importlib.import_module(module_name)
    full = os.path.realpath(module_name)
    if full in sys.modules:
        return sys.modules[full]
    if os.path.exists(full) and not os.path.isfile(full):  # to read a pipe would wait for its writer
        raise FileNotFoundError(errno.ENOENT, "no file, but a folder, pipe or device", full)
    spec = importlib.util.spec_from_file_location(full, module_name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full]
        raise
    return module


def import_problem(name: str, error: BaseException, *, install: str = "", is_reward: bool = False) -> str:
    """A message: why `load_module` failed, and the remedy.

    Args:
        install: a further remedy for a missing module, appended to the advice to install its package.
        is_reward: the code is a part of the reward, whose config can grant the refused access.
    """
    module_name = name.rpartition(":")[0]
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [f"{file}:{line}" for file, line in frames if file != __file__ and not file.startswith("<frozen")]
    match error:
        case objects.NotGivenError():
            return str(error)
        case SyntaxError():
            advice = "Correct that line of the file"
        case ModuleNotFoundError():
            advice = f"Install the package, or start the run from the folder that holds it{install}"
        case FileNotFoundError(filename=file) if file == os.path.realpath(module_name):
            advice = "Correct the path"
        case _:
            there = f"Correct it at {places[-1]}" if places else "Correct the file"
            if objects.is_given(name):
                there = "Put it into a module, and give its name"
            advice = remedy(error, otherwise=there) if is_reward else there
    if objects.is_given(name):
        return f"it cannot be unpickled: {type(error).__name__}: {error}. {advice}".removesuffix(". ")
    return f"{module_name} cannot be imported: {type(error).__name__}: {error}. {advice}".removesuffix(". ")


def load_function(name: str) -> Any:
    """The function of `module:function` or `path/to/file.py:function`, imported once.

    Raises:
        ValueError: the module cannot be imported, or has no such function.
    """
    try:
        module = load_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{name}: {import_problem(name, error)}") from None
    wanted = name.rpartition(":")[2]
    function = getattr(module, wanted, None)
    if not callable(function):
        raise ValueError(f"{name}: the module has no function {wanted}. Define it, or correct the name")
    return function


def loaded_sources(names: Iterable[str], *, before: Collection[str]) -> dict[str, dict[str, str]]:
    """The fingerprints of code that this process has just imported. The file of each name comes first.

    Args:
        names: functions or classes, as a config names them.
        before: names of the modules that were loaded before them.
    """
    new = {file for name in sys.modules.keys() - before if (file := _file(name)) is not None}
    sources = {}
    for name in names:
        if objects.is_given(name):
            sources[name] = objects.source_of(name)
            continue
        module = name.rpartition(":")[0]
        own = _file(os.path.realpath(module) if module.endswith(".py") else module)
        if own is not None:
            folder = _folder(module, own)
            files = [own, *sorted(file for file in new - {own} if _belongs(file, folder))]
            digests = [hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() for file in files]
            sources[name] = {str(file.relative_to(folder)): digest for file, digest in zip(files, digests, strict=True)}
    return sources


def changed_sources(before: Sources, now: Sources, *, noun: str) -> Iterator[str]:
    """Yields `reward name='mine.py:score': mine.py` for each name whose files have changed.

    Only files that are in both are compared, and the name's own file. A file in one of them may come from another
    function of the same process, and code cannot import a further file without a change of its own.
    """
    for name in before.keys() & now.keys():
        then, files = before[name], now[name]
        compared = (then.keys() & files.keys()) | set(list(files)[:1])
        changed = sorted(file for file in compared if then.get(file) != files[file])
        if changed:
            yield f"{noun} name={name!r}: {', '.join(changed)}"


def _file(module: str) -> Path | None:
    """The file of a loaded module; None if it has none, as built-in modules and made-up ones of torch."""
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    return file.resolve() if file.is_absolute() and file.is_file() else None


def _folder(module: str, file: Path) -> Path:
    """The folder of the top package of a module, or of its file."""
    package = None if module.endswith(".py") else sys.modules.get(module.partition(".")[0])
    folders = (Path(path).resolve() for path in getattr(package, "__path__", ()))
    return next((folder for folder in folders if file.is_relative_to(folder)), file.parent)


def _belongs(file: Path, folder: Path) -> bool:
    """True for a file below the folder that is neither installed nor part of Python or of this trainer."""
    if not file.is_relative_to(folder) or file.is_relative_to(STANDARD_LIBRARY):
        return False
    is_ours = file.is_relative_to(OURS) and not folder.is_relative_to(OURS)
    return not is_ours and not {folder.name, *file.relative_to(folder).parts} & INSTALLED
