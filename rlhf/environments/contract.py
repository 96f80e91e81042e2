"""Environments and tools with the contract of TRL 1.16, as a process runs them. Standard library only.

    environment = Environment("my/file.py:Game", options={...}, tools=["calculator"])   once per process
    episode = environment.episode()                                                     once per rollout
    await episode.reset(row, seeds)        {"messages": [...] or None, "text": str or None}
    await episode.call(tool_calls)         {"answers": [tool messages], "done": bool, "errors": int, "faults": [...]}
    await episode.finish()                 {"reward": float or None, "parts": {...}, "facts": {...}, "attributes": ...}
    await episode.close()                  the instance goes back to the pool

TRL's rules: a class is made without arguments; `reset(**row)` returns None or text that is joined to the end of the
last user message; every other public method is a tool; `get_reward()` is optional; an instance is reused for many
rollouts. docs/environments.md lists the additions to TRL: `done`, `close`, `facts`, messages of `reset`, named numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

from rlhf.environments import seeding
from rlhf.environments.calculator import calculator
from rlhf.environments.faults import fault_of
from rlhf.environments.places import without_places
from rlhf.environments.python_tool import python_tool
from rlhf.environments.schema import json_schema
from rlhf.processes import attributes
from rlhf.processes.code import import_problem, load_module
from rlhf.processes.returned import as_utf8, as_utf8_json, read_returned

# name -> what makes the tool, from options
BUILT_IN: dict[str, Callable[..., Callable[..., Any]]] = {"calculator": lambda: calculator, "python": python_tool}
NOT_TOOLS = ("reset", "get_reward", "close")
TRACEBACK = "Traceback (most recent call last)"
MAX_CHARACTERS = 100_000  # of one answer, about 25,000 tokens; a longer answer is cut, and says so
CONTAINERS, MAX_NAMES = tuple | frozenset | list | set | dict, 256  # of column names; a larger list holds words


class Environment:
    """A class or functions, imported and checked, and the pool of the class's instances."""

    _methods: tuple[str, ...] = ()

    def __init__(
        self, name: str | None = None, *, options: Mapping[str, Any] | None = None, tools: Sequence[str] = ()
    ) -> None:
        """Import everything and check it.

        It makes no instance of a class: worker processes are forked from the process with this Environment, and must
        not share an instance's connections and threads. A function that makes instances has to be called once.

        Args:
            name: `module:Class`, `path/to/file.py:Class` (or a function that returns an instance), `calculator`,
                `python`; None if there are only functions.
            options: arguments for the class, or for the built-in tool.
            tools: names of functions, in the same forms; they do not belong to the class.

        Raises ValueError if a class or function cannot be imported, made or offered to a model.
        """
        self._functions: dict[str, Callable[..., Any]] = {}
        self._factory: Callable[[], Any] | None = None
        self.idle: list[Any] = []  # instances that wait for another rollout
        for tool in tools:
            self._add(tool, {}, f"tools: {tool!r}")
        label = f"environment name={name!r}"
        if name in BUILT_IN:
            self._add(name, options or {}, label)
        self.name = ""  # of the class; empty without a class
        self.has_reward = self.declares_done = False  # whether the class has `get_reward`; whether `done` ends rollouts
        self.column_names = set[str]()  # of columns that the code may read, in lower case (see `column_names`)
        # the schemas of the functions, then of the methods, as the prompt shows them
        self.tools = [_schema(function) for function in self._functions.values()]
        waits: dict[str, bool] = {}
        if name is not None and name not in BUILT_IN:
            factory = _import(name, label)
            self._factory = lambda: factory(**(options or {}))
            waits = self._examine(_class_of(factory, options or {}, label), options or {}, label)
        names = [tool["function"]["name"] for tool in self.tools]
        if duplicate := next((tool for tool in names if names.count(tool) > 1), None):
            raise ValueError(f"{label}: two tools have the name {duplicate!r}. Rename one of them.")
        waits = {name: inspect.iscoroutinefunction(function) for name, function in self._functions.items()} | waits
        # Only an environment without blocking functions can share its process; one without coroutines needs no loop.
        self.blocking = tuple(name for name in waits if not waits[name] and name != "close")
        self.coroutines = tuple(name for name in waits if waits[name])

    def _add(self, tool: str, options: Mapping[str, Any], label: str) -> None:
        if tool in BUILT_IN:
            try:
                function = BUILT_IN[tool](**options)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{label}: {error}") from None
        else:
            function = _import(tool, label)
        if getattr(function, "__name__", None) in (None, *self._functions):
            raise ValueError(f"{label}: a tool needs a name of its own. Use a function defined by `def`.")
        self._functions[function.__name__] = function

    def _examine(self, cls: type, options: Mapping[str, Any], label: str) -> dict[str, bool]:
        """Read the methods of the class. Returns, for each method that a rollout calls, whether it is a coroutine."""
        # on the class: `getmembers` of an instance would evaluate its properties
        methods = dict(inspect.getmembers(cls, inspect.isfunction))
        if "reset" not in methods:
            raise ValueError(f"{label}: {cls.__name__} has no method `reset`. It is called before each rollout.")
        done_method = "done" in methods and methods["done"].__annotations__.get("return") in (bool, "bool")
        self._methods = tuple(
            n for n in methods if not n.startswith("_") and n not in NOT_TOOLS and not (n == "done" and done_method)
        )
        # an attribute that only `reset` sets does not count: published classes answer later calls with "game over"
        self.declares_done = done_method or ("done" not in methods and hasattr(cls, "done"))
        self.name, self.has_reward = cls.__name__, "get_reward" in methods
        self.column_names = column_names(methods["reset"], cls, options, *methods.values())
        for name in self._methods:
            is_static = isinstance(inspect.getattr_static(cls, name), staticmethod)
            self.tools.append(_schema(methods[name] if is_static else MethodType(methods[name], cls)))
        called = [*self._methods, *NOT_TOOLS]
        return {name: inspect.iscoroutinefunction(methods[name]) for name in called if name in methods}

    def episode(self) -> Episode:
        """A new rollout with an instance of its own. Raises any exception of the class's constructor."""
        instance = None
        if self._factory is not None:
            instance = self.idle.pop() if self.idle else self._factory()
        methods = [getattr(instance, name) for name in self._methods]
        return Episode(self, instance, {**self._functions, **{method.__name__: method for method in methods}})

    async def close(self) -> None:
        """Call `close()` of the instances that have one, before the process ends."""
        while self.idle:
            await _close(self.idle.pop())


