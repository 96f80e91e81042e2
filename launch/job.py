"""One run as a job of a Ray cluster that is up; submit.sh calls it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launcher
from launcher import LaunchError

ROOT = Path(__file__).resolve().parent.parent
SUBMISSION_GRACE_S = 60.0
LOG_SILENCE_S = 60.0  # then the job is asked for its status: a connection may be dead without having ended

HELP = """\
One run as a job of a Ray cluster that is up, with this checkout as its working directory.

  launch/submit.sh [flags] --config FILE ... [section.key=value ...]

The log follows until the job ends, also where the connection breaks on the way, and the exit status is the job's.
Ctrl-C stops the job. An --id that Ray knows already is refused, and the job that has it goes on.
The token is that of the cluster: RAY_AUTH_TOKEN, or the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.
Ray uploads what git does not ignore (at most 500 MiB): configs and code, but not runs/. Data, model and run.dir are
paths or hub names that every node of the cluster reads. The package itself must be installed on every node, which is
checked before the program starts anything. JOB_PYTHON is the interpreter there (default python), PYTHON the one here.
"""


def submit(options: argparse.Namespace) -> int:
    """Hand the job over and follow it; a signal stops it, and nothing else does.

    Raises:
        LaunchError: there is no token, or Ray refuses the job or does not answer.
    """
    token_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not os.environ.get("RAY_AUTH_TOKEN") and not token_file.exists():
        remedy = "set RAY_AUTH_TOKEN to that of the cluster, or copy the head's ~/.ray/auth_token here."
        raise LaunchError(f"no Ray token: {remedy}", launcher.USER_ERROR)
    os.environ["RAY_AUTH_MODE"] = "token"
    launcher.end_on_signals()
    hand_over(options)
    if options.no_wait and not launcher.interrupts:
        print(options.id)
        return 0
    status = asyncio.run(follow_until_interrupted(options))
    if launcher.interrupts:
        launcher.say(f"stopping job {options.id}")
        launcher.start([launcher.ray_command(), "job", "stop", "--address", options.address, options.id]).wait()
    return status


def hand_over(options: argparse.Namespace) -> None:
    """Submit the job. A signal does not cut this short: the job may have arrived already."""
    command = ["job", "submit", "--address", options.address, "--submission-id", options.id, "--no-wait"]
    command += ["--working-dir", str(ROOT), "--runtime-env-json", '{"excludes": [".git", "/runs", "/tests"]}', "--"]
    entry = [os.environ.get("JOB_PYTHON", "python"), "launch/nodes.py", "run", "--nodes", str(options.nodes)]
    entry += ["--module", options.module, "--deadline", str(options.deadline), "--", *options.program]
    submission = launcher.start([launcher.ray_command(), *command, *entry])
    while submission.poll() is None and not launcher.interrupts:
        time.sleep(launcher.POLL_S)
    if launcher.interrupts:
        launcher.say(f"stopping job {options.id} once it is known whether Ray took it")
        with contextlib.suppress(subprocess.TimeoutExpired):
            submission.wait(SUBMISSION_GRACE_S)
    if submission.returncode is None:
        problem = f"Ray did not answer in {SUBMISSION_GRACE_S:.0f} s; ask it with: ray job status --address "
        raise LaunchError(f"{problem}{options.address} {options.id}", launcher.interrupts[0])
    if status := submission.returncode:
        problem = f"Ray did not take job {options.id}; its message is above."
        raise LaunchError(problem, launcher.interrupts[0] if launcher.interrupts else launcher.exit_status(status))


async def follow_until_interrupted(options: argparse.Namespace) -> int:
    task = asyncio.ensure_future(follow(options))
    while not task.done() and not launcher.interrupts:
        await asyncio.wait({task}, timeout=launcher.POLL_S)
    return task.result() if task.done() else launcher.interrupts[0]


async def follow(options: argparse.Namespace) -> int:
    """Print the log of a Ray job until the job has ended, however often the connection breaks; its exit status.

    A log comes from its beginning each time, so what was printed is skipped.

    Raises:
        LaunchError: nobody could tell the status of the job for `--patience` seconds.
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
            status = None
            if time.monotonic() - heard > options.patience:
                raise LaunchError(
                    f"nothing was heard of job {options.id} for {options.patience:.0f} s ({error}). It may still run: "
                    f"ray job status --address {options.address} {options.id}"
                ) from None
        if status is not None:
            return status
        await asyncio.sleep(launcher.POLL_S)


def job_status(name: str, info: Any) -> int | None:
    """Exit status of a Ray job, 0 only if it succeeded; None while it has not ended."""
    if not info.status.is_terminal():
        return None
    code = info.driver_exit_code
    match str(info.status):
        case "SUCCEEDED":
            return 0
        case "STOPPED":
            launcher.say(f"job {name} was stopped")
            return launcher.exit_status(code) if code else 128 + signal.SIGTERM
        case _:
            if code is None:  # it never came to run the program, whose output would say why
                launcher.say(f"job {name} failed: {info.message}")
            return launcher.exit_status(code) if code else launcher.RUN_ERROR


if __name__ == "__main__":
    PARSER = launcher.command_line(HELP)
    ADDRESS = os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    NAME = f"rlhf-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    flag = PARSER.add_argument
    flag("--address", default=ADDRESS, help="URL of the head's dashboard; default: RAY_API_SERVER_ADDRESS, or here")
    flag("--nodes", type=int, default=1, help="nodes that must be there before the program starts; default: 1")
    flag("--id", default=NAME, help="of the job; default: rlhf- with date, time and a number")
    flag("--no-wait", action="store_true", help="print the job's id instead of following its log")
    flag("--patience", type=float, default=300.0, help="seconds without news of the job to give up; default: 300")
    sys.exit(launcher.main(submit, PARSER, sys.argv[1:]))
