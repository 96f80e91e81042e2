"""The nodes of one run: they meet, compare what is installed, start Ray, and end together with the program's status.

    nodes.py up ...       one node of a cluster that this run makes; ray_node_setup.sh calls it and explains it
    nodes.py run ...      a program on a Ray cluster that is up; submit.sh and kuberay.yaml call it
    nodes.py report       what is installed here, as JSON
    nodes.py follow-job   the log of a Ray job until it ends, with the job's exit status; submit.sh calls it

`up` needs one TCP port beside Ray's own: every worker holds a connection to the head, on which both sides prove that
they know the Ray token without sending it. Over it go the versions, the word to start, and in the end the status; when
it breaks, the other side is gone. Standard library alone, so that it can say what is missing.

    worker                     head
      <- nonce ----------------
      -- nonce, proof, report ->     all here? all the same?  ray start --head
      <- proof, start ADDRESS --
      -- joined --------------->     all joined?  the program
      <- end STATUS ------------
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import hashlib
import hmac
import importlib.util
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RAY_IS_UP = b"Ray runtime started."  # what `ray start` prints
PING_EVERY_S = 10.0
SILENCE_S = 60.0  # a peer that is this quiet has lost power or network
PROGRAM_GRACE_S = 60.0  # the program ends its engines on SIGTERM
RAY_GRACE_S = 15.0
CONNECT_EVERY_S = 0.5
LOG_LINES = 30
LOG_SILENCE_S = 60.0  # then the job is asked for its status: a connection may be dead without having ended
USER_ERROR, RUN_ERROR, HANGUP = 2, 1, 128 + signal.SIGHUP
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class LaunchError(Exception):
    """Ends this node, and with the head all nodes: a message for the user and an exit status."""

    def __init__(self, message: str, status: int = RUN_ERROR) -> None:
        super().__init__(message)
        self.status = status


def say(text: str) -> None:
    print(f"{socket.gethostname()}: {text}", file=sys.stderr, flush=True)


# --- what is installed ---


def _beside_this_file() -> Any:
    """rlhf/cluster/node_report.py of this checkout; by its path, since the package may not be installed."""
    path = Path(__file__).resolve().parent.parent / "rlhf" / "cluster" / "node_report.py"
    spec = importlib.util.spec_from_file_location("node_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


node_report = _beside_this_file()
report, differences = node_report.report, node_report.differences


def check_same(reports: Sequence[dict[str, str]]) -> None:
    """Raises: LaunchError, naming every node that differs."""
    if lines := differences(reports):
        remedy = "All nodes need the package installed from the same checkout; code that is only copied has no plug-in."
        raise LaunchError("\n".join(["the nodes do not fit together:", *lines, remedy]), USER_ERROR)
    say(f"{len(reports)} node(s), all with rlhf {reports[0]['rlhf']} and ray {reports[0]['ray']}")


# --- the token ---


def token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


async def ray_token(*, make: bool, deadline_s: float) -> str:
    """RAY_AUTH_TOKEN, or the token file, which the head makes where there is none; others wait for it.

    Raises:
        LaunchError: no token appeared.
    """
    path = token_file()
    end = time.monotonic() + deadline_s
    while True:
        if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
            return token
        with contextlib.suppress(FileNotFoundError):
            if token := path.read_text().strip():
                return token
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(secrets.token_hex(32))
                say(f"made a Ray token: {path}")
        elif time.monotonic() > end:
            raise LaunchError(
                f"no Ray token: neither RAY_AUTH_TOKEN nor {path}. Copy that file from the head, or set the variable "
                "to the same value on all nodes.",
                USER_ERROR,
            )
        await asyncio.sleep(CONNECT_EVERY_S)


def proof(token: str, who: str, *nonces: str) -> str:
    return hmac.new(token.encode(), ":".join((who, *nonces)).encode(), hashlib.sha256).hexdigest()


# --- a connection ---


class Link:
    """JSON lines with pings between them; an end, a garbled line or a long silence is None."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._pings = asyncio.create_task(self._ping())

    @property
    def own_address(self) -> str:
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        return str(self._writer.get_extra_info("peername")[0])

    async def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # a peer that is gone shows on the reading side
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), SILENCE_S)
                message = json.loads(line) if line else None
            except (OSError, ValueError, TimeoutError):
                return None
            if message is None or not isinstance(message, dict):
                return None
            if message:
                return message

    async def close(self) -> None:
        self._pings.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_EVERY_S)
            await self.send()


# --- processes ---