class _Call(NamedTuple):
    """A call as the model wrote it, and its arguments once they are read."""

    tool: str
    written: str
    arguments: Any = None


class Episode:
    """One rollout in an environment. The driver makes one call at a time."""

    def __init__(self, environment: Environment, instance: Any, functions: dict[str, Callable[..., Any]]) -> None:
        self._environment, self._instance, self._functions = environment, instance, functions
        self._seeds: Mapping[str, int] | None = None
        self._calls = 0

    async def reset(self, row: Mapping[str, Any], seeds: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Start the rollout. Raises exceptions of `reset`, and TypeError if it returned a value of another type.

        Args:
            row: all columns of the row, without the one that chose the environment.
            seeds: {"group": number of the group, "sample": number in the group}; None: nothing is seeded. All members
                of a group start in the same random state, and have a state of their own in later calls.
        """
        self._seeds = seeds
        nothing = {"messages": None, "text": None}
        if self._instance is None:
            return nothing
        arguments = dict(row)
        parameters = inspect.signature(self._instance.reset).parameters
        if seeds is not None and "seed" in parameters:
            arguments.setdefault("seed", seeding.derive(seeds["group"], "seed"))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        result = await self._run(self._instance.reset, arguments, self._state("reset"))
        if result is None:
            return nothing
        if isinstance(result, str):
            return {**nothing, "text": as_utf8(result)}
        if isinstance(result, list) and result and all(isinstance(item, Mapping) for item in result):
            if all(isinstance(item.get("role"), str) and "content" in item for item in result):
                return {**nothing, "messages": as_utf8_json(json.loads(json.dumps(result)))}
            if all(item.get("type") == "text" and isinstance(item.get("text"), str) for item in result):
                return {**nothing, "text": as_utf8("".join(item["text"] for item in result))}
        raise TypeError(
            f"{self._environment.name}.reset returned {type(result).__name__}. It may return None, text for the end of "
            "the last user message, or a list of messages with role and content."
        )

    async def call(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Run the calls of one turn: functions in order, then coroutines together. The answers have the same order.

        Args:
            calls: `tool_calls` of an assistant message; arguments as JSON text or as a mapping. The `error` of a call
                that could not be read is its answer.

        Returns:
            {"answers": one message per call, {"role": "tool", "name", "content"}, "done": True if the class ends the
            rollout here, "errors": the number of answers that are errors, "faults": errors that the model may not have
            caused, as `tool: file:line: Type: text`}. A content is text; only a list that a tool returned stays a list,
            as in TRL, and the model reads `content_text` of it.

        Raises MemoryError; any other exception of a tool becomes its answer.
        """
        outcomes: list[tuple[_Call, Any]] = []  # contents of answers, and exceptions
        waiting: list[tuple[_Call, Any, Any]] = []
        for call in calls:
            state = self._state(self._seeds and self._seeds["sample"], self._calls)
            self._calls += 1
            asked = _Call(_name(call), str(call.get("function")))
            try:
                if call.get("error"):
                    raise ValueError(call["error"])
                if call.get("type", "function") != "function":
                    raise ValueError(f"Unsupported tool call type: {call['type']}")
                if asked.tool not in self._functions:
                    raise ValueError(f"Tool {asked.tool} not found.")
                asked = asked._replace(arguments=_arguments(call["function"].get("arguments")))
                with state:
                    result = self._functions[asked.tool](**asked.arguments)
                    if not inspect.isawaitable(result):
                        outcomes.append((asked, self._content(result, asked.written)))
                        continue
                waiting.append((asked, result, state))
            except MemoryError:
                raise
            except BaseException as error:  # the model must see SystemExit and errors of the confinement too
                outcomes.append((asked, error))
        together = (self._await_answer(result, state, asked.written) for asked, result, state in waiting)
        # where nothing waits there may be no event loop; a coroutine that cancels itself is an exception like any other
        awaited = await asyncio.gather(*together, return_exceptions=True) if waiting else []
        outcomes += [(asked, outcome) for (asked, *_), outcome in zip(waiting, awaited, strict=True)]
        answers, faults, errors = [], list[str](), 0
        for asked, outcome in outcomes:
            if isinstance(outcome, MemoryError):
                raise outcome
            if isinstance(outcome, BaseException):
                errors += 1
                fault = fault_of(outcome, asked.arguments)
                faults += [] if fault is None else [f"{asked.tool}: {fault}"]
                outcome = self._error(outcome, asked.written)
            answers.append({"role": "tool", "name": asked.tool, "content": outcome})
        done = self._environment.declares_done and self._instance.done
        done = bool(done() if callable(done) else done)
        return {"answers": answers, "done": done, "errors": errors, "faults": faults}

    async def finish(self) -> dict[str, Any]:
        """Judge the rollout. Raises what `get_reward` raises, and ValueError or TypeError without a finite number.

        Returns:
            {"reward": of get_reward, None if it is missing or returned None, "parts": its further numbers, "facts":
            its further values, and the facts of the class, "attributes": for an `EnvironmentView`, None without a
            class}
        """
        if self._instance is None:
            return {"reward": None, "parts": {}, "facts": {}, "attributes": None}
        returned = read_returned(None)
        state = self._state(self._seeds and self._seeds["sample"], "finish")
        if self._environment.has_reward:
            result = await self._run(self._instance.get_reward, {}, state)
            try:
                returned = read_returned(result)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self._environment.name}.get_reward {error}.") from None
        with state:
            given = getattr(self._instance, "facts", None)
            facts = attributes.plain_json(returned.others | dict(given if isinstance(given, Mapping) else {}))
            said = attributes.said(self._instance)
        return {"reward": returned.score, "parts": returned.numbers, "facts": facts, "attributes": said}

    async def close(self, *, broken: bool = False) -> None:
        """End the rollout. The instance serves another rollout unless it is `broken`: an exception interrupted it."""
        instance, self._instance = self._instance, None
        if broken:
            await _close(instance)
        elif instance is not None:
            self._environment.idle.append(instance)

    def _state(self, *parts: Any) -> contextlib.AbstractContextManager[Any]:
        if self._seeds is None:
            return contextlib.nullcontext()
        return seeding.RandomState(seeding.derive(self._seeds["group"], *parts))

    async def _run(self, function: Callable[..., Any], arguments: dict[str, Any], state: Any) -> Any:
        with state:
            result = function(**arguments)
        return await seeding.run_with_state(result, state) if inspect.isawaitable(result) else result

    async def _await_answer(self, result: Any, state: Any, written: str) -> Any:
        """The content of an answer, or the exception; a raised SystemExit would end the event loop."""
        try:
            value = await seeding.run_with_state(result, state)
            with state:
                return self._content(value, written)
        except (MemoryError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            return error

    def _error(self, error: BaseException, written: str) -> str:
        text = without_places(_text_of_error(error), written=written)
        opened = [error.filename, error.filename2] if isinstance(error, OSError) else []
        for path in (path for path in opened if isinstance(path, str) and os.path.isabs(path) and path not in written):
            text = text.replace(path, os.path.basename(path))
        return self._text({"error": text})

    def _content(self, result: Any, written: str) -> Any:
        """The content of the message for a result: a list that JSON can express stays a list; anything else is text.

        A returned traceback hides paths of this machine, like an exception.
        """
        if isinstance(result, str) and TRACEBACK in result:
            result = without_places(result, written=written)
        if isinstance(result, list):
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                if len(as_json := json.dumps(result)) <= MAX_CHARACTERS:
                    return as_utf8_json(json.loads(as_json))
        return self._text(result)

    def _text(self, result: Any) -> str:
        text = str(result)
        cut = len(text) - MAX_CHARACTERS
        return as_utf8(text if cut <= 0 else f"{text[:MAX_CHARACTERS]}\n[{cut} more characters were cut]")


def column_names(function: Callable[..., Any], *others: Any) -> set[str]:
    """Names, in lower case, of the columns that code may read; a name that the code computes is not found.

    These are the parameters of the function and every text in its code, in `others`, and in the functions, classes and
    constants of their modules that they use.
    """
    names = set(inspect.signature(function).parameters)
    waiting: list[Any] = [function, *others]
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, str):
            names.add(each)
        elif isinstance(each, MappingProxyType) or (isinstance(each, CONTAINERS) and len(each) <= MAX_NAMES):
            waiting += [*each, *(each.values() if isinstance(each, Mapping) else ())]
        elif isinstance(each, CodeType):
            waiting += each.co_consts
        elif isinstance(each, property):
            waiting.append(each.fget)
        elif isinstance(each, staticmethod | classmethod):
            waiting.append(each.__func__)
        elif isinstance(each, MethodType):
            waiting += [each.__func__, type(each.__self__)]
        elif isinstance(each, type):
            waiting += [vars(base) for base in each.__mro__ if base.__module__ == each.__module__]
        elif isinstance(each, FunctionType):
            used = [each.__globals__.get(name) for name in _names_in(each.__code__)]
            waiting += [inspect.unwrap(each), each.__code__, each.__defaults__, each.__kwdefaults__]
            waiting += [value for value in used if isinstance(value, str | CONTAINERS)]
            code = (value for value in used if isinstance(value, type | FunctionType))
            waiting += [value for value in code if value.__module__ == each.__module__]
    return {name.lower() for name in names}


