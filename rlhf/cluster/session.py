"""The driver's connection to Ray: a new cluster on this machine or a running one, its temporary folder, its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.node import Node

from rlhf.cluster import guard
from rlhf.cluster.actors import ClusterError, LostError, check_address
from rlhf.cluster.node_report import ask_nodes, differences, node_names, report
from rlhf.config.cli import ResumableError, exit_status
from rlhf.config.printing import say
from rlhf.config.secrets import hide

START_TRIES = 3
# The error in a line such as "(EngineCore pid=7) ERROR 11-22 11:29:20 [core.py:1] RuntimeError: out of memory"
ERROR_LINE = re.compile(r"(?<![\w.])(?!EngineDead|RayActor|RayTask|Connection)[A-Za-z_.]*(?:Error|Exception): \S.*$")
MAX_ERROR_SHOWN = 300
PARTS = {"gcs_server": "control service", "raylet": "node manager"}  # nothing works without them
LOOK_EVERY_S = 0.5
END_S = 5.0  # for the other threads of a process whose first one has ended
CONTROL_PATIENCE_S = 30.0  # a joined cluster may start its control service again
LOOPBACK = ("127.0.0.1", "localhost", "::1")
VARIABLES = {
    "RAY_worker_niceness": "0",  # by default 15: any other process would starve the actors
    "RAY_task_events_report_interval_ms": "0",  # a record of calls for Ray's dashboard, which is off: 0.2 MB per step
    "RAY_gcs_rpc_server_reconnect_timeout_s": "180",  # then Ray's C++ ends a process without a control service: 60
}


class RayLostError(ClusterError, ResumableError):
    """The Ray cluster that a run had joined is gone: the run cannot start it again."""


def spare_loopback() -> None:
    """Exclude this machine's own addresses from the proxies of the environment, for this process and its children."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):  # gRPC, and so Ray, reads the last one instead if it is set
        exempt = os.environ.get(name) or os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        if exempt != "*" or name == "no_grpc_proxy":  # only gRPC does not know that `*` is every host
            os.environ[name] = ",".join(dict.fromkeys([*filter(None, exempt.split(",")), *LOOPBACK]))


