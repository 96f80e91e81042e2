"""One run on many nodes: start Ray on each, run the program on the head, end everywhere with the program's exit status.

    nodes.py up ...     one node of a Ray cluster that is made for this run; ray_node_setup.sh calls it
    nodes.py run ...    the program, on a Ray cluster that is already up; submit.sh and kuberay.yaml call it

The nodes of `up` leave notes for each other in the key-value store of Ray's head, which asks everyone for the token:

    key      written by   value
    head     the head     its --nodes; workers come when it is there
    rank-R   worker R     its host name, so that no second node takes this rank
    lost     a worker     why it cannot go on; the head then ends the run
    end      the head     the exit status, for every node

Ray's own table of nodes says who has joined and who died. The program compares the versions on the nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import launcher
from launcher import LaunchError

CALL_S = 10.0  # for one answer of Ray's head
PROGRAM_GRACE_S = 180.0  # on SIGTERM the program saves within run.grace_s, and ends its engines
RAY_GRACE_S = 15.0
FAREWELL_S = 2 * RAY_GRACE_S  # for the workers to read the status and to end their Ray
LAST_LINES = 30
RAY_IS_UP = "Ray runtime started."  # what `ray start` prints
SPACE = b"rlhf"  # of the keys
ALIVE = 0  # GcsNodeInfo.GcsNodeState


# --- a node ---


def share_token(options: argparse.Namespace) -> None:
    """Put the Ray token into the environment. Where there is none, the head makes a file; the others wait for it.

    Raises:
        LaunchError: no token appeared.
    """
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")

    def token() -> str:
        with contextlib.suppress(FileNotFoundError):
            return os.environ.get("RAY_AUTH_TOKEN", "").strip() or path.read_text().strip()
        return ""

    if options.rank == 0 and not token():
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            launcher.say(f"made a Ray token: {path}")
    if (shared := launcher.wait_until(token, options.deadline)) is None:
        raise LaunchError(
            f"no Ray token: neither RAY_AUTH_TOKEN nor {path}. Copy that file from the head, or set the variable "
            "to the same value on all nodes.",
            launcher.USER_ERROR,
        )
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": shared}


class Gcs:
    """Ray's head: the notes of the nodes, and the table of the nodes that have joined."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._client: Any = None

    def read(self, key: str) -> str:
        """A note. Returns an empty string if there is no such note, or no answer in time."""
        return (self._call("internal_kv_get", key.encode(), SPACE, CALL_S) or b"").decode()

    def write(self, key: str, value: object, *, over: bool = True) -> None:
        """Leave a note; over=False keeps an existing one."""
        self._call("internal_kv_put", key.encode(), str(value).encode(), over, SPACE, CALL_S)

    def alive(self) -> list[str] | None:
        """Names of the nodes in the cluster; None if there is no answer in time."""
        nodes = self._call("get_all_node_info", CALL_S)
        return None if nodes is None else [node.node_name for node in nodes.values() if node.state == ALIVE]

    def _call(self, method: str, *arguments: Any) -> Any:
        from ray._raylet import GcsClient
        from ray.exceptions import AuthenticationError, RayError

        try:
            self._client = self._client or GcsClient(address=self.address)
            return getattr(self._client, method)(*arguments)
        except AuthenticationError:
            reason = "it has another Ray token. Give all nodes the same."
            raise LaunchError(f"Ray at {self.address} refused this node: {reason}", launcher.USER_ERROR) from None
        except RayError:
            return None