def _names_in(code: CodeType) -> set[str]:
    """The global names and attributes that code and the functions in it use."""
    return set(code.co_names).union(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def content_text(content: Any) -> str:
    """The content of a message as text: texts of blocks are joined; any other value is written by `str`."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else ()
    if blocks and all(isinstance(block, dict) and isinstance(block.get("text"), str) for block in blocks):
        return "".join(block["text"] for block in blocks)
    return str(content)


def _name(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else call.get("name")
    return as_utf8(name) if isinstance(name, str) else "unknown"


def _arguments(written: Any) -> Any:
    """The arguments of a call. Values that are no mapping pass: `**` refuses them with TRL's error text."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The arguments are not valid JSON: {error}") from None


def _text_of_error(error: BaseException) -> str:
    try:
        return str(error) if not isinstance(error, asyncio.CancelledError) else type(error).__name__
    except Exception:
        return type(error).__name__


def _class_of(factory: Callable[..., Any], options: Mapping[str, Any], label: str) -> type:
    """The class of the instances that a class or a function makes from these options."""
    try:
        if inspect.isclass(factory):
            inspect.signature(factory).bind(**options)
            return factory
        instance = factory(**options)
    except BaseException as error:  # SystemExit and errors of the confinement too
        raise ValueError(f"{label}: it cannot be made: {type(error).__name__}: {error}") from error
    asyncio.run(_close(instance))
    return type(instance)


async def _close(instance: Any) -> None:
    """Call `close()` of an instance if it has one. Its exceptions are ignored."""
    with contextlib.suppress(Exception):
        if callable(close := getattr(instance, "close", None)) and inspect.isawaitable(result := close()):
            await result


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return json_schema(function)
    except Exception as error:  # a type hint may name a missing class
        where = getattr(function, "__qualname__", function)
        raise ValueError(f"The tool {where} cannot be offered to a model: {error}") from error


def _import(name: str, label: str) -> Callable[..., Any]:
    """Import `module:attribute` or `path/to/file.py:attribute`."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        built_in = " or ".join(BUILT_IN)
        raise ValueError(f"{label}: write module:name or path/to/file.py:name, or {built_in}, which are built in.")
    try:
        module = load_module(name)
    except BaseException as error:  # a module may raise anything, SystemExit too
        install = "; `environment.python` names another interpreter"
        raise ValueError(f"{label}: {import_problem(name, error, install=install)}.") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{label}: {module_name} has no class or function {attribute}. Correct the name.")
    seeding.import_numpy()
    return function
