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
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.config.environment import EnvironmentConfig
from rlhf.config.printing import to_stderr
from rlhf.environments.program import named_files
from rlhf.environments.python_tool import MAX_PROCESSES
from rlhf.environments.sessions import Sessions
from rlhf.environments.turns import CallLimitError, FailedError
from rlhf.processes.confinement import Grants
from rlhf.processes.workers import DIED, TIMEOUT, Worker, Workers

SHARED = 64  # sessions of coroutines that share a process


@dataclass(eq=False)
class _Seat:
    """A session as the thread of the workers knows it."""

    number: int
    blocking: bool
    once: bool  # its process is not used again, so that processes which a program left running end too
    worker: Worker | None = None  # None: it waits for one
    asked: dict[int, tuple[str, asyncio.Future[Any]]] = field(default_factory=dict)  # requests without an answer
    waiting: list[dict[str, Any]] = field(default_factory=list)  # messages until it has a worker
    lost: Exception | None = None


def _caused_by_model(do: str, seat: _Seat) -> bool:
    """True for tool calls and programs. If these exceed a limit, the model gets the blame."""
    return do == "call" or (do == "play" and seat.blocking)


def _home(folder: Path) -> Path:
    """The folder of a program; for the `bin` of an interpreter its parent, which also has the packages."""
    parent = folder.parent
    has_packages = any(any(parent.glob(name)) for name in ("pyvenv.cfg", "lib/python*", "lib/node_modules"))
    return parent if folder.name == "bin" and parent != Path("/") and has_packages else folder


def readable_folders(commands: Sequence[Sequence[str]], python: str) -> list[str]:
    """The folders that programs need to read: those of their interpreters and of the files in their commands.

    Raises ValueError if a program or script does not exist, or lies directly in /.
    """
    readable: set[Path] = set()
    for command in filter(None, commands):
        program = shutil.which(python if command[0] == "python" else command[0])
        if program is None:
            raise ValueError(
                f"environment.command={list(command)}: program {command[0]} was not found. Name an existing one, such "
                "as venv/bin/python; `python` means environment.python, by default the interpreter of the run."
            )
        script = next((word for word in command[1:] if not word.startswith("-")), "")
        if script.endswith(".py") and not os.path.exists(script):
            raise ValueError(f"environment.command={list(command)}: there is no file {script}. Correct its path.")
        own = {_home(Path(program).absolute().parent), _home(Path(program).resolve().parent)}
        for path in (Path(command[number]).absolute() for number in named_files(command)):
            own.add(path if path.is_dir() else path.parent)
        if Path("/") in own:
            raise ValueError(
                f"environment.command={list(command)}: its program, or a file that it names, lies directly in /, so "
                "it could read every file. Move it into a folder of its own."
            )
        readable |= own
    return sorted(map(str, readable))


