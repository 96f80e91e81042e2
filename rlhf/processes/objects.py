"""Objects that a Python program gave to a run (`rlhf.api`), by the names that stand for them in its config.

    driver     put("__main__:score", function, ...), then sent([name]): what another process needs
    process    receive(...): from then on `code.load_module("__main__:score")` has the function

An object that other processes can import needs none of this: its name is that of its module. Others are sent by value,
pickled. A process that runs an object as untrusted code unpickles it when it is loaded: after the confinement.

A name stands for the newest object that was given under it, as in a notebook whose cell is run again. A config keeps
the objects that it was read with (`keep`), and so does a run (`of_run`).
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

MAIN = "__main__"
UNKNOWN = "an object of the Python program that began the run. Go on from Python, and give it again with resume=True"


class NotGivenError(LookupError):
    """The config names an object of a Python program, and this process was given none of that name."""


class Given(NamedTuple):
    """An object by value: itself, once it is unpickled here; its bytes; and a digest of its source text."""

    value: Any
    pickled: str = ""  # base64; empty if it stays in its own process
    source: str = ""  # empty if there is no source text


_given: dict[str, Given] = {}
_kept: dict[int, dict[str, Given]] = {}  # by the id of a config, while it lives
_of_run: dict[str, Given] = {}  # of the run in this process


def put(name: str, given: Given) -> None:
    """Keep an object under `__main__:NAME`, in place of an earlier one of this name."""
    _given[name] = given


def get(name: str) -> Given:
    return _given[name]


def keep(config: Any, names: Set[str]) -> None:
    """Remember the objects behind these names, those in a config, for as long as it lives."""
    _kept[id(config)] = {name: _given[name] for name in _given.keys() & names}
    weakref.finalize(config, _kept.pop, id(config), None)


def kept(config: Any) -> Mapping[str, Given]:
    """The objects of a config by name, also of names that others took since."""
    return _kept.get(id(config), {})


@contextlib.contextmanager
def of_run(config: Any) -> Iterator[None]:
    """A context in which the names of a config stand for its objects, and none is given to another."""
    _of_run.update(kept(config))
    _given.update(_of_run)
    try:
        yield
    finally:
        _of_run.clear()


def is_of_another(name: str, value: Any) -> bool:
    """Whether the run in this process has another object of this name."""
    return name in _of_run and _of_run[name].value is not value


def is_given(name: str) -> bool:
    return name.startswith(f"{MAIN}:")


def sent(names: Iterable[str] | None = None) -> dict[str, tuple[str, str]]:
    """What `receive` takes, as JSON: the objects of these names that are sent by value; None: all of the run."""
    chosen = _of_run.keys() if names is None else set(names) & _given.keys()
    return {name: (_given[name].pickled, _given[name].source) for name in chosen if _given[name].pickled}


def receive(objects: Mapping[str, Iterable[str]]) -> None:
    """Know the objects that another process has sent. None is unpickled before `namespace` asks for it."""
    for name, (pickled, source) in objects.items():
        _given[name] = Given(None, pickled, source)


def namespace(name: str) -> Any:
    """Something that has the object as its attribute, as the module of any other name does. NotGivenError."""
    given = _given.get(name)
    if given is None:
        raise NotGivenError(UNKNOWN)
    if given.value is None:
        _given[name] = given = given._replace(value=pickle.loads(base64.b64decode(given.pickled)))
    return types.SimpleNamespace(**{name.rpartition(":")[2]: given.value})


def source_of(name: str) -> dict[str, str]:
    """The fingerprint of an object, as `code.loaded_sources` has it of others."""
    given = _given.get(name)
    return {"its source text": given.source} if given is not None and given.source else {}
