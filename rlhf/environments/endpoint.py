"""The worker's half of the endpoint: it starts the endpoint's process and answers requests from the rollouts' logs.

    Endpoint.play ── open: token ──>  process of `sampling/endpoint.py`
         │        <── ask ──────────    (HTTP <── program, in a process of the environments)
         └── Branches.turn ── answer ──>

Each rollout has a key of its own. Every turn is sampled to the end and recorded, even if its client no longer waits. If
the process dies or hangs, its rollouts fail, and the next rollout starts it again at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from rlhf.config.grpo import GRPOConfig
from rlhf.data.messages import read_request
from rlhf.environments.branches import Branches, TooLongError
from rlhf.environments.turns import FailedError
from rlhf.processes.channel import MAX_BYTES
from rlhf.processes.output import OutputPipe, PrintedLines
from rlhf.sampling.chat import BACKLOG, ENDED, MAX_CONNECTIONS
from rlhf.types import Outcome

PING_S, MAX_PINGS = 5.0, 4  # a silent process is pinged after so many seconds; after so many pings it counts as hung
MAX_IGNORED = 64  # names of ignored keys that a run reports
FULL = {"full": True}  # the answer to a conversation that is too long

Run = Callable[[Mapping[str, str]], Awaitable[Outcome]]


class Endpoint:
    """The address at which programs and agents of services reach the model; `say` receives warnings.

    Raises ValueError if this node does not have the configured address.
    """

    def __init__(self, config: GRPOConfig, say: Callable[[str], None]) -> None:
        self._model = config.model.model_dump(include={"dtype", "trust_remote_code"}) | {
            "model": config.model.path,
            "max_model_len": config.max_sequence_tokens,
        }
        self._say, self._start_s = say, config.cluster.start_deadline_s
        self._printed = PrintedLines("endpoint", [""], say)
        try:
            self._listening = socket.create_server((config.environment.endpoint_host, 0), backlog=BACKLOG)
        except OSError as error:
            raise ValueError(
                f"environment.endpoint_host={config.environment.endpoint_host}: this node cannot listen there "
                f"({error.strerror}). Use one of the addresses that `hostname -I` prints on it."
            ) from None
        self.host, self.port = self._listening.getsockname()[:2]
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()
        self._branches: dict[str, Branches] = {}
        self._lost: dict[str, asyncio.Future[Outcome]] = {}  # the error that ends a rollout, by key
        self._tasks: set[asyncio.Task[None]] = set()
        self._ignored: set[str] = set()

    async def play(self, branches: Branches, run: Run) -> Outcome:
        """Run a program to its end with a key of its own. Raises CallLimitError or FailedError."""
        async with self._starting:
            if self.pid is None:
                await self._start()
        key = f"sk-{secrets.token_hex(24)}"
        self._branches[key] = branches
        lost = self._lost[key] = asyncio.get_running_loop().create_future()
        self._send({"open": key, "most_tokens": branches.limits.max_sequence_tokens})
        program = asyncio.ensure_future(run({"url": f"http://{self.host}:{self.port}", "key": key}))
        try:
            await asyncio.wait({program, lost}, return_when=asyncio.FIRST_COMPLETED)
            return (lost if lost.done() else program).result()
        finally:
            del self._branches[key], self._lost[key]
            self._send({"close": key})
            program.cancel()
            lost.cancel()

    async def _start(self) -> None:
        """Start the process and wait until it serves."""
        ours, theirs = socket.socketpair()
        fds, output = [theirs.fileno(), self._listening.fileno()], OutputPipe(self._printed)
        with theirs, open(output.pipe, "wb") as pipe:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlhf.sampling.endpoint", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.PIPE,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,  # Ctrl-C only reaches the driver
            )
        asyncio.get_running_loop().add_reader(output, output.read)
        assert self._process.stdin is not None
        with self._process.stdin as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(self._model).encode())
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_BYTES)
        end = partial(self._end, self._process, self._writer, output)
        ready = b""
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                ready = await asyncio.wait_for(reader.readline(), self._start_s)
        finally:
            if not ready:
                end()
        if not ready:
            raise FailedError(
                f"the endpoint has not started within cluster.start_deadline_s={self._start_s:g} s, or has ended; the "
                "log shows its messages"
            )
        self._begin(self._serve(reader, end))

    async def _serve(self, reader: asyncio.StreamReader, end: Callable[[], None]) -> None:
        """Answer requests until the process ends or hangs."""
        pings = 0  # since its last message
        try:
            while pings <= MAX_PINGS:
                try:
                    async with asyncio.timeout(PING_S):
                        line = await reader.readline()
                except TimeoutError:
                    pings += 1
                    self._send({"ping": pings})
                    continue
                if not line:
                    break
                pings = 0
                if "ask" in (request := json.loads(line)):
                    self._begin(self._answer(request))
        except ConnectionError:
            pass
        finally:
            end()
            why = f"answered nothing for {pings * PING_S:g} s" if pings > MAX_PINGS else "ended"
            for key in list(self._lost):
                self._lose(key, FailedError(f"the process of the endpoint has {why}"))

    @staticmethod
    def _end(process: subprocess.Popen[bytes], writer: asyncio.StreamWriter, output: OutputPipe) -> None:
        """Kill the process, so that the next rollout starts another one."""
        process.kill()
        process.wait()
        writer.close()
        asyncio.get_running_loop().remove_reader(output)
        output.close()

    def _lose(self, key: str, error: Exception) -> None:
        """End a rollout with an error; `play` raises it."""
        if (lost := self._lost.get(key)) and not lost.done():
            lost.set_exception(error)

    async def _answer(self, request: Mapping[str, Any]) -> None:
        try:
            answer = await self._answer_to(request)
        except Exception as error:  # an error of the engines or the run
            self._lose(request["session"], error)
            answer = {"refused": ENDED}
        self._send({"answer": request["ask"], **answer})

    async def _answer_to(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The turn for a request of a program, or the reason why the request is refused."""
        branches = self._branches.get(request["session"])
        if branches is None:
            return {"refused": ENDED}
        self._warn_of_ignored(request["ignored"])
        if len(branches.answering) >= MAX_CONNECTIONS:
            return {"refused": f"this rollout asks for over {MAX_CONNECTIONS} turns at once"}
        tools = request["tools"]
        try:
            messages = read_request(request["messages"])
        except Exception as error:  # a client may write anything, such as arguments with 100,000 levels
            return {"refused": f"a message cannot be read: {error}"}
        try:
            if request["counts"]:
                return {"prompt_tokens": await branches.count(messages, tools)}
            asked = {"messages": messages, "tools": tools, "max_tokens": request["max_tokens"]}
            turn = await branches.turn({**asked, "offered": tools if request["parses_calls"] else []})
        except FailedError as error:  # the program may go on
            return FULL if isinstance(error, TooLongError) else {"refused": str(error)}
        if turn.completion is None:
            return FULL
        completion, prompt_ids = turn.completion, turn.prompt_ids
        return {
            "message": turn.message,
            "finish": "stop" if completion.finish_reason == "stop" else "length",
            "token_ids": completion.token_ids.tolist(),
            "logprobs": completion.logprobs.tolist(),
            "prompt_ids": prompt_ids.tolist() if request["wants_ids"] else [0] * len(prompt_ids),
        }

    def _warn_of_ignored(self, names: list[str]) -> None:
        new = sorted({*names} - self._ignored)[: MAX_IGNORED - len(self._ignored)]
        self._ignored |= {*new}
        if new:
            self._say(
                f"warning: environment: requests of programs set {', '.join(new)}. They are ignored: the run decides."
            )

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the process or its event loop has ended
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def pid(self) -> int | None:
        """The process id; None while the process does not run."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def close(self) -> None:
        """End the process."""
        self._listening.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