class Node:
    """Ray on this machine until the program ends. Ending it ends the processes it started, and no other Ray."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ray: subprocess.Popen[bytes] | None = None
        self.program: subprocess.Popen[bytes] | None = None
        self.gcs = Gcs(f"{options.head}:{options.port}")
        self.is_up = self.all_joined = False  # of the head
        # A short path: Ray's sockets lie below it, and a socket's path has at most 107 characters. Ray lets everybody
        # write to its folder below this one, which only this user can enter.
        self._temp = Path(tempfile.mkdtemp(prefix="rlhf-", dir=os.environ.get("RAY_TMPDIR", "/tmp")))

    def live(self) -> int:
        """Run Ray on this node from its start to its end; returns the exit status."""
        status = launcher.RUN_ERROR
        try:
            status = self._lead() if self.options.rank == 0 else self._follow()
        except LaunchError as error:
            status = error.status
            launcher.say(error)
            if self.ray is not None and self.options.rank > 0:
                self.gcs.write("lost", f"node {socket.gethostname()} (rank {self.options.rank}): {error}")
        finally:
            self._end(status)
        return status

    def _lead(self) -> int:
        options = self.options
        host = options.head or "localhost"
        with contextlib.suppress(OSError):  # Ray says it if the name is unknown
            host = socket.gethostbyname(host)
        if host.startswith("127."):  # many systems give their own name 127.0.1.1
            host = "127.0.0.1"  # for which Ray takes the address that other machines see
        self._start_ray("--head", f"--node-ip-address={host}", f"--port={options.port}", "--include-dashboard=false")
        if not launcher.wait_until(lambda: RAY_IS_UP in self._output(), options.deadline, self._check):
            raise LaunchError(f"`ray start` was not up within {options.deadline:.0f} s:\n{self._output()}")
        self.is_up = True
        self.gcs = gcs = Gcs(f"{host}:{options.port}")
        gcs.write("head", options.nodes)
        if not launcher.wait_until(lambda: self._absent() == [], options.deadline, self._check):
            absent = self._absent() or []
            raise LaunchError(
                f"{options.nodes - len(absent)} of {options.nodes} nodes joined Ray within {options.deadline:.0f} s; "
                f"missing: {', '.join(absent)}. Look at their output. Raise --deadline if they were only slow."
            )
        self.all_joined = True
        launcher.say(f"Ray is up on {options.nodes} node(s), head {gcs.address}; starting {options.module}")
        command = [sys.executable, "-m", options.module, *options.program]
        self.program = program = launcher.start(command, RAY_ADDRESS=gcs.address)
        launcher.wait_until(lambda: program.poll() is not None, check=self._check)
        return launcher.exit_status(program.returncode)

    def _follow(self) -> int:
        options = self.options
        if not (nodes := launcher.wait_until(self._meet, options.deadline)):
            raise LaunchError(
                f"no head at {options.head}, port {options.port}, within {options.deadline:.0f} s. "
                "Check that rank 0 runs, that --head is its address, and that the ports between the nodes are open."
            )
        if nodes != str(options.nodes):
            reason = f"the head was started with --nodes={nodes}. Give all nodes the same number."
            raise LaunchError(f"--nodes={options.nodes}: {reason}", launcher.USER_ERROR)
        this = f"{socket.gethostname()}, process {os.getpid()}"
        if (owner := launcher.wait_until(lambda: self._take_rank(this), options.deadline)) is None:
            raise LaunchError(f"the head at {self.gcs.address} stopped answering. Look at its output.")
        if owner != this:
            raise LaunchError(
                f"--rank={options.rank}: taken by {owner}. Give each node a rank of its own.", launcher.USER_ERROR
            )
        self._start_ray(f"--address={self.gcs.address}")
        status = int(launcher.wait_until(lambda: self.gcs.read("end"), check=self._check) or launcher.RUN_ERROR)
        if status != 0 and self.ray is not None and self.ray.poll() is not None:
            launcher.say(self._ray_ended())  # the head saw it first
        return status

    def _take_rank(self, this: str) -> str:
        """The node that owns this rank: the first that wrote its note. Returns an empty string without an answer."""
        name = f"rank-{self.options.rank}"
        self.gcs.write(name, this, over=False)
        return self.gcs.read(name)

    def _meet(self) -> str:
        """The head's note that workers may come: its --nodes."""
        try:
            socket.create_connection((self.options.head, self.options.port), CALL_S).close()
        except OSError:
            return ""
        return self.gcs.read("head")

    def _start_ray(self, *flags: str) -> None:
        flags = (
            *flags,
            f"--node-name=rank-{self.options.rank}",
            f"--temp-dir={self._temp}/ray",
            *self.options.ray_args,
        )
        self.ray = launcher.start(
            [launcher.ray_command(), "start", "--block", "--disable-usage-stats", "--log-color=false", *flags],
            self._temp / "ray-start.log",
            # By default Ray gives its workers nice 15, with which any neighbour starves them, and itself 30 s to start.
            RAY_worker_niceness=os.environ.get("RAY_worker_niceness", "0"),  # noqa: SIM112 - Ray spells it so
            RAY_raylet_start_wait_time_s=f"{self.options.deadline:.0f}",
        )

    def _output(self) -> str:
        return "\n".join((self._temp / "ray-start.log").read_text(errors="replace").splitlines()[-LAST_LINES:])

    def _ray_ended(self) -> str:
        return f"Ray ended on this node; its last lines:\n{self._output()}"

    def _absent(self) -> list[str] | None:
        """The ranks that are not in the cluster; None without an answer in time."""
        alive, ranks = self.gcs.alive(), range(self.options.nodes)
        return None if alive is None else [f"rank {rank}" for rank in ranks if f"rank-{rank}" not in alive]

    def _check(self) -> None:
        """Raises: LaunchError, when Ray has ended here, or the head hears that a worker is lost."""
        if self.ray is not None and self.ray.poll() is not None:
            status = launcher.RUN_ERROR if self.program is None else launcher.RESUMABLE
            raise LaunchError(self._ray_ended(), status)
        if self.options.rank > 0 or not self.is_up:
            return
        if lost := self.gcs.read("lost"):
            raise LaunchError(lost)
        if self.all_joined and (absent := self._absent()):
            hosts = [f"{self.gcs.read(name.replace(' ', '-'))} ({name})" for name in absent]
            raise LaunchError(f"node {', '.join(hosts)} is gone: Ray does not reach it any more.")

    def _end(self, status: int) -> None:
        if self.program is not None:
            launcher.stop(self.program, PROGRAM_GRACE_S)
        if self.ray is not None:
            if self.is_up and self.ray.poll() is None:
                self.gcs.write("end", status)
                end = time.monotonic() + FAREWELL_S
                while len(self.gcs.alive() or ()) > 1 and time.monotonic() < end:
                    time.sleep(launcher.POLL_S)
            launcher.stop(self.ray, RAY_GRACE_S)
            if status != 0:
                launcher.say(f"Ray's logs: {self._temp}")
                return
        shutil.rmtree(self._temp, ignore_errors=True)


