"""Names for Python objects in a config: of their module, or `__main__:NAME` for objects that are sent by value."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import io
import re
import sys
from collections import ChainMap
from collections.abc import Collection, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

from rlhf.config.reward import OPTIONS_OF_REWARD
from rlhf.processes.objects import MAIN, Given, get, is_of_another, put

MAX_BYTES = 64 * 2**20  # of all objects of a config that are sent by value


def name_object(value: Any, key: str, *, names: set[str], is_sent: bool = True) -> str:
    """The name of an object for a config: `module:attribute` if others can import it, else `__main__:NAME`.

    Args:
        key: where it stands in the config, for messages.
        names: those given for the same config; the new one is added. An object of an earlier config with the same name
            is replaced, as a cell that is run again replaces it.
        is_sent: other processes run it. False: it stays in this one, and need not be picklable.

    Raises ValueError if it cannot be sent.
    """
    if name := importable_name(value):
        return name
    for name in names:
        if get(name).value is value and (get(name).pickled or not is_sent):
            return name
    pickled = _pickled(value, f"{key}={shown(value)}") if is_sent else ""
    total = (len(pickled) + sum(len(get(name).pickled) for name in names)) * 3 // 4
    if total > MAX_BYTES:
        raise ValueError(
            f"{key}={shown(value)}: the objects of this program have {total / 2**20:.0f} MiB with it, and at most "
            f"{MAX_BYTES >> 20} MiB are sent. {_largest(value)}Read large data from a file in the function."
        )
    name = _new_name(value, names)
    put(name, Given(value, pickled, _source(value)))
    names.add(name)
    return name


def shown(value: Any) -> str:
    """An object as messages name it: `<function score>`, `<Game object>`."""
    if name := getattr(value, "__qualname__", ""):
        return f"<{'class' if isinstance(value, type) else 'function'} {name}>"
    return f"<{type(value).__qualname__} object>"


def importable_name(value: Any) -> str:
    """`module:attribute`, if another process that imports the module has the same object; else empty."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    loaded = sys.modules.get(module or "")
    if module in (None, MAIN) or not name.isidentifier() or getattr(loaded, name, None) is not value:
        return ""
    file = getattr(loaded, "__file__", None)
    return f"{module}:{name}" if file is not None and Path(file).exists() else ""  # else it was made in memory


def _new_name(value: Any, names: Collection[str]) -> str:
    function = value.func if isinstance(value, partial) else value
    own = re.sub(r"\W", "", str(getattr(function, "__name__", "") or type(value).__name__)) or "object"
    name, number = own, 1
    while (
        f"{MAIN}:{name}" in names
        or name in OPTIONS_OF_REWARD  # metrics show the name alone
        or is_of_another(f"{MAIN}:{name}", value)
    ):
        number += 1
        name = f"{own}_{number}"
    return f"{MAIN}:{name}"


class _Pickler(cloudpickle.Pickler):
    """Sends three things that cloudpickle does not.

    The name of the file of code, which messages about errors in it name. What `functools.cache` has wrapped, with an
    empty cache. What annotations name if they are text, as after `from __future__ import annotations`.
    """

    dispatch_table = ChainMap(
        {CodeType: lambda code: _with_file(code), type(cache(len)): lambda function: _without_results(function)},
        cloudpickle.Pickler.dispatch_table,
    )

    def _dynamic_function_reduce(self, func: FunctionType) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = super()._dynamic_function_reduce(func)
        reduced[2][1]["__globals__"].update(_annotated_with(func))
        return reduced


def _with_file(code: CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)


def _without_results(function: Any) -> str | tuple[Any, ...]:
    if importable_name(function):
        return str(function.__qualname__)
    return lru_cache(**function.cache_parameters()), (function.__wrapped__,)


def _annotated_with(function: FunctionType) -> dict[str, Any]:
    """The global variables that the annotations of a function name in text."""
    names: set[str] = set()
    for text in function.__annotations__.values():
        if isinstance(text, str):
            with contextlib.suppress(SyntaxError):
                names.update(compile(text, "annotation", "eval").co_names)
    return {name: function.__globals__[name] for name in names & function.__globals__.keys()}


def _pickled(value: Any, label: str) -> str:
    try:
        _Pickler(pickled := io.BytesIO()).dump(value)
        return base64.b64encode(pickled.getvalue()).decode()
    except Exception as error:  # of the object's own reduction, anything
        raise ValueError(
            f"{label}: it cannot be sent to the processes that run it: {type(error).__name__}: {error}. "
            f"{_culprit(value)}Make such things inside the function, or put it into a module: modules are imported."
        ) from None


def _variables(value: Any) -> Iterator[tuple[str, Any]]:
    """The variables outside of a function, or of the methods of a class, that it uses."""
    functions = [value, *vars(value if isinstance(value, type) else type(value)).values()]
    for function in map(inspect.unwrap, filter(inspect.isfunction, functions)):
        used = inspect.getclosurevars(function)
        yield from used.globals.items()
        yield from used.nonlocals.items()
    if not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from vars(value).items()


def _culprit(value: Any) -> str:
    """A sentence about a variable that cannot be pickled. Empty if there is none."""
    for name, used in _variables(value):
        try:
            cloudpickle.dumps(used)
        except Exception:
            return f"It uses the variable {name}, a {type(used).__name__}. "
    return ""


def _largest(value: Any) -> str:
    sizes = {name: len(cloudpickle.dumps(used)) for name, used in _variables(value)}
    name = max(sizes, key=sizes.__getitem__, default="")
    return f"Its variable {name} has {sizes[name] / 2**20:.0f} MiB. " if name else ""


def _source(value: Any) -> str:
    """A digest of the source text of an object; empty if there is none, as with `python -c`."""
    texts = map(_source_text, (value, getattr(value, "func", None), type(value)))
    text = next(filter(None, texts), "")
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if text else ""


def _source_text(described: Any) -> str:
    with contextlib.suppress(TypeError, OSError, SyntaxError):
        return inspect.getsource(described)
    # Python finds no class of a notebook's cell, but its functions
    functions = filter(inspect.isfunction, vars(described).values()) if isinstance(described, type) else ()
    return "".join(map(_source_text, functions))
