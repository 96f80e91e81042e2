"""Sessions of environments, in processes that can be killed: one for each rollout.

    event loop                       thread of `Workers`                    process (`serve.py`)
      Session.call ── request ──>      assigns, sends, watches  ── JSON ──>   runs the user's code
           <────── future ──────       hears, kills             <── JSON ──

An environment with blocking calls has a process for itself while its rollout lasts; killing it harms no other.
Coroutines share a process. At most `environment.processes` are started, when they are needed; sessions wait for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from rlhf.config.environment import EnvironmentConfig
from rlhf.config.printing import to_stderr
from rlhf.environments.program import named_files
from rlhf.environments.python_tool import MAX_PROCESSES
from rlhf.environments.sessions import HostedSession, Service
from rlhf.environments.turns import CallLimitError, FailedError
from rlhf.processes.channel import as_json
from rlhf.processes.confinement import Grants
from rlhf.processes.workers import DIED, TIMEOUT, Worker, Workers

SHARED = 64  # sessions of coroutines that share a process
FULL = "CAPACITY_REACHED"  # in the answer of an OpenEnv server without room for another session
FULL_PAUSE_S = 0.5


def _caused_by_model(do: str, session: HostedSession) -> bool:
    """True for tool calls and programs. If these exceed a limit, the model gets the blame."""
    return do == "call" or (do == "play" and session.blocking)


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


class Hosts(Workers):
    """The processes of a run's environments on this node; one event loop at a time opens sessions.

    Args:
        port: the port of the endpoint, to which programs may connect.
        answers: columns that hold answers; see `serve.load`.
        alone: False if other workers of the run have sessions too, which may hold all places of a server.

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
        alone: bool = True,
    ) -> None:
        self.config, self._alone = config, alone
        self.services: Mapping[str, Service] = {}  # by the value of the column that chooses the environment
        self._opened: set[HostedSession] = set()
        self._warned_of_places = False
        self._session_numbers = itertools.count(1)
        self.tools, self.port = tools, port
        self._waiting: deque[HostedSession] = deque()
        self._sessions: set[HostedSession] = set()  # those that have sent a request, and have not ended
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
            made = {"name": part.code, "options": part.arguments, "gives_answer": part.gives_answer}
            parts[value] = made | {"program": program}
        parts = parts or {"": {"name": None, "options": {}, "gives_answer": False}}
        hello = {"environments": parts, "tools": list(tools), "wall_seconds": config.wall_seconds, "answers": answers}
        names = [*(part["name"] or "" for part in parts.values()), *tools]
        names += [part.adapted for part in config.parts.values() if part.adapted]
        Workers.__init__(
            self,
            "environment",
            "rlhf.environments.serve",
            hello,
            code=list(dict.fromkeys(name for name in names if ":" in name)),
            size=1,
            **config.model_dump(include={"cpu_seconds", "wall_seconds", "memory_mb"}),
            grants=Grants(
                config.env,
                config.network,
                config.files,
                readable,
                port or config.reached_port,
                code_connects=config.reached_port > 0,
            ),
            template=True,
            python=python,
            path=None if python == sys.executable else [os.getcwd()],
            say=say,
        )
        # by the same value: {"tools", "rewards", "blocking", "plays", "program", "withheld", "rows"} of the environment
        self.about = next(w.about for w in self._workers.values() if w.about is not None)

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
            session = HostedSession(self, next(self._session_numbers), self.about[value], start)
            try:
                await session.begin()
            except BaseException as error:
                await session.close()
                in_time = time.monotonic() - began < self.config.wall_seconds
                may_leave = self._opened or not self._alone or in_time  # a session of this run
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
                self._opened.add(session)
                return session
            await asyncio.sleep(FULL_PAUSE_S)

    async def ask(self, session: HostedSession, message: dict[str, Any]) -> Any:
        """Send a request of a session and wait for its answer. The first request names the `environment`."""
        self._loop = asyncio.get_running_loop()
        future: Future[Any] = Future()
        request = {**message, "id": next(self._request_numbers), "session": session.number}
        try:
            self.call_soon(self._ask, session, request, future)
        except RuntimeError as error:
            raise FailedError(f"{message['do']}: {error}") from None
        return await asyncio.wrap_future(future)

    def end(self, session: HostedSession, *, broken: bool) -> None:
        """End a session. If it is `broken`, its instance and its own process are not used again."""
        session.answer = None
        self._opened.discard(session)
        with contextlib.suppress(RuntimeError):  # they are closed
            self.call_soon(self._end, session, broken)

    async def _give_turn(self, session: HostedSession, number: int, request: dict[str, Any]) -> None:
        """Answer a coroutine's request for a turn, unless its session has ended; an error ends the session."""
        with contextlib.suppress(RuntimeError):  # they are closed
            try:
                message = await session.answer(request) if session.answer is not None else None
            except Exception as error:
                self.call_soon(self._lose, session, error)
            else:
                self.call_soon(self._tell, session, {"answers": number, "session": session.number, "message": message})

    # --- in the thread of the workers ---

    def _ask(self, session: HostedSession, message: dict[str, Any], future: Future[Any]) -> None:
        if session.lost is not None:
            self._resolve(future, session.lost)
            return
        if session not in self._sessions:
            self._sessions.add(session)
            self._waiting.append(session)
        session.asked[message["id"]] = message["do"], future
        self._send_or_queue(session, message)

    def _send_or_queue(self, session: HostedSession, message: dict[str, Any]) -> None:
        if session.worker is None:
            session.queued.append(message)
            return
        session.worker.watch.start(session.worker.pid)
        self.send(session.worker, message)

    def _end(self, session: HostedSession, broken: bool) -> None:
        broken = broken or bool(session.asked)  # cancelled in the middle of a call
        self._lose(session, FailedError("the session has ended"))
        self._sessions.discard(session)
        if session in self._waiting:
            self._waiting.remove(session)
        worker = session.worker
        if worker is None or worker.doomed:
            return
        del worker.work[session.number]
        if session.is_program or (broken and session.blocking):  # it may compute forever, or never free its memory
            self.kill(worker, DIED)
            return
        self.send(worker, {"session": session.number, "do": "close", "broken": broken})
        self._rest(worker)

    def _rest(self, worker: Worker) -> None:
        """Stop the watch of a process without open requests."""
        if not any(session.asked for session in worker.work.values()):
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
        left: deque[HostedSession] = deque()
        while self._waiting:
            session = self._waiting.popleft()
            room = [worker for worker in sharing if len(worker.work) < SHARED]
            if room and not session.blocking:
                worker = room[0]
            elif idle:
                worker = idle.pop(0)
                worker.kind = "own" if session.blocking else "shared"
                sharing += [] if session.blocking else [worker]
            else:
                left.append(session)
                continue
            session.worker = worker
            worker.work[session.number] = session
            for message in session.queued:
                self._send_or_queue(session, message)
            session.queued.clear()
        self._waiting = left
        if left:
            blocking = sum(session.blocking for session in left)
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
        """Have the event loop answer a coroutine's request for a turn."""
        session = worker.work.get(message["session"])
        if session is not None and self._loop is not None and not self._loop.is_closed():
            turn = self._give_turn(session, int(message["asks"]), dict(message["request"]))
            with contextlib.suppress(RuntimeError):  # the loop is closed in this moment
                session.turns.append(asyncio.run_coroutine_threadsafe(turn, self._loop))

    def _on_result(self, worker: Worker, message: dict[str, Any]) -> None:
        session = next((session for session in worker.work.values() if message["id"] in session.asked), None)
        if session is None:
            return  # the session has ended meanwhile
        do, future = session.asked.pop(message["id"])
        if "error" not in message:
            self._resolve(future, message["result"])
        elif message["limit"] and _caused_by_model(do, session):
            self._resolve(future, CallLimitError(str(message["error"])))
        else:
            self._resolve(future, FailedError(f"{do}: {message['error']}"))
        self._rest(worker)

    def on_gone(self, worker: Worker, why: str, detail: str) -> None:
        sessions = list(worker.work.values())
        over_limit = why == TIMEOUT or detail.startswith("over ")
        asking = [session for session in sessions if session.asked]
        for session in sessions:
            do = next((do for do, _ in session.asked.values()), "between calls")
            is_models = over_limit and _caused_by_model(do, session) and len(asking) == 1
            self._lose(session, CallLimitError(detail) if is_models else FailedError(f"{do}: {detail}"))
        worker.work.clear()

    def on_end(self, reason: str) -> None:
        for session in self._sessions:
            self._lose(session, FailedError(reason or "the environments were closed"))

    def _lose(self, session: HostedSession, error: Exception) -> None:
        """End a session with an error: its open requests and all later ones get it."""
        session.lost = error
        for _, future in session.asked.values():
            self._resolve(future, error)
        session.asked.clear()

    def _resolve(self, future: Future[Any], value: Any) -> None:
        """Set the value or exception of a future."""
        with contextlib.suppress(InvalidStateError):  # its caller was cancelled
            future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)

    def _tell(self, session: HostedSession, message: dict[str, Any]) -> None:
        if session.worker is not None and session.lost is None:
            self._send_or_queue(session, message)
