"""The sessions of environments as rollouts use them; `hosts.py` reaches their processes."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlhf.data.messages import read_request
from rlhf.environments.contract import content_text
from rlhf.environments.turns import Answers, CallLimitError, FailedError, Message
from rlhf.processes.workers import Worker
from rlhf.types import Outcome

if TYPE_CHECKING:
    from rlhf.environments.hosts import Hosts

LEFT_OUT = (
    "Rows leave out columns with answers that the code of their environment does not name: name it as a parameter of "
    "`reset`, or set environment.gives_answer: true"
)
MAX_PARTS, MAX_FACTS = 64, 64  # named numbers and facts of one rollout

Answer = Callable[[Mapping[str, Any]], Awaitable[Message]]
Service = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]  # see `service.Service.play`


class HostedSession:
    """A rollout's environment in a process of a node. Every method raises CallLimitError or FailedError.

    `plays` is True if a coroutine or program drives the rollout; otherwise the model's calls do. `blocking`: it has a
    process for itself, which a program uses alone, so that processes which it left running end too.
    """

    def __init__(self, hosts: Hosts, number: int, about: Mapping[str, Any], start: dict[str, Any]) -> None:
        self.number, self.plays, self.is_program = number, bool(about["plays"]), bool(about["program"])
        self.blocking, self._opens = bool(about["blocking"]), bool(about["opens"])
        self.tools: list[dict[str, Any]] = list(about["tools"])
        self.opening: list[Message] | None = None  # the messages of `reset`; None: the messages of the row
        self.text = ""  # of `reset`, for the end of the last user message
        self._hosts, self._start, self._withheld = hosts, start, about["withheld"]
        self._broken = False
        self.answer: Answer | None = None  # gives the turns that its coroutine asks for
        # the rest is used in the thread of the workers
        self.worker: Worker | None = None  # None: it waits for one
        self.asked: dict[int, tuple[str, Future[Any]]] = {}  # requests without an answer
        self.turns: list[Future[None]] = []  # of its coroutine; the loop alone would not keep them
        self.queued: list[dict[str, Any]] = []  # messages until it has a worker
        self.lost: Exception | None = None

    async def begin(self) -> None:
        """Reset the environment, or open what it plays with. A coroutine or program starts in `play` or `run`."""
        if self.plays and not self._opens:
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
            return await self._hosts.ask(self, message)
        except (CallLimitError, FailedError) as error:
            self._broken = True
            missed = re.search(r"(?:Key|Type|Attribute)Error: (.*)", str(error))
            if missed and any(f"'{column}'" in missed[1].lower() for column in self._withheld):
                raise type(error)(f"{error}. {LEFT_OUT}") from None
            raise

    async def play(self, answer: Answer) -> Outcome:
        """Run the coroutine to its end; `answer` supplies its turns, and its errors are raised here."""
        self.answer = answer
        return read_outcome(await self._ask({"do": "play", **self._start}))

    async def run(self, endpoint: Mapping[str, str]) -> Outcome:
        """Run the program, or ask the service for a rollout. `endpoint`: URL and key of the model."""
        ask = self._hosts.services.get(self._start["environment"], self._ask)
        return read_outcome(await ask({"do": "play", **self._start, "endpoint": dict(endpoint)}))

    async def close(self) -> None:
        """Release the process. It is killed if it still computes or something failed in it."""
        self._hosts.end(self, broken=self._broken)


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
