"""The program of a process with environments: it answers the driver's messages. Standard library only.

    {"id", "session", "do": "open", "environment", "row", "seeds"}   -> {"id", "result": {"messages", "text"}}
    {"id", "session", "do": "call", "calls"}                         -> {"id", "result": {"answers", "done", "errors"}}
    {"id", "session", "do": "finish"}                                -> {"id", "result": {"reward", "parts", ...}}
    {"id", "session", "do": "play", "row", "seeds"}                  -> {"id", "result": {"reward", "parts", ...}}
          runs a program, whose message has "endpoint" too, or a coroutine, which asks for each of its turns:
          {"asks", "session", "request"} -> {"answers", "message"}
    {"session", "do": "close", "broken"}                             gets no answer

A failed request gets `error`, and `limit` is true if the call used up its time or memory. A session with blocking calls
has a process of its own, and no event loop runs meanwhile, since its code may start one. Coroutines share a process and
an event loop, which sends `alive` every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf.environments import seeding
from rlhf.environments.contract import BUILT_IN, Environment, column_names
from rlhf.environments.program import LimitError, Program
from rlhf.processes import attributes
from rlhf.processes.channel import Channel
from rlhf.processes.code import load_module
from rlhf.processes.outside import over_clock
from rlhf.processes.raised import error_with_location
from rlhf.processes.returned import as_utf8, read_returned

ALIVE_S = 1.0  # between signs of life of the event loop
MAX_ERROR = 2000  # characters of an error

PROGRAM, SERVICE = "program", "service"
Play = Callable[..., Awaitable[Any]]
Awaiting = Callable[[Awaitable[Any]], Awaitable[Any]]
Kind = Environment | Program | Play | None  # None: a service; the driver asks it


def load(hello: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the environments by the value of the column that chooses them. Raises ValueError for a bad one.

    Args:
        hello: {"environments": {value: {"name", "options", "gives_answer", "program": arguments of `Program`}},
            "tools": names, "wall_seconds": of one call, "answers": columns that hold answers, in lower case}

    Returns:
        The environments with the time limit of a call; and for each environment {"tools", "rewards", "blocking",
        "plays", "opens", "program", "withheld", "rows"}. Withheld columns hold answers and are not named in its code;
        rows omit them. `opens`: it plays, and opens something for each rollout before. `rows`: number of its problems
        for `train` and `eval`, if it says so.
    """
    parts, answers = hello["environments"], hello["answers"]
    environments = {value: _make(part, hello["tools"]) for value, part in parts.items()}
    about = {value: _describe(environment, parts[value], answers) for value, environment in environments.items()}
    return {"environments": environments, "wall_seconds": hello["wall_seconds"]}, about


def _make(part: Mapping[str, Any], tools: Sequence[str]) -> Kind:
    name = part["name"]
    if name == SERVICE:
        return None
    if name == PROGRAM:
        return Program(**part["program"])
    if (plays := _coroutine(name)) is None:
        try:
            return Environment(name, options=part["options"], tools=tools)
        except ValueError as error:
            known = str(error).startswith(("environment", "tools"))
            raise ValueError(str(error) if known else f"environment name={name!r}: {error}") from None
    options = {} if inspect.isclass(plays) else part["options"]
    if options or tools:
        raise ValueError(
            f"environment name={name!r}: a coroutine takes no {'options' if options else 'tools'}: it gets the row, "
            "and passes tools to `generate`. Remove them; a class with a coroutine `play` may have options."
        )
    seeding.import_numpy()
    if not inspect.isclass(plays):
        return plays
    try:
        made: Any = plays(**part["options"])
    except BaseException as error:  # SystemExit and errors of the confinement too
        if isinstance(error, ValueError) and str(error).startswith("environment."):
            raise
        raise ValueError(f"environment name={name!r}: it cannot be made: {type(error).__name__}: {error}") from error
    play: Play = made.play
    return play


def _coroutine(name: str | None) -> Any:
    """The coroutine function of this name, or the class with a coroutine `play`; None if the name means anything else
    or cannot be imported."""
    if name is None or name in BUILT_IN:
        return None
    with contextlib.suppress(BaseException):  # `Environment` reports the error
        found = getattr(load_module(name), name.rpartition(":")[2], None)
        has_tools = hasattr(found, "reset")  # a class of tools, which may have one that is called `play`
        return found if inspect.iscoroutinefunction(found if has_tools else getattr(found, "play", found)) else None
    return None


def _describe(environment: Kind, part: Mapping[str, Any], answers: Sequence[str]) -> dict[str, Any]:
    """The description of an environment for the driver, see `load`."""
    about: dict[str, Any] = {"tools": [], "rewards": True, "blocking": True, "plays": True, "program": True}
    about |= {"opens": False, "rows": {}}
    names = set[str]()
    if isinstance(environment, Environment):
        about |= {"tools": environment.tools, "rewards": environment.has_reward, "blocking": bool(environment.blocking)}
        about |= {"plays": False, "program": False}
        names = environment.column_names
    elif environment is not None and not isinstance(environment, Program):
        player = getattr(environment, "__self__", None)  # a class that plays
        about |= {"blocking": False, "program": False, "opens": hasattr(player, "open")}
        about |= {name: getattr(player, name, usual) for name, usual in (("rows", {}), ("tools", []))}
        names = column_names(environment, part["options"])
    gives_answer = environment is None or part["gives_answer"]  # a service is a server of the user
    return {**about, "withheld": [] if gives_answer else [column for column in answers if column not in names]}


