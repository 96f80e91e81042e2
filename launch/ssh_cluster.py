"""One run on machines that are reached by ssh; ssh_cluster.sh calls it."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path

import launcher
from launcher import LaunchError

ROOT = Path(__file__).resolve().parent.parent
# The head ends its program and waits for its workers first: PROGRAM_GRACE_S, FAREWELL_S and RAY_GRACE_S of nodes.py.
HEAD_NOTICES_S = float(os.environ.get("HEAD_NOTICES_S", "240"))
GRACE_S = 240.0  # the head ends the program, and every machine its Ray
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"

HELP = """\
One run on machines that are reached by ssh, each with this checkout in the same folder.

  launch/ssh_cluster.sh --hosts FILE [flags] --config FILE ... [section.key=value ...]

A new Ray token and the variables of --env and --env-file go to every machine through ssh's standard input, so that no
command line shows them. The exit status is the program's. When this script
ends, in whatever way, or the connection breaks, so does everything that it started. SSH is the ssh command with flags.
"""


def hosts_of(file: Path) -> list[str]:
    try:
        hosts = ["".join(line.partition("#")[0].split()) for line in file.read_text().splitlines()]
    except OSError as error:
        raise LaunchError(f"--hosts={file}: {error.strerror}.", launcher.USER_ERROR) from None
    if not any(hosts):
        raise LaunchError(f"--hosts={file}: names no machine.", launcher.USER_ERROR)
    return [host for host in hosts if host]


def variables(options: argparse.Namespace) -> dict[str, str]:
    """What --env-file and then --env set on every machine.

    Raises:
        LaunchError: a line that sets nothing, a variable that this shell does not have, a value of several lines.
    """
    given: dict[str, str] = {}
    for file in options.env_file:
        try:
            lines = Path(file).read_text().splitlines()
        except OSError as error:
            raise LaunchError(f"--env-file={file}: {error.strerror}.", launcher.USER_ERROR) from None
        for number, line in enumerate((line.strip().removeprefix("export ") for line in lines), start=1):
            if line and not line.startswith("#"):
                name, equals, value = line.partition("=")
                if not equals or not name.isidentifier():
                    reason = "write NAME=VALUE, without quotes around the value."
                    raise LaunchError(f"--env-file={file}, line {number}: {reason}", launcher.USER_ERROR)
                given[name] = value
    for setting in options.env:
        name, equals, value = setting.partition("=")
        if not name.isidentifier() or (not equals and name not in os.environ):
            reason = "write NAME=VALUE, or the NAME of a variable that is set here."
            raise LaunchError(f"--env={name}: {reason}", launcher.USER_ERROR)
        given[name] = value if equals else os.environ[name]
    if several := [name for name, value in given.items() if "\n" in value]:
        raise LaunchError(f"--env={several[0]}: its value has several lines. Use a file.", launcher.USER_ERROR)
    return given


def run(options: argparse.Namespace) -> int:
    hosts = hosts_of(options.hosts)
    common = ["--nodes", str(len(hosts)), "--head", options.head or hosts[0].rpartition("@")[2], "--end-with-stdin"]
    common += ["--port", str(options.port), "--module", options.module, "--deadline", str(options.deadline)]
    given = variables(options) | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    launcher.end_on_signals()
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(hosts):
            script = shlex.join(["launch/ray_node_setup.sh", "--rank", str(rank), *common, "--", *options.program])
            script = f'IFS= read -r given && eval "export $given" && exec {script}'
            script = f"cd {shlex.quote(str(options.dir))} && {script}"
            # bash reads the script, whatever the login shell is.
            command = [*os.environ.get("SSH", SSH).split(), host, f"bash -c {shlex.quote(script)}"]
            node = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
            nodes.append(node)
            assert node.stdin is not None
            with contextlib.suppress(OSError):  # ssh has ended already
                node.stdin.write(f"{exports}\n".encode())
        head = nodes[0]
        launcher.wait_until(lambda: any(node.poll() is not None for node in nodes))
        # The head notices a node that is lost during the run; a node that never joined is noticed here.
        if not launcher.wait_until(lambda: head.poll() is not None, HEAD_NOTICES_S):
            status = next(launcher.exit_status(node.returncode) for node in nodes if node.returncode is not None)
            what = f"a machine ended with status {status} while the head went on; its message is above."
            raise LaunchError(what, status or launcher.RUN_ERROR)
        return launcher.exit_status(head.returncode)
    finally:
        close(nodes)


def close(nodes: list[subprocess.Popen[bytes]]) -> None:
    """Close all inputs, which ends the far sides, and then ssh itself."""
    for node in nodes:
        assert node.stdin is not None
        node.stdin.close()
    end = time.monotonic() + GRACE_S
    for node in nodes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(max(0.0, end - time.monotonic()))
        node.terminate()


if __name__ == "__main__":
    PARSER = launcher.command_line(HELP)
    PARSER.add_argument("--hosts", type=Path, required=True, help="a file with one machine per line, as ssh takes it "
                        "(name or user@name); # begins a comment; the first is the head")  # fmt: skip
    PARSER.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="set a variable on every "
                        "machine, without a value as it is here; may be repeated")  # fmt: skip
    PARSER.add_argument("--env-file", action="append", default=[], help="a file of lines NAME=VALUE, such as "
                        "WANDB_API_KEY or NCCL_SOCKET_IFNAME; # begins a comment; may be repeated")  # fmt: skip
    PARSER.add_argument("--head", help="how the others reach the head; default: the first host, without its user")
    PARSER.add_argument("--dir", default=ROOT, help="the checkout on the machines; default: the folder of this one")
    PARSER.add_argument("--port", type=int, default=6379, help="of Ray on the head; default: 6379")
    sys.exit(launcher.main(run, PARSER, sys.argv[1:]))