# --- commands ---


def up(options: argparse.Namespace) -> int:
    if options.rank is None or not 0 <= options.rank < options.nodes:
        raise LaunchError(f"--rank={options.rank}: number the nodes 0 to {options.nodes - 1}.", launcher.USER_ERROR)
    if options.rank > 0 and not options.head:
        raise LaunchError("--head is missing: name the node of rank 0.", launcher.USER_ERROR)
    launcher.end_on_signals(with_stdin=options.end_with_stdin)
    launcher.adopt_orphans()
    try:
        share_token(options)
        status = Node(options).live()
    finally:
        launcher.kill_descendants()
    if options.rank == 0 and options.status_file is not None and not launcher.interrupts:
        try:
            options.status_file.write_text(f"{status}\n")
        except OSError as error:
            launcher.say(f"--status-file={options.status_file}: {error.strerror}; does the container mount its folder?")
    return status


def run(options: argparse.Namespace) -> int:
    """Wait for the nodes, then become the program."""
    gcs = Gcs(os.environ.get("RAY_ADDRESS", ""))
    if not launcher.wait_until(lambda: len(gcs.alive() or ()) >= options.nodes, options.deadline):
        there = f"{len(gcs.alive() or ())} of {options.nodes} nodes"
        raise LaunchError(f"{there} are in the Ray cluster after {options.deadline:.0f} s.")
    os.execv(sys.executable, [sys.executable, "-m", options.module, *options.program])


HELP = """\
One node of a cluster: run it on every node, by hand or from any launcher.

  launch/ray_node_setup.sh --rank R --nodes N --head ADDRESS [flags] --config FILE ... [section.key=value ...]

Rank 0 is the head: it starts Ray, waits for the others and runs the program, which compares the versions on all nodes
before it starts anything. All nodes end when the program ends, with its exit status. When a node is lost, the run ends
with 1.

RAY_AUTH_TOKEN, or the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, is the token that all nodes share. Where neither
is, rank 0 makes the file; the others wait for it, which is enough where the home folder is shared.
PYTHON is the interpreter with the package: default .venv/bin/python of this checkout, or python3. RAY is the ray
command. RAY_TMPDIR (default /tmp) is where Ray keeps sockets and logs; the logs of a run that failed stay there.
"""


def node_flags() -> argparse.ArgumentParser:
    get, parser = os.environ.get, launcher.command_line(HELP)
    flag = parser.add_argument
    nodes = get("NUM_NODES") or get("SLURM_NNODES") or "1"
    rank = get("NODE_RANK") or get("SLURM_PROCID") or ("0" if nodes == "1" else None)
    flag("--rank", type=int, default=rank, help="this node, 0 to N-1; default: NODE_RANK, or SLURM_PROCID")
    flag("--nodes", type=int, default=nodes, help="number of nodes; default: NUM_NODES, or SLURM_NNODES, or 1")
    flag("--head", default=get("HEAD_ADDRESS", ""), help="address of rank 0 for the others; default: HEAD_ADDRESS")
    flag("--port", type=int, default=get("HEAD_PORT") or "6379", help="of Ray on the head; default: HEAD_PORT, or 6379")
    flag("--ray-args", type=shlex.split, default=get("RAY_ARGS", ""), help="more for `ray start`, in one argument")
    flag("--status-file", type=Path, help="rank 0 writes the status to it, unless a signal ends it first")
    flag("--end-with-stdin", action="store_true", help="end when standard input is closed")
    return parser


if __name__ == "__main__":
    sys.exit(launcher.main({"up": up, "run": run}[sys.argv[1]], node_flags(), sys.argv[2:]))