def serve(channel: Channel, loaded: dict[str, Any]) -> None:
    """Answer messages until the driver hangs up."""
    server = Server(channel, loaded["environments"], loaded["wall_seconds"])
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.set_task_factory(seeding.start_task)
        is_open = True
        while is_open:
            messages, is_open = channel.receive(wait=True)
            while messages:
                message = messages.pop(0)
                if server.runs_alone(message):
                    server.run_alone(message, loop)
                else:
                    messages, is_open = loop.run_until_complete(server.run_together([message, *messages]))
        for environment in loaded["environments"].values():
            if isinstance(environment, Environment):
                loop.run_until_complete(environment.close())


class Server:
    """The sessions of one process."""

    def __init__(self, channel: Channel, environments: Mapping[str, Kind], wall_seconds: float) -> None:
        self._channel, self._environments, self._wall_seconds = channel, environments, wall_seconds
        self._sessions: dict[int, Any] = {}  # session -> episode
        self._tasks: dict[int, set[asyncio.Task[None]]] = {}  # by session
        self._closing: set[asyncio.Task[None]] = set()  # of sessions that have ended
        self._arrived = asyncio.Event()
        self._asked: dict[int, asyncio.Future[Any]] = {}  # turns that coroutines wait for
        self._numbers = 0
        self._has_coroutines = False  # of the environment that has this process for itself

    def runs_alone(self, message: Mapping[str, Any]) -> bool:
        """Whether the message belongs to a session with blocking calls."""
        if "environment" not in message:
            return not self._tasks
        environment = self._environments[message["environment"]]
        return bool(environment.blocking) if isinstance(environment, Environment) else isinstance(environment, Program)

    def run_alone(self, message: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        """Answer one message, without an event loop unless the environment has coroutines too."""
        if "environment" in message:
            environment = self._environments[message["environment"]]
            self._has_coroutines = isinstance(environment, Environment) and bool(environment.coroutines)
        answer = self._answer_to(message, _without_escapes)
        if self._has_coroutines:
            answered = loop.run_until_complete(answer)
        else:
            try:
                answer.send(None)
            except StopIteration as end:
                answered = end.value
            else:
                raise AssertionError("an environment without coroutines never waits")
        if answered:
            self._send(message, answered)

    async def run_together(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        """Answer messages until no session is left. Returns later messages, and whether the driver is connected."""
        self._arrived, loop, is_open = asyncio.Event(), asyncio.get_running_loop(), True
        loop.add_reader(self._channel.socket, self._arrived.set)
        alive = asyncio.ensure_future(self._say_alive())
        try:
            while True:
                for message in messages:
                    self._start(message)
                if not is_open or not (self._tasks or self._closing):
                    return [], is_open
                await self._arrived.wait()
                self._arrived.clear()
                messages, is_open = self._channel.receive()
                if messages and not self._tasks:
                    return messages, is_open
        finally:
            loop.remove_reader(self._channel.socket)
            alive.cancel()

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._channel.send({"alive": True})

    def _start(self, message: dict[str, Any]) -> None:
        """Start to answer a message of a session that shares the process."""
        session = message["session"]
        if "answers" in message:
            if (future := self._asked.pop(message["answers"], None)) and not future.done():
                future.set_result(message["message"])
            return
        if message["do"] == "close":
            for task in self._tasks.pop(session, ()):
                task.cancel()
        task = asyncio.ensure_future(self._answer(message))
        if message["do"] != "close":
            self._tasks.setdefault(session, set()).add(task)
        else:
            self._closing.add(task)
            task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        self._arrived.set()

    async def _answer(self, message: dict[str, Any]) -> None:
        clock = _Clock(self._wall_seconds, over_clock(self._wall_seconds))  # a coroutine has its own
        run = _without_escapes if message["do"] == "play" else clock.limited
        if answer := await self._answer_to(message, run):
            self._send(message, answer)

    def _send(self, message: Mapping[str, Any], answer: dict[str, Any]) -> None:
        try:
            self._channel.send(answer)
        except (TypeError, ValueError, RecursionError) as error:  # Python writes no number of over 4300 digits
            why = f"its answer cannot be sent: {error_with_location(error)}"
            self._channel.send(self._failure(message, why, limit=False))

    async def _answer_to(self, message: Mapping[str, Any], run: Awaiting) -> dict[str, Any]:
        """The answer to a message; an empty dictionary if the message gets none."""
        try:
            result = await run(self._carry_out(message))
        except LimitError as error:
            return self._failure(message, str(error), limit=True)
        except _EscapedError as error:
            return self._failure(message, str(error), limit=False)
        except MemoryError:
            return self._failure(message, "over the memory of its process", limit=True)
        except (Exception, asyncio.CancelledError) as error:  # code may cancel itself; after a close nobody waits
            return self._failure(message, error_with_location(error), limit=False)
        return {"id": message["id"], "result": result} if "id" in message else {}

    def _failure(self, message: Mapping[str, Any], error: str, *, limit: bool) -> dict[str, Any]:
        return {"id": message.get("id"), "error": as_utf8(error)[:MAX_ERROR], "limit": limit}

    async def _carry_out(self, message: Mapping[str, Any]) -> Any:
        """Carry out the message's request."""
        session = message["session"]
        if message["do"] == "close":
            episode = self._sessions.pop(session, None)
            return await episode.close(broken=message["broken"]) if episode is not None else None
        if message["do"] == "call":
            return await self._sessions[session].call(message["calls"])
        if message["do"] == "finish":
            return await self._sessions[session].finish()
        environment = self._environments[message["environment"]]
        if isinstance(environment, Program):
            return environment.play(message, lambda: self._channel.send({"alive": True}))
        assert environment is not None, "the driver asks a service"
        if not isinstance(environment, Environment):
            if message["do"] == "play":
                return await self._play_coroutine(environment, message)
            self._sessions[session] = await _open(environment, message)
            return {"messages": None, "text": None}
        episode = self._sessions[session] = environment.episode()
        return await episode.reset(message["row"], message["seeds"])

    async def _play_coroutine(self, play: Play, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reward of a coroutine that has been played to its end."""
        session = message["session"]
        clock = _Clock(self._wall_seconds, f"it has asked for no turn for {self._wall_seconds:g} seconds")

        async def generate(context: Any, *, tools: Any = None, max_tokens: int | None = None) -> Turn:
            """The model's turn after these messages or token ids. With tools, calls of these are read; none of []."""
            context = list(context)
            is_ids = bool(context) and not isinstance(context[0], Mapping)
            request = {"token_ids": [int(each) for each in context]} if is_ids else {"messages": context}
            request |= {"tools": [*(tools or ())], "max_tokens": max_tokens}
            request |= {} if tools is None else {"offered": request["tools"]}
            self._numbers += 1
            number = self._numbers
            self._asked[number] = asyncio.get_running_loop().create_future()
            with clock.paused():
                self._channel.send({"asks": number, "session": session, "request": request})
                return Turn(await self._asked[number])

        seeds = message["seeds"]
        state = seeding.RandomState(seeding.derive(seeds["group"], seeds["sample"], "play"))
        seed = {"seed": seeds["group"]} if "seed" in inspect.signature(play).parameters else {}
        opened = self._sessions.get(session)
        with state:
            coroutine: Any = play(message["row"], generate, *([opened.value] if opened else []), **seed)
        seeding.of_tasks.set(state)  # of this session's task; `limited` starts another one
        result = await clock.limited(coroutine)
        try:
            returned = read_returned(result)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the coroutine {error}.") from None
        facts = attributes.plain_json(returned.others)
        return {"reward": returned.score, "parts": returned.numbers, "facts": facts, "attributes": None}


async def _open(play: Play, message: Mapping[str, Any]) -> _Opened:
    """What a class that plays opens for a rollout, in the random state of its group."""
    player: Any = getattr(play, "__self__", None)
    group = message["seeds"]["group"]
    state = seeding.RandomState(seeding.derive(group, "open"))
    seeding.of_tasks.set(state)  # of tasks that it starts
    with state:
        coroutine = player.open(message["row"], seeding.derive(group, "seed"))
    return _Opened(await seeding.run_with_state(coroutine, state))


class _Opened:
    """What the `open` of a class that plays returned for a rollout."""

    def __init__(self, value: Any) -> None:
        self.value = value

    async def close(self, *, broken: bool) -> None:
        """Call its `close`, if it has one."""
        if callable(close := getattr(self.value, "close", None)) and inspect.isawaitable(result := close()):
            await result


class Turn(dict[str, Any]):
    """An assistant message with two attributes of the engine: `finish_reason` and `token_ids`."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.finish_reason: str = self.pop("finish_reason")
        self.token_ids: list[int] = self.pop("token_ids")


class _EscapedError(Exception):
    """Code raised a BaseException that is no Exception, such as SystemExit or NoNetworkError."""


async def _without_escapes(awaitable: Awaitable[Any]) -> Any:
    """Await code of the user. Raises _EscapedError in place of an exception that would end the process."""
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise _EscapedError(error_with_location(error)) from error


class _Clock:
    """Ends work that takes over `seconds` by the clock; the count starts again after each pause."""

    def __init__(self, seconds: float, error: str) -> None:
        self._seconds, self._error = seconds, error
        self._pauses, self._began = 0, time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._began = time.monotonic()

    async def limited(self, awaitable: Awaitable[Any]) -> Any:
        """Await something; unlike with `wait_for`, a TimeoutError of the code itself is not the limit."""
        task = asyncio.ensure_future(_without_escapes(awaitable))
        try:
            while not task.done():
                left = self._seconds - (0.0 if self._pauses else time.monotonic() - self._began)
                if left <= 0:
                    raise LimitError(self._error)
                await asyncio.wait({task}, timeout=left)
            return task.result()
        finally:
            task.cancel()