class RaySession:
    """Ray from `ray.init` until its processes and files are gone."""

    def __init__(self) -> None:
        self.temp: str | None = None  # Ray's folder if the cluster was started here, not joined
        self._guard: subprocess.Popen[bytes] | None = None
        self._watched: dict[str, psutil.Process] = {}  # of PARTS, those on this machine
        spare_loopback()  # before environments start: their processes get these variables too
        self._folder = Path.cwd()  # asked before Ray starts: another node may then remove it, see `compare_nodes`

    def start(self, address: str | None) -> None:
        """Join the cluster at `address`, or RAY_ADDRESS; without either, start one on this machine.

        A cluster on this machine listens only on the loopback interface, and asks every client for its token.
        ValueError if no cluster answers there, or the environment switches Ray's authentication off.
        """
        if (mode := os.environ.get("RAY_AUTH_MODE", "token")).lower() != "token":
            raise ValueError(
                f"RAY_AUTH_MODE={mode}: whoever reaches Ray's ports could run programs as you. "
                "Remove the variable; Ray then makes a token and asks for it."
            )
        key, remove = ("cluster.ray_address", "leave it out") if address else ("RAY_ADDRESS", "unset the variable")
        address = address or os.environ.get("RAY_ADDRESS")
        for variable, value in VARIABLES.items():
            os.environ.setdefault(variable, value)
        logging.getLogger("ray").setLevel(logging.ERROR)
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        try:
            with _own_sigterm_handler():
                if address:
                    check_address(address)
                    ray.init(address=address, **common)
                else:
                    self._start_here(common)
                    started = [p for p in psutil.process_iter(["name", "ppid"]) if p.info["ppid"] == os.getpid()]
                    self._watched = {p.info["name"]: p for p in started if p.info["name"] in PARTS}
        except ConnectionError as error:
            raise ValueError(
                f"{key}={address}: no Ray cluster answers there ({error}). Start one with `ray start --head`, correct "
                f"the address, or {remove} to run on this machine alone."
            ) from error
        finally:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # RAY_AUTH_TOKEN, or the file of another user
                Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token").chmod(0o600)

    def _start_here(self, options: dict[str, Any]) -> None:
        """Start a cluster on this machine, and try again on a busy one: Ray gives its own processes 15 s to start."""
        for tries_left in reversed(range(START_TRIES)):
            # Ray lets everybody write to its folder. Only this user enters the one around it; the names are short,
            # because the path of a socket has at most 107 bytes.
            private = tempfile.mkdtemp(prefix="rlhf-")
            self.temp = f"{private}/ray"
            self._start_guard(private)
            options |= {"include_dashboard": False, "num_cpus": os.cpu_count()}
            try:
                with _own_cluster(private):
                    ray.init(address="local", _temp_dir=self.temp, **options)
                return
            except Exception as error:  # Ray has no own type for it
                if "timed out during startup" not in str(error):
                    raise
                self.stop()
                if not tries_left:
                    raise ClusterError(
                        f"Ray did not start in {START_TRIES} tries: its processes were not ready in time. "
                        "Start the run when this machine is less busy."
                    ) from None

    def lost(self) -> str:
        """A sentence that names the process of Ray on this machine that has ended, and how; empty if all run."""
        for kind, process in self._watched.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            if self.temp is None:
                return f"Ray's {PARTS[kind]} on this machine ({kind}) has ended."
            return f"Ray's {PARTS[kind]} ({kind}) has ended with status {exit_status(process.wait(END_S))}."
        return ""

    async def wait_until_lost(self) -> str:
        """Wait until the cluster cannot go on. Returns a sentence that names the part that ended or does not answer."""
        context = ray.get_runtime_context()
        if self.temp is None:
            (node_here,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
            self._watched = _raylet(node_here["RayletSocketName"])
        answered = time.monotonic()
        while not (lost := self.lost()):
            try:
                if self.temp is None:
                    await asyncio.to_thread(check_address, context.gcs_address)
                answered = time.monotonic()
            except ConnectionError as error:
                if time.monotonic() - answered > CONTROL_PATIENCE_S:
                    return f"Ray's {PARTS['gcs_server']} does not answer ({error})."
            await asyncio.sleep(LOOK_EVERY_S)
        return lost

    def lost_error(self, what: str) -> ClusterError:
        """The error that ends a run when Ray is lost; a LostError, if the run can start another Ray itself."""
        return (
            LostError(what) if self.temp else RayLostError(f"{what} Start the cluster again, and go on with --resume.")
        )

    async def compare_nodes(self, *, deadline_s: float) -> None:
        """Check that every node of a cluster that was joined has the same versions installed as this process.

        ValueError if a node lacks something or has another version, ClusterError if it does not answer.
        """
        if self.temp:
            return
        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = node_names(nodes)
        answers = await ask_nodes(nodes, report, deadline_s=deadline_s)
        # Every node unpacks the working directory of a job before it answers; of several nodes on one machine, each
        # removes that directory first. So its path now names another folder than that in which this process began.
        os.chdir(self._folder)
        reports = [report()]
        reports[0]["node"] += " (driver)"
        for key, (versions, problem) in answers.items():
            if problem:
                raise ClusterError(f"node {names[key]} does not answer: {problem}")
            reports.append({**versions, "node": names[key]})
        if lines := differences(reports):
            remedy = "All nodes need the package installed from the same checkout: run make setup-gpu on each."
            raise ValueError("\n".join(["these nodes have different package versions:", *lines, remedy]))
        say(f"{len(nodes)} node(s), all with rlhf {reports[0]['rlhf']} and ray {reports[0]['ray']}")

    def keep_logs(self, error: BaseException | None, run: Path, actors: Mapping[str, str]) -> None:
        """After a failure, copy the output of the actors into the run folder, and add notes with the cause to `error`.

        `actors`: process id -> the name of the actor.
        """
        if not (isinstance(error, ClusterError) and self.temp):
            return
        logs = sorted(Path(self.temp).glob("session_latest/logs/worker-*"), key=lambda log: log.lstat().st_mtime)
        texts: dict[str, str] = {}  # by the name of the copy
        for log in logs:
            text = ""
            with contextlib.suppress(OSError):  # it is gone
                text = log.read_text(errors="replace")
            if text:
                name = actors.get(log.stem.rpartition("-")[2], log.stem).replace(" ", "-")
                texts[f"{name}.log"] = texts.get(f"{name}.log", "") + hide(text)
        if not texts:
            return
        # an evaluation need not have a run folder
        saved = run / "logs" if run.is_dir() else Path(tempfile.mkdtemp(prefix="rlhf-logs-"))
        saved.mkdir(exist_ok=True)
        for name, text in texts.items():
            if (saved / name).exists():  # of an earlier failure
                (saved / name).replace((saved / name).with_suffix(".old"))
            (saved / name).write_text(text)
        failed_first = sorted(texts, key=lambda name: name.removesuffix(".log").replace("-", " ") not in str(error))
        if cause := error_in_logs({name: texts[name] for name in failed_first}):
            error.add_note(cause)
        error.add_note(f"What the actors printed is in {saved}.")

    def _start_guard(self, folder: str) -> None:
        """Start the process that ends this cluster and removes its folder when the driver has ended."""
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # neither Ctrl-C nor a kill of the driver's process group may reach it
        )

    def stop(self) -> None:
        self._watched = {}
        ray.shutdown()
        if self._guard is not None:
            self._guard.communicate()  # it sees the end of its input
            self._guard = None