def _as_child() -> None:
    """In a new process: a session of its own, and SIGTERM if this one is killed."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def spawn(command: Sequence[str], environment: dict[str, str], **streams: Any) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command, env=os.environ | environment, stdin=asyncio.subprocess.DEVNULL, preexec_fn=_as_child, **streams
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} does not start: {error.strerror}.", USER_ERROR) from error


async def stop(process: asyncio.subprocess.Process, grace_s: float) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def descendants() -> Iterator[int]:
    """Ids of the processes below this one; orphans are among them, since this process adopts them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        yield from below
        waiting += below


def kill_descendants() -> None:
    """The last look: whatever ignored SIGTERM or outlived its parent."""
    for _ in range(50):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = list(descendants())
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


@dataclass
class RayNode:
    """`ray start --block` on this node: its process, its last lines, and whether it came up."""

    command: list[str]
    environment: dict[str, str]
    temp: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rlhf-ray-", dir=ray_folder())))
    lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    up: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, deadline_s: float) -> None:
        """Raises: LaunchError, with the last lines of its output."""
        flags = ["--block", "--disable-usage-stats", "--log-color=false", f"--temp-dir={self.temp}"]
        self.process = await spawn(
            [*self.command, *flags], self.environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._reading = asyncio.create_task(self._read())
        up, ended = asyncio.create_task(self.up.wait()), asyncio.create_task(self.process.wait())
        await asyncio.wait((up, ended), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        ended.cancel()
        if not self.up.is_set():
            how = "ended" if self.process.returncode is not None else f"was not up within {deadline_s:.0f} s"
            raise LaunchError(f"`ray start` {how}; its last lines:\n{self.output()}")

    def output(self) -> str:
        return b"".join(self.lines).decode(errors="replace").rstrip() or "(none)"

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line)
            if RAY_IS_UP in line:
                self.up.set()

    async def end(self, *, keep_logs: bool) -> None:
        if hasattr(self, "process"):
            await stop(self.process, RAY_GRACE_S)
            self._reading.cancel()
        if keep_logs and any(self.temp.iterdir()):
            say(f"Ray's logs: {self.temp}")
        else:
            shutil.rmtree(self.temp, ignore_errors=True)


def ray_environment(token: str) -> dict[str, str]:
    """Token authentication, and workers that are not starved by any neighbour: Ray's default for them is nice 15."""
    niceness = os.environ.get("RAY_worker_niceness", "0")  # noqa: SIM112 - Ray spells it so
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_worker_niceness": niceness}


def ray_folder() -> str:
    """RAY_TMPDIR, or a short path: Ray's sockets lie below it, and a socket's path has at most 107 characters."""
    return os.environ.get("RAY_TMPDIR", "/tmp")


def ray_command() -> str:
    """RAY, or the ray beside this Python, or the one on PATH."""
    beside = Path(sys.executable).parent / "ray"
    return os.environ.get("RAY") or (str(beside) if beside.exists() else "ray")


# --- the head ---


@dataclass
class Worker:
    link: Link
    report: dict[str, str]


class Head:
    """Meets the workers, starts Ray, runs the program, and tells everyone the status."""

    def __init__(self, options: argparse.Namespace, token: str) -> None:
        self.options, self.token = options, token
        self.workers: dict[int, Worker] = {}
        self.joined: set[int] = set()
        self.events: asyncio.Queue[LaunchError | None] = (
            asyncio.Queue()
        )  # a worker came along or, a LaunchError, was lost
        self.environment = ray_environment(token)
        self.ray: RayNode | None = None
        self.program: asyncio.subprocess.Process | None = None
        self._ending = False

    async def lead(self) -> int:
        port = self.options.port + 1
        try:
            server = await asyncio.start_server(self._serve, None, port)
        except OSError as error:
            raise LaunchError(
                f"--port={self.options.port}: port {port} is taken ({error.strerror}).", USER_ERROR
            ) from None
        status = RUN_ERROR
        try:
            status = await self._run()
        except LaunchError as failure:
            status = failure.status
            say(str(failure))
        except asyncio.CancelledError:
            status = cancelled_status
            raise
        finally:
            server.close()
            await self._end(status)
        return status

    async def _run(self) -> int:
        options = self.options
        others = options.nodes - 1
        await self._until(lambda: len(self.workers) == others, "came to the head", lambda: set(self.workers))
        ranks = sorted(self.workers)
        check_same([report(), *(self.workers[rank].report for rank in ranks)])
        host = self.workers[ranks[0]].link.own_address if ranks else "127.0.0.1"
        address = f"{host}:{options.port}"
        command = [ray_command(), "start", "--head", f"--node-ip-address={host}", f"--port={options.port}"]
        self.ray = RayNode([*command, "--include-dashboard=false", *options.ray_args], self.environment)
        await self.ray.start(options.deadline)
        for rank in ranks:
            await self.workers[rank].link.send(start=address)
        await self._until(lambda: len(self.joined) == others, "joined Ray", lambda: self.joined)
        say(f"Ray is up on {options.nodes} node(s), head {address}; starting {options.module}")
        return await self._run_program(address)

    async def _until(self, met: Any, what: str, ranks: Any) -> None:
        """Take events until the condition is met, one of them is a LaunchError, or the deadline has passed."""
        options = self.options
        try:
            async with asyncio.timeout(options.deadline):
                while not met():
                    if (event := await self.events.get()) is not None:
                        raise event
        except TimeoutError:
            absent = sorted(set(range(1, options.nodes)) - ranks())
            there = options.nodes - len(absent)
            raise LaunchError(
                f"{there} of {options.nodes} nodes {what} within {options.deadline:.0f} s; missing: "
                f"rank {', '.join(map(str, absent))}. Look at their output; raise --deadline if they were only slow."
            ) from None

    async def _run_program(self, address: str) -> int:
        assert self.ray is not None
        self.program = await spawn(
            [sys.executable, "-m", self.options.module, *self.options.program],
            {**self.environment, "RAY_ADDRESS": address},
        )
        program, head = asyncio.create_task(self.program.wait()), asyncio.create_task(self.ray.process.wait())
        event = asyncio.create_task(self._loss())
        await asyncio.wait((program, head, event), return_when=asyncio.FIRST_COMPLETED)
        for task in (program, head, event):
            task.cancel()
        if self.program.returncode is not None:
            return exit_status(self.program.returncode)
        if event.done() and not event.cancelled():
            raise event.result()
        raise LaunchError(f"Ray ended on the head while the program ran; its last lines:\n{self.ray.output()}")

    async def _loss(self) -> LaunchError:
        while (event := await self.events.get()) is None:
            pass
        return event

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        rank = None
        try:
            rank = await self._admit(link)
            if rank is None:
                return
            while (message := await link.receive()) is not None:
                if "joined" in message:
                    self.joined.add(rank)
                    self.events.put_nowait(None)
                elif "lost" in message:
                    raise LaunchError(f"node {self._name(rank)}: {message['lost']}")
            raise LaunchError(f"node {self._name(rank)} is gone: its connection ended.")
        except LaunchError as failure:
            if not self._ending:
                self.events.put_nowait(failure)
        except asyncio.CancelledError:
            return  # the loop ends; asyncio would print a traceback for a connection that was still open
        finally:
            if rank is None or not self._ending:
                await link.close()

    async def _admit(self, link: Link) -> int | None:
        """The rank of a worker that knows the token; None after refusing it."""
        nonce = secrets.token_hex(16)
        await link.send(nonce=nonce)
        hello = await link.receive() or {}
        theirs, rank, node = str(hello.get("nonce")), hello.get("rank"), hello.get("report")
        if not hmac.compare_digest(proof(self.token, "worker", nonce, theirs), str(hello.get("proof"))):
            say(f"refused {link.peer_address}: it has another Ray token")
            await link.send(refused="the head has another Ray token; give all nodes the same")
            return None
        if not isinstance(rank, int) or not isinstance(node, dict) or not 0 < rank < self.options.nodes:
            await link.send(refused=f"rank {rank} is not among 1 to {self.options.nodes - 1}, the head's --nodes")
            return None
        if rank in self.workers:
            await link.send(refused=f"rank {rank} is taken by {self._name(rank)}; give each node its own --rank")
            return None
        self.workers[rank] = Worker(link, {**node, "node": f"{node.get('node')} (rank {rank})"})
        await link.send(proof=proof(self.token, "head", nonce, theirs))
        self.events.put_nowait(None)
        return rank

    def _name(self, rank: int) -> str:
        return self.workers[rank].report["node"]

    async def _end(self, status: int) -> None:
        self._ending = True
        if self.program is not None:
            await stop(self.program, PROGRAM_GRACE_S)
        for worker in self.workers.values():
            await worker.link.send(end=status)
        if self.ray is not None:
            await self.ray.end(keep_logs=status != 0)
        for worker in self.workers.values():
            await worker.link.close()


def exit_status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


# --- a worker ---


async def follow(options: argparse.Namespace, token: str) -> int:
    """Join the head and wait for its word; returns the program's status.

    Raises:
        LaunchError: the head is not there, refuses, or goes away without a word.
    """
    link = await _connect(options)
    ray: RayNode | None = None
    status = RUN_ERROR
    try:
        await _introduce(link, options, token)
        message = await link.receive()
        if message is not None and "start" in message:
            command = [ray_command(), "start", f"--address={message['start']}", f"--node-ip-address={link.own_address}"]
            ray = RayNode([*command, *options.ray_args], ray_environment(token))
            message = await _join_ray(link, ray, options)
        if message is None or "end" not in message:
            raise LaunchError(f"the head {options.head} is gone without a word; ending here too.")
        status = int(message["end"])
        return status
    finally:
        if ray is not None:
            await ray.end(keep_logs=status != 0)
        await link.close()


async def _connect(options: argparse.Namespace) -> Link:
    end = time.monotonic() + options.deadline
    while True:
        try:
            return Link(*await asyncio.open_connection(options.head, options.port + 1))
        except OSError as error:
            if time.monotonic() > end:
                reason = error.strerror or str(error)
                raise LaunchError(
                    f"no head at {options.head}, port {options.port + 1}, within {options.deadline:.0f} s ({reason}). "
                    "Is rank 0 running, is --head its address, and are these ports open between the nodes?"
                ) from None
        await asyncio.sleep(CONNECT_EVERY_S)


async def _introduce(link: Link, options: argparse.Namespace, token: str) -> None:
    theirs = str((await link.receive() or {}).get("nonce"))
    nonce = secrets.token_hex(16)
    await link.send(nonce=nonce, proof=proof(token, "worker", theirs, nonce), rank=options.rank, report=report())
    answer = await link.receive()
    if answer is None:
        raise LaunchError(f"the head {options.head} is gone without a word; ending here too.")
    if "refused" in answer:
        raise LaunchError(f"the head {options.head} refused this node: {answer['refused']}.", USER_ERROR)
    if not hmac.compare_digest(proof(token, "head", theirs, nonce), str(answer.get("proof"))):
        raise LaunchError(f"{options.head} does not know the Ray token: it is not this run's head.", USER_ERROR)


async def _join_ray(link: Link, ray: RayNode, options: argparse.Namespace) -> dict[str, Any] | None:
    """Start Ray, say so, and wait for the head's last word; None when the head is gone."""
    last_word = asyncio.create_task(link.receive())
    try:
        await ray.start(options.deadline)
        await link.send(joined=True)
        ended = asyncio.create_task(ray.process.wait())
        await asyncio.wait((last_word, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not last_word.done():
            raise LaunchError(f"Ray ended on this node; its last lines:\n{ray.output()}")
        return last_word.result()
    except LaunchError as failure:
        await link.send(lost=str(failure))
        raise
    finally:
        last_word.cancel()


# --- commands ---

cancelled_status = RUN_ERROR  # what a signal, or the end of stdin, makes of the exit status


def _end_on_signals(task: asyncio.Task[int], *, with_stdin: bool) -> None:
    loop = asyncio.get_running_loop()

    def cancel(status: int) -> None:
        global cancelled_status
        if not task.cancelling():  # a second signal would cut short what the first one cleans up
            cancelled_status = status
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, cancel, 128 + number)

    def read_stdin() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            cancel(HANGUP)

    if with_stdin:
        loop.add_reader(0, read_stdin)


async def up(options: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    _end_on_signals(task, with_stdin=options.end_with_stdin)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        token = await ray_token(make=options.rank == 0, deadline_s=options.deadline)
        if options.rank != 0:
            return await follow(options, token)
        status = await Head(options, token).lead()
        if options.status_file is not None:
            try:
                options.status_file.write_text(f"{status}\n")
            except OSError as error:
                say(f"--status-file {options.status_file}: {error.strerror}; is its folder mounted in the container?")
        return status
    except LaunchError as failure:
        say(str(failure))
        return failure.status
    except asyncio.CancelledError:
        return cancelled_status


def cluster_reports(nodes: int, deadline_s: float) -> list[dict[str, str]]:
    """`report` on every node of the Ray cluster that this process can join, its own node first.

    Raises:
        LaunchError: fewer nodes than asked for came within the deadline, or one does not answer.
    """
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    try:
        end = time.monotonic() + deadline_s
        while len(alive := [node for node in ray.nodes() if node["Alive"]]) < nodes:
            if time.monotonic() > end:
                raise LaunchError(f"{len(alive)} of {nodes} nodes are in the Ray cluster after {deadline_s:.0f} s.")
            time.sleep(CONNECT_EVERY_S)
        found = []
        names = node_report.node_names(alive)
        for key, (answer, problem) in node_report.ask_nodes(alive, report, deadline_s=deadline_s).items():
            if problem:
                raise LaunchError(f"node {names[key]} does not answer: {problem}")
            found.append({**answer, "node": names[key]})
        return [{**report(), "node": f"{socket.gethostname()} (driver)"}, *found]
    finally:
        ray.shutdown()


def run(options: argparse.Namespace) -> int:
    """Check the nodes, then become the program."""
    here = Path.cwd()
    try:
        reports = cluster_reports(options.nodes, options.deadline)
        driver, *rest = reports
        check_same([driver, *rest])
    except LaunchError as failure:
        say(str(failure))
        return failure.status
    # Each node unpacks the working directory of a job, and where several share a machine each removes it first: what
    # stands at this path now is another folder than the one that this process began in.
    os.chdir(here)
    os.execv(sys.executable, [sys.executable, "-m", options.module, *options.program])


async def follow_job(options: argparse.Namespace) -> int:
    """Print the log of a Ray job until the job has ended, however often the connection breaks; its exit status.

    A log comes from its beginning each time, so what was printed is skipped.

    Raises:
        LaunchError: nobody could tell the status of the job for `--deadline` seconds.
    """
    from aiohttp import ClientError
    from ray.job_submission import JobSubmissionClient

    shown, heard = 0, time.monotonic()
    while True:
        try:
            client = JobSubmissionClient(options.address)
            seen = 0
            with contextlib.suppress(ClientError, OSError, RuntimeError):  # whatever ended it, the status decides
                log = client.tail_job_logs(options.id)
                while (text := await asyncio.wait_for(anext(log, None), LOG_SILENCE_S)) is not None:
                    print(text[max(0, shown - seen) :], end="", flush=True)
                    seen += len(text)
                    shown = max(shown, seen)
            status = job_status(options.id, client.get_job_info(options.id))
            heard = time.monotonic()
        except (OSError, RuntimeError) as error:
            if time.monotonic() - heard > options.deadline:
                raise LaunchError(
                    f"nothing was heard of job {options.id} for {options.deadline:.0f} s ({error}). It may still run: "
                    f"ray job status --address {options.address} {options.id}"
                ) from None
        else:
            if status is not None:
                return status
        await asyncio.sleep(CONNECT_EVERY_S)


def job_status(name: str, info: Any) -> int | None:
    """Exit status of a Ray job, 0 only if it succeeded; None while it has not ended."""
    if not info.status.is_terminal():
        return None
    code = info.driver_exit_code
    match str(info.status):
        case "SUCCEEDED":
            return 0
        case "STOPPED":
            say(f"job {name} was stopped")
            return exit_status(code) if code else 128 + signal.SIGTERM
        case _:
            if code is None:  # it never came to run the program, whose output would say why
                say(f"job {name} failed: {info.message}")
            return exit_status(code) if code else RUN_ERROR


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report")
    node = commands.add_parser("up")
    node.add_argument("--rank", type=int, required=True)
    node.add_argument("--head", default="127.0.0.1")
    node.add_argument("--port", type=int, default=6379)
    node.add_argument("--ray-args", type=shlex.split, default=[])
    node.add_argument("--end-with-stdin", action="store_true")
    node.add_argument("--status-file", type=Path)
    on_cluster = commands.add_parser("run")
    for command in (node, on_cluster):
        command.add_argument("--nodes", type=int, default=1)
        command.add_argument("--deadline", type=float, default=600.0)
        command.add_argument("--module", default="rlhf.grpo")
        command.add_argument("program", nargs=argparse.REMAINDER)
    job = commands.add_parser("follow-job")
    job.add_argument("address")
    job.add_argument("id")
    job.add_argument("--deadline", type=float, default=300.0)
    options = parser.parse_args(argv)
    if getattr(options, "program", [])[:1] == ["--"]:
        del options.program[0]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    match options.command:
        case "report":
            print(json.dumps(report()))
            return 0
        case "run":
            return run(options)
        case "follow-job":
            try:
                return asyncio.run(follow_job(options))
            except LaunchError as failure:
                say(str(failure))
                return failure.status
    if not 0 <= options.rank < options.nodes:
        say(f"--rank={options.rank}: not among 0 to {options.nodes - 1}, as --nodes={options.nodes} asks for.")
        return USER_ERROR
    status = asyncio.run(up(options))
    kill_descendants()
    return status


if __name__ == "__main__":
    sys.exit(main())