class Hosts(Workers, Sessions):
    """The processes of a run's environments on this node; one event loop at a time opens sessions.

    Args:
        port: the port of the endpoint, to which programs may connect.
        answers: columns that hold answers; see `serve.load`.

    Raises ValueError if a class or function cannot be loaded or offered to a model, RuntimeError if no process starts.
    """

    shared_processes = (MAX_PROCESSES + 4) * SHARED  # so that calls of `python`, each in its bound, do not exceed it
    end_s = 2.0  # for the `close()` of the instances

    def __init__(
        self,
        config: EnvironmentConfig,
        tools: Sequence[str] = (),
        *,
        say: Callable[[str], None] = to_stderr,
        port: int = 0,
        answers: Sequence[str] = (),
    ) -> None:
        Sessions.__init__(self, config, {})
        self.tools, self.port = tools, port
        self._waiting: deque[_Seat] = deque()
        self._seats: dict[int, _Seat] = {}
        self._request_numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        python = config.python or sys.executable
        if shutil.which(python) is None:
            raise ValueError(
                f"environment.python={python}: the program was not found. Name an interpreter (venv/bin/python)."
            )
        readable = readable_folders([part.command for part in config.parts.values()], python)
        reach = {"env": config.env, "readable": [*readable, *config.files], "files": config.files}
        parts: dict[str, dict[str, Any]] = {}
        for value, part in config.parts.items():  # without the address of a service, which may hold a password
            program = part.model_dump(include={"command", "timeout_s", "returned_files"}) | reach
            parts[value] = part.model_dump(include={"name", "options", "gives_answer"}) | {"program": program}
        parts = parts or {"": {"name": None, "options": {}, "gives_answer": False}}
        hello = {"environments": parts, "tools": list(tools), "wall_seconds": config.wall_seconds, "answers": answers}
        names = [*(part["name"] or "" for part in parts.values()), *tools]
        Workers.__init__(
            self,
            "environment",
            "rlhf.environments.serve",
            hello,
            code=list(dict.fromkeys(name for name in names if ":" in name)),
            size=1,
            **config.model_dump(include={"cpu_seconds", "wall_seconds", "memory_mb"}),
            grants=Grants(config.env, config.network, config.files, readable, port),
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
            about = self.about[message["environment"]]
            seat = self._seats[session] = _Seat(session, about["blocking"], once=about["program"])
            self._waiting.append(seat)
        if seat is None or seat.lost is not None:
            self._resolve(future, FailedError("the session has ended") if seat is None else seat.lost)
            return
        seat.asked[message["id"]] = message["do"], future
        self._send_or_queue(seat, message)

    def _send_or_queue(self, seat: _Seat, message: dict[str, Any]) -> None:
        if seat.worker is None:
            seat.waiting.append(message)
            return
        seat.worker.watch.start(seat.worker.pid)
        self.send(seat.worker, message)

    def _end(self, session: int, broken: bool) -> None:
        seat = self._seats.pop(session, None)
        if seat is None:  # the session has sent no request
            return
        broken = broken or bool(seat.asked)  # cancelled in the middle of a call
        self._lose(seat, FailedError("the session has ended"))
        if seat in self._waiting:
            self._waiting.remove(seat)
        worker = seat.worker
        if worker is None or worker.doomed:
            return
        del worker.work[session]
        if seat.once or (broken and seat.blocking):  # it may compute forever, or never free its memory
            self.kill(worker, DIED)
            return
        self.send(worker, {"session": session, "do": "close", "broken": broken})
        self._rest(worker)

    def _rest(self, worker: Worker) -> None:
        """Stop the watch of a process without open requests."""
        if not any(seat.asked for seat in worker.work.values()):
            worker.watch.stop()
        if not worker.work:
            worker.kind = None

    def max_processes(self, worker: Worker) -> int:
        """The limit of processes; it holds for built-in tools too, since a model's program may fork forever."""
        return self.shared_processes if worker.kind == "shared" else self._processes

    def on_turn(self) -> None:
        """Give processes to waiting sessions, and start more processes if needed."""
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
                self._send_or_queue(seat, message)
            seat.waiting.clear()
        self._waiting = left
        if left:
            blocking = sum(seat.blocking for seat in left)
            needed = blocking + -(-(len(left) - blocking) // SHARED)
            busy = sum(worker.kind is not None for worker in self.free())
            self.size = max(self.size, min(self.config.processes, busy + needed))

    def on_message(self, worker: Worker, message: Any) -> None:
        if "alive" not in message and "asks" in message:
            self._on_turn_request(worker, message)
        elif "id" in message:
            self._on_result(worker, message)
        if worker.watch.running:
            worker.watch.start(worker.pid)

    def _on_turn_request(self, worker: Worker, message: dict[str, Any]) -> None:
        """Forward a coroutine's request for a turn to the event loop."""
        session, number, request = int(message["session"]), int(message["asks"]), dict(message["request"])
        if session in worker.work and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer_turn_request, session, number, request)

    def _on_result(self, worker: Worker, message: dict[str, Any]) -> None:
        seat = next((seat for seat in worker.work.values() if message["id"] in seat.asked), None)
        if seat is None:
            return  # the session has ended meanwhile
        do, future = seat.asked.pop(message["id"])
        if "error" not in message:
            self._resolve(future, message["result"])
        elif message["limit"] and _caused_by_model(do, seat):
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
            is_models = over_limit and _caused_by_model(do, seat) and len(asking) == 1
            self._lose(seat, CallLimitError(detail) if is_models else FailedError(f"{do}: {detail}"))
        worker.work.clear()

    def on_end(self, reason: str) -> None:
        for seat in self._seats.values():
            self._lose(seat, FailedError(reason or "the environments were closed"))

    def _lose(self, seat: _Seat, error: Exception) -> None:
        """End a session with an error: its open requests and all later ones get it."""
        seat.lost = error
        for _, future in seat.asked.values():
            self._resolve(future, error)
        seat.asked.clear()

    def _resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        """Set the value or exception of a future, in its event loop."""

        def resolve() -> None:
            if not future.done():
                future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            future.get_loop().call_soon_threadsafe(resolve)

    def _tell(self, session: int, message: dict[str, Any]) -> None:
        seat = self._seats.get(session)
        if seat is not None and seat.worker is not None and seat.lost is None:
            self._send_or_queue(seat, message)
