"""Sessions of environments, in processes that can be killed: one for each rollout.

    event loop                       thread of `Workers`                    process (`serve.py`)
      Session.call ── request ──>      assigns, sends, watches  ── JSON ──>   runs the user's code
           <────── future ──────       hears, kills             <── JSON ──

An environment with blocking calls has a process for itself while its rollout lasts; killing it harms no other.
Coroutines share a process. At most `environment.processes` are started, when they are needed; sessions wait for one.
The processes of other nodes are reached in the same way (`nodes.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.config.environment import EnvironmentConfig
from rlhf.config.printing import to_stderr
from rlhf.environments.contract import content_text
from rlhf.environments.turns import Answers, CallLimitError, FailedError, Message
from rlhf.processes.channel import as_json
from rlhf.processes.confinement import Grants
from rlhf.processes.workers import DIED, TIMEOUT, Worker, Workers
from rlhf.types import Outcome

SHARED = 64  # sessions of coroutines that share a process
FULL = "CAPACITY_REACHED"  # what a server of OpenEnv answers when it has no place for another session
FULL_PAUSE_S = 0.5
MAX_PARTS, MAX_FACTS = 64, 64  # named numbers and facts of one rollout
FAILED_COUNTS_S = 10.0  # that a failed session counts as open: where all fail at once, not every new one is opened

Answer = Callable[[Mapping[str, Any]], Awaitable[Message]]


@dataclass(eq=False)
class _Seat:
    """A session in the thread of the workers."""

    number: int
    blocking: bool
    worker: Worker | None = None  # None: it waits for one
    asked: dict[int, tuple[str, asyncio.Future[Any]]] = field(default_factory=dict)  # requests that have no answer yet
    waiting: list[dict[str, Any]] = field(default_factory=list)  # messages until it has a worker
    lost: Exception | None = None


class Sessions:
    """The sessions of one node in the event loop; a derived class reaches their processes.

    Args:
        about: of each environment, by the value of the column that chooses it: {"tools", "rewards", "blocking",
            "plays"}.

    Attributes:
        opened: sessions that were reset; another node may have the same set.
        open_sessions: how many this node has, those that wait for a process too; see FAILED_COUNTS_S.
    """

    numbers = itertools.count(1)  # of the sessions of all nodes

    def __init__(self, config: EnvironmentConfig, about: dict[str, dict[str, Any]]) -> None:
        self.config, self.about, self.open_sessions = config, about, 0
        self.opened: set[int] = set()
        self._answers: dict[int, Answer] = {}  # of coroutines, by session
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, row: Mapping[str, Any], seeds: Mapping[str, int]) -> HostedSession:
        """Wait for a process, and for a place at the environment's server, and reset the environment of this row.

        Raises:
            FailedError: the row chooses no environment, or its reset failed.
        """
        columns = dict(row)
        value = "" if "" in self.about else columns.pop("environment", None)
        if not isinstance(value, str) or value not in self.about:
            known = ", ".join(self.about)
            raise FailedError(f"the row's column `environment` is {value!r}, and environment.by_name has {known}.")
        try:
            json.dumps(columns, default=as_json)
        except (TypeError, ValueError) as error:
            raise FailedError(f"open: {error}") from None
        start = {"environment": value, "row": columns, "seeds": dict(seeds)}
        first = time.monotonic()
        while True:
            session = HostedSession(self, next(self.numbers), self.about[value], start)
            self.open_sessions += 1
            try:
                await session.begin()
            except BaseException as error:
                await session.close()
                ours = self.opened or time.monotonic() - first < self.config.wall_seconds  # one of ours will leave
                if not isinstance(error, FailedError) or FULL not in str(error) or not ours:
                    raise
            else:
                self.opened.add(session.number)
                return session
            await asyncio.sleep(FULL_PAUSE_S)

    @abstractmethod
    async def ask(self, session: int, message: dict[str, Any]) -> Any:
        """Send a request of a session, and wait for its answer; the first one names its `environment`."""

    @abstractmethod
    def tell(self, session: int, message: dict[str, Any]) -> None:
        """Send the turn that a coroutine has asked for."""

    @abstractmethod
    def end(self, session: int, *, broken: bool) -> None:
        """End a session; `broken`: something failed in it, so its instance and its own process are not used again."""

    def answers(self, session: int, answer: Answer) -> None:
        """From now on `answer` gives the turns that the coroutine of this session asks for."""
        self._answers[session] = answer

    def leave(self, session: int, *, broken: bool) -> None:
        """`end`, by the session itself."""
        self._answers.pop(session, None)
        self.opened.discard(session)
        self.end(session, broken=broken)
        asyncio.get_running_loop().call_later(FAILED_COUNTS_S if broken else 0.0, self._one_less)

    def _one_less(self) -> None:
        self.open_sessions -= 1

    def _answer(self, session: int, number: int, request: dict[str, Any]) -> None:
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


class Hosts(Workers, Sessions):
    """The processes of a run's environments on this node; one event loop at a time opens sessions.

    Raises:
        ValueError: a class or function cannot be loaded or offered to a model, and why.
        RuntimeError: the processes did not start in time.
    """

    shared_processes = 8 * SHARED  # that the tools of all sessions in one process may start
    end_s = 2.0  # for the `close()` of the instances

    def __init__(
        self, config: EnvironmentConfig, tools: Sequence[str] = (), *, say: Callable[[str], None] = to_stderr
    ) -> None:
        Sessions.__init__(self, config, {})
        self.tools = tools
        parts = {value: part.model_dump() for value, part in config.parts.items()} or {
            "": {"name": None, "options": {}}
        }
        hello = {"environments": parts, "tools": list(tools), "wall_seconds": config.wall_seconds}
        names = [*(part["name"] or "" for part in parts.values()), *tools]
        self._waiting: deque[_Seat] = deque()
        self._seats: dict[int, _Seat] = {}
        self._request_numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        python = config.python or sys.executable
        if shutil.which(python) is None:
            raise ValueError(
                f"environment.python={python}: no program is there. Name an interpreter (venv/bin/python)."
            )
        Workers.__init__(
            self,
            "environment",
            "rlhf.environments.serve",
            hello,
            code=list(dict.fromkeys(name for name in names if ":" in name)),
            size=1,
            cpu_seconds=config.cpu_seconds,
            wall_seconds=config.wall_seconds,
            memory_mb=config.memory_mb,
            grants=Grants(config.env, config.network, config.files),
            template=True,
            python=python,
            path=None if python == sys.executable else [os.getcwd()],
            say=say,
        )
        self.about = next(w.about for w in self._workers.values() if w.about is not None)

    async def ask(self, session: int, message: dict[str, Any]) -> Any:
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = self._loop.create_future()
        request = {**message, "id": next(self._request_numbers), "session": session}
        try:
            self.call_soon(self._ask, session, request, future)
        except RuntimeError as error:
            raise FailedError(f"{message['do']}: {error}") from None
        return await future

    def tell(self, session: int, message: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # they are closed
            self.call_soon(self._tell, session, message)

    def end(self, session: int, *, broken: bool) -> None:
        with contextlib.suppress(RuntimeError):
            self.call_soon(self._end, session, broken)

    # --- in the thread of the workers ---

    def _ask(self, session: int, message: dict[str, Any], future: asyncio.Future[Any]) -> None:
        seat = self._seats.get(session)
        if seat is None and "environment" in message:
            blocking = self.about[message["environment"]]["blocking"]
            seat = self._seats[session] = _Seat(session, blocking)
            self._waiting.append(seat)
        if seat is None or seat.lost is not None:
            self._resolve(future, FailedError("the session has ended") if seat is None else seat.lost)
            return
        seat.asked[message["id"]] = message["do"], future
        self._deliver(seat, message)

    def _deliver(self, seat: _Seat, message: dict[str, Any]) -> None:
        if seat.worker is None:
            seat.waiting.append(message)
            return
        seat.worker.watch.start(seat.worker.pid)
        self.send(seat.worker, message)

    def _end(self, session: int, broken: bool) -> None:
        seat = self._seats.pop(session, None)
        if seat is None:  # it has asked nothing
            return
        broken = broken or bool(seat.asked)  # it was cancelled in the middle of a call
        for _, future in seat.asked.values():
            self._resolve(future, FailedError("the session has ended"))
        if seat in self._waiting:
            self._waiting.remove(seat)
        worker = seat.worker
        if worker is None or worker.doomed:
            return
        del worker.work[session]
        if broken and seat.blocking:  # it may compute for ever, or hold memory for good
            self.kill(worker, DIED)
            return
        self.send(worker, {"session": session, "do": "close", "broken": broken})
        self._rest(worker)

    def _rest(self, worker: Worker) -> None:
        """Stop the watch of a process of which nothing is asked."""
        if not any(seat.asked for seat in worker.work.values()):
            worker.watch.stop()
        if not worker.work:
            worker.kind = None

    def most_processes(self, worker: Worker) -> int:
        """Also where all tools are built in: the program of a model may fork for ever."""
        return self.shared_processes if worker.kind == "shared" else self._processes

    def on_turn(self) -> None:
        """Give processes to the sessions that wait, and have more of them started."""
        idle = [worker for worker in self.free() if worker.kind is None]
        sharing = [worker for worker in self.free() if worker.kind == "shared"]
        left: deque[_Seat] = deque()
        while self._waiting:
            seat = self._waiting.popleft()
            room = [worker for worker in sharing if len(worker.work) < SHARED]
            if room and not seat.blocking:
                worker = room[0]
            elif idle:
                worker = idle.pop(0)
                worker.kind = "own" if seat.blocking else "shared"
                sharing += [] if seat.blocking else [worker]
            else:
                left.append(seat)
                continue
            seat.worker = worker
            worker.work[seat.number] = seat
            for message in seat.waiting:
                self._deliver(seat, message)
            seat.waiting.clear()
        self._waiting = left
        if left:
            blocking = sum(seat.blocking for seat in left)
            needed = blocking + -(-(len(left) - blocking) // SHARED)
            busy = sum(worker.kind is not None for worker in self.free())
            self.size = max(self.size, min(self.config.processes, busy + needed))

    def on_message(self, worker: Worker, message: Any) -> None:
        if "alive" not in message and "asks" in message:
            self._asks(worker, message)
        elif "id" in message:
            self._answered(worker, message)
        if worker.watch.running:
            worker.watch.start(worker.pid)

    def _asks(self, worker: Worker, message: dict[str, Any]) -> None:
        """A coroutine asks for a turn."""
        session, number, request = int(message["session"]), int(message["asks"]), dict(message["request"])
        if session in worker.work and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer, session, number, request)

    def _answered(self, worker: Worker, message: dict[str, Any]) -> None:
        seat = next((seat for seat in worker.work.values() if message["id"] in seat.asked), None)
        if seat is None:
            return  # it has left meanwhile
        do, future = seat.asked.pop(message["id"])
        if "error" not in message:
            self._resolve(future, message["result"])
        elif message["limit"] and do == "call":
            self._resolve(future, CallLimitError(str(message["error"])))
        else:
            self._resolve(future, FailedError(f"{do}: {message['error']}"))
        self._rest(worker)

    def on_gone(self, worker: Worker, why: str, detail: str) -> None:
        seats = list(worker.work.values())
        over_limit = why == TIMEOUT or detail.startswith("over ")
        asking = [seat for seat in seats if seat.asked]
        for seat in seats:
            do = next((do for do, _ in seat.asked.values()), "between calls")
            if over_limit and do == "call" and len(asking) == 1:
                seat.lost = CallLimitError(detail)
            else:
                seat.lost = FailedError(f"{do}: {detail}")
            for _, future in seat.asked.values():
                self._resolve(future, seat.lost)
            seat.asked.clear()
        worker.work.clear()

    def on_end(self, reason: str) -> None:
        for seat in self._seats.values():
            seat.lost = FailedError(reason or "the environments were closed")
            for _, future in seat.asked.values():
                self._resolve(future, seat.lost)
            seat.asked.clear()

    def _resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        """Give a future its value or exception, in its loop."""

        def resolve() -> None:
            if not future.done():
                future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            future.get_loop().call_soon_threadsafe(resolve)

    def _tell(self, session: int, message: dict[str, Any]) -> None:
        seat = self._seats.get(session)
        if seat is not None and seat.worker is not None and seat.lost is None:
            self._deliver(seat, message)


class HostedSession:
    """A session in a process of a node; see `turns.Session`."""

    def __init__(self, hosts: Sessions, number: int, about: Mapping[str, Any], start: dict[str, Any]) -> None:
        self.number, self.plays = number, bool(about["plays"])
        self.tools: list[dict[str, Any]] = list(about["tools"])
        self.opening: list[Message] | None = None
        self.text = ""
        self._hosts, self._start = hosts, start
        self._broken = False

    async def begin(self) -> None:
        """Reset the environment; a coroutine begins when it is played."""
        if self.plays:
            return
        said = await self._ask({"do": "open", **self._start})
        with _checked("open"):
            self.text = str(said["text"] or "")
            self.opening = None if said["messages"] is None else [_plain(message) for message in said["messages"]]

    async def call(self, calls: Sequence[Mapping[str, Any]]) -> Answers:
        said = await self._ask({"do": "call", "calls": list(calls)})
        with _checked("call"):
            messages = [
                {**_plain(message), "role": "tool", "name": str(message["name"])} for message in said["answers"]
            ]
            return Answers(tuple(messages), done=bool(said["done"]), errors=min(int(said["errors"]), len(calls)))

    async def finish(self) -> Outcome:
        return outcome_of(await self._ask({"do": "finish"}))

    async def _ask(self, message: dict[str, Any]) -> Any:
        try:
            return await self._hosts.ask(self.number, message)
        except (CallLimitError, FailedError):
            self._broken = True
            raise

    async def play(self, answer: Answer) -> Outcome:
        """Run the coroutine to its end; `answer` gives it the turns that it asks for."""
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
            return outcome_of((failed if failed.done() else ended).result())
        finally:
            ended.cancel()
            failed.cancel()

    async def close(self) -> None:
        """Give the process back, or have it killed if it still computes or something failed in it."""
        self._hosts.leave(self.number, broken=self._broken)


@contextlib.contextmanager
def _checked(do: str) -> Iterator[None]:
    """A context that reads what a process says; FailedError if it is not what our code sends."""
    try:
        yield
    except Exception as error:  # it may send anything: numbers beyond a float, nested lists
        raise FailedError(f"{do}: its process answered something else ({error})") from None


def _plain(message: Mapping[str, Any]) -> Message:
    """A message whose content is text."""
    return {**message, "role": str(message["role"]), "content": content_text(message["content"])}


def outcome_of(said: Mapping[str, Any]) -> Outcome:
    """What a process says of a finished rollout."""
    with _checked("finish"):
        reward = None if said["reward"] is None else _finite(said["reward"])
        parts = {str(name): _finite(value) for name, value in list(said["parts"].items())[:MAX_PARTS]}
        return Outcome("ok", reward, parts, dict(list(said["facts"].items())[:MAX_FACTS]), said["attributes"] or {})


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} is no reward")
    return number