def error_in_logs(texts: Mapping[str, str]) -> str:
    """The first error that is not caused by the death of another process, with its log; empty if there is none."""
    found = ((name, ERROR_LINE.search(line)) for name, text in texts.items() for line in text.splitlines())
    return next((f"{name}: {error[0][:MAX_ERROR_SHOWN]}" for name, error in found if error), "")


def _do_nothing(_: Any, **__: Any) -> None:
    """In place of a function of Ray."""


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """A context for ray.init, which sets handlers (Python, C++) that end the program before it can clean up.

    Only the main thread can set the handler of C++ back: `rlhf.Trainer` starts Ray in another one, and does so later.
    """
    ours = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(ray._private.utils, "set_sigterm_handler", _do_nothing):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)


@contextlib.contextmanager
def _own_cluster(folder: str) -> Iterator[None]:
    """A context for ray.init, in which a new cluster is of this run alone.

    It listens on 127.0.0.1; Ray itself does so only on macOS and Windows. Its processes have the mark by which the
    guard knows them. They are in sessions of their own: `timeout`, Ctrl-C and schedulers signal the driver's whole
    process group, and without Ray the driver could not save. What Ray starts for a dashboard that is off, for logs that
    are not printed and for nodes that are never added is left out: 2.3 s of a core and 160 MB.
    """
    variables = {guard.MARK: folder, "SPT_NOENV": "1"}  # the latter: a process's new title leaves its environment whole
    new_session = functools.partial(services.ConsolePopen, start_new_session=True)
    os.environ.update(variables)
    try:
        with (
            mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False),
            mock.patch.object(services, "ConsolePopen", new_session),
            mock.patch.multiple(
                Node, start_api_server=_do_nothing, start_log_monitor=_do_nothing, start_monitor=_do_nothing
            ),
        ):
            yield
    finally:
        for name in variables:
            del os.environ[name]


def _raylet(socket_name: str) -> dict[str, psutil.Process]:
    """{"raylet": the raylet that listens on this socket}; empty if its command line cannot be read."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if words and words[0].endswith("/raylet") and any(socket_name in word for word in words):
            return {"raylet": process}
    return {}
