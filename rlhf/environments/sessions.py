"""Sessions of environments in the event loop; `hosts.py` and `nodes.py` reach their processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from rlhf.config.environment import EnvironmentConfig
from rlhf.data.messages import read_request
from rlhf.environments.contract import content_text
from rlhf.environments.turns import Answers, CallLimitError, FailedError, Message
from rlhf.processes.channel import as_json
from rlhf.types import Outcome

FULL = "CAPACITY_REACHED"  # in the answer of an OpenEnv server without room for another session
FULL_PAUSE_S = 0.5
LEFT_OUT = (
    "Rows leave out columns with answers that the code of their environment does not name: name it as a parameter of "
    "`reset`, or set environment.gives_answer: true"
)
MAX_PARTS, MAX_FACTS = 64, 64  # named numbers and facts of one rollout
FAILED_COUNTS_S = 10.0  # a failed session counts as open so long: a node where all fail gets few new sessions

Answer = Callable[[Mapping[str, Any]], Awaitable[Message]]
Service = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]  # see `service.Service.play`


class Sessions:
    """The sessions of one node in the event loop; a derived class reaches their processes.

    Args:
        about: of each environment, by the value of the column that chooses it: {"tools", "rewards", "blocking",
            "plays", "program", "withheld"}.

    Attributes:
        services: the environments that are services, by the same value.
        opened: sessions that were reset; another node may share this set.
        open_sessions: number of sessions of this node, including those that wait for a process.
    """

    numbers = itertools.count(1)  # of the sessions of all nodes
    _say: Callable[[str], None]  # gets a warning; a derived class sets it

    def __init__(self, config: EnvironmentConfig, about: dict[str, dict[str, Any]]) -> None:
        self.config, self.about, self.open_sessions = config, about, 0
        self._warned_of_places = False
        self.services: Mapping[str, Service] = {}
        self.opened: set[int] = set()
        self._answers: dict[int, Answer] = {}  # of coroutines, by session
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, row: Mapping[str, Any], seeds: Mapping[str, int]) -> HostedSession:
        """Reset the environment of this row; wait for a process, and for room at the environment's server.

        Raises FailedError if the row chooses no environment, or its reset failed.
        """
        columns = dict(row)
        value = "" if "" in self.about else columns.pop("environment", None)
        if not isinstance(value, str) or value not in self.about:
            known = ", ".join(self.about)
            raise FailedError(f"the row's column `environment` is {value!r}, but environment.by_name has only {known}.")
        columns = {name: cell for name, cell in columns.items() if name.lower() not in self.about[value]["withheld"]}
        try:
            json.dumps(columns, default=as_json)
        except (TypeError, ValueError) as error:
            raise FailedError(f"open: {error}") from None
        start = {"environment": value, "row": columns, "seeds": dict(seeds)}
        began, refusals = time.monotonic(), 0
        while True:
            session = HostedSession(self, next(self.numbers), self.about[value], start)
            self.open_sessions += 1
            try:
                await session.begin()
            except BaseException as error:
                await session.close()
                may_leave = self.opened or time.monotonic() - began < self.config.wall_seconds  # a session of ours
                if not isinstance(error, FailedError) or FULL not in str(error) or not may_leave:
                    raise
                refusals += 1
                if refusals == 2 and not self._warned_of_places:  # a session that has just ended may keep its place
                    self._warned_of_places = True
                    self._say(
                        f"warning: environment: its server is full, and rollouts wait for a place: {error}. Start it "
                        "with a larger max_concurrent_envs, and set SUPPORTS_CONCURRENT_SESSIONS = True in its class."
                    )
            else:
                self.opened.add(session.number)
                return session
            await asyncio.sleep(FULL_PAUSE_S)

    @abstractmethod
    async def ask(self, session: int, message: dict[str, Any]) -> Any:
        """Send a request of a session and wait for its answer. The first request names the `environment`."""

    @abstractmethod
    def tell(self, session: int, message: dict[str, Any]) -> None:
        """Send a turn to the coroutine that asked for it."""

    @abstractmethod
    def end(self, session: int, *, broken: bool) -> None:
        """End a session. If it is `broken`, its instance and its own process are not used again."""

    def answers(self, session: int, answer: Answer) -> None:
        """Use `answer` for the turns that the coroutine of this session asks for."""
        self._answers[session] = answer

    def leave(self, session: int, *, broken: bool) -> None:
        """End a session, and forget it."""
        self._answers.pop(session, None)
        self.opened.discard(session)
        self.end(session, broken=broken)
        asyncio.get_running_loop().call_later(FAILED_COUNTS_S if broken else 0.0, self._count_ended)

    def _count_ended(self) -> None:
        self.open_sessions -= 1

    def _answer_turn_request(self, session: int, number: int, request: dict[str, Any]) -> None:
        """Answer a coroutine's request for a turn."""
        answer = self._answers.get(session)
        if answer is not None:
            self._begin(self._give(answer, session, number, request))

    async def _give(self, answer: Answer, session: int, number: int, request: dict[str, Any]) -> None:
        try:
            message = await answer(request)
        except Exception:  # `play` raises it
            return
        self.tell(session, {"answers": number, "session": session, "message": message})

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class HostedSession:
    """A rollout's environment in a process of a node. Every method raises CallLimitError or FailedError.

    `plays` is True if a coroutine or program drives the rollout; otherwise the model's calls do.
    """

    def __init__(self, hosts: Sessions, number: int, about: Mapping[str, Any], start: dict[str, Any]) -> None:
        self.number, self.plays, self.is_program = number, bool(about["plays"]), bool(about["program"])
        self.tools: list[dict[str, Any]] = list(about["tools"])
        self.opening: list[Message] | None = None  # the messages of `reset`; None: the messages of the row
        self.text = ""  # of `reset`, for the end of the last user message
        self._hosts, self._start, self._withheld = hosts, start, about["withheld"]
        self._broken = False

    async def begin(self) -> None:
        """Reset the environment. A coroutine or program starts later, in `play` or `run`."""
        if self.plays:
            return
        said = await self._ask({"do": "open", **self._start})
        with _reading_answer("open"):
            self.text = str(said["text"] or "")
            self.opening = None if said["messages"] is None else read_request(map(_with_text_content, said["messages"]))

    async def call(self, calls: Sequence[Mapping[str, Any]]) -> Answers:
        said = await self._ask({"do": "call", "calls": list(calls)})
        with _reading_answer("call"):
            messages = [
                {**_with_text_content(each), "role": "tool", "name": str(each["name"])} for each in said["answers"]
            ]
            errors = min(int(said["errors"]), len(calls))
            faults = tuple(map(str, said["faults"][:errors]))
            return Answers(tuple(messages), done=bool(said["done"]), errors=errors, faults=faults)

    async def finish(self) -> Outcome:
        return read_outcome(await self._ask({"do": "finish"}))

    async def _ask(self, message: dict[str, Any]) -> Any:
        try:
            return await self._hosts.ask(self.number, message)
        except (CallLimitError, FailedError) as error:
            self._broken = True
            missed = re.search(r"(?:Key|Type|Attribute)Error: (.*)", str(error))
            if missed and any(f"'{column}'" in missed[1].lower() for column in self._withheld):
                raise type(error)(f"{error}. {LEFT_OUT}") from None
            raise

    async def play(self, answer: Answer) -> Outcome:
        """Run the coroutine to its end; `answer` supplies its turns."""
        failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def answer_or_fail(request: Mapping[str, Any]) -> Message:
            try:
                return await answer(request)
            except Exception as error:
                if not failed.done():
                    failed.set_exception(error)
                raise

        self._hosts.answers(self.number, answer_or_fail)
        ended = asyncio.ensure_future(self._ask({"do": "play", **self._start}))
        try:
            await asyncio.wait({ended, failed}, return_when=asyncio.FIRST_COMPLETED)
            return read_outcome((failed if failed.done() else ended).result())
        finally:
            ended.cancel()
            failed.cancel()

    async def run(self, endpoint: Mapping[str, str]) -> Outcome:
        """Run the program, or ask the service for a rollout. `endpoint`: URL and key of the model."""
        ask = self._hosts.services.get(self._start["environment"], self._ask)
        return read_outcome(await ask({"do": "play", **self._start, "endpoint": dict(endpoint)}))

    async def close(self) -> None:
        """Release the process. It is killed if it still computes or something failed in it."""
        self._hosts.leave(self.number, broken=self._broken)


@contextlib.contextmanager
def _reading_answer(do: str) -> Iterator[None]:
    """A context that reads an answer of a process. Raises FailedError if the answer has another form than ours."""
    try:
        yield
    except Exception as error:  # user code may send anything: numbers beyond a float, nested lists
        raise FailedError(f"{do}: its process answered something else ({error})") from None


def _with_text_content(message: Mapping[str, Any]) -> Message:
    """A message whose content is text."""
    return {**message, "role": str(message["role"]), "content": content_text(message["content"])}


def read_outcome(said: Mapping[str, Any]) -> Outcome:
    """The outcome of a finished rollout from the answer of its process."""
    with _reading_answer("finish"):
        reward = None if said["reward"] is None else _number(said["reward"])
        parts = {str(name): _number(value) for name, value in list(said["parts"].items())[:MAX_PARTS]}
        facts, files = dict(list(said["facts"].items())[:MAX_FACTS]), said.get("files")
        files = None if files is None else {str(name): str(text) for name, text in files.items()}
        return Outcome("ok", reward, parts, facts, said["attributes"] or {}, files=files)


def _number(value: Any) -> float:
    if math.isnan(number := float(value)):
        raise ValueError(f"{number} is no reward")
    return number
