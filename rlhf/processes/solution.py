"""The process in which the code of a response runs; its answers are never trusted.

`rlhf.rewards.code` starts it with an empty environment. It knows neither the expected results nor how many tests there
are. Whatever the code does to this process, it can only change the answers, which the grader compares.

    grader -> {"code": TEXT, "program": true, "setup": TEXT}   the code is a program: it reads standard input and
                                                 prints; the setup is imports before it
    grader -> {"code": TEXT, "program": false}   the code defines functions; first the imports
    grader -> {"call": "f(1, 2)"}                -> {"value": JSON of `as_json`}, or {"error": TEXT}
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from typing import Any

from rlhf.processes.attributes import as_json
from rlhf.processes.channel import Channel
from rlhf.processes.confinement import ALONE, FOLDERS, NOT_ALONE, SYSTEM, Domain
from rlhf.processes.outside import die_with_parent

MAX_ERROR = 300  # characters
MAX_OPEN_FILES = 64
MAX_DEPTH = 50_000  # calls in calls, as in LiveCodeBench's grader; Python's 1000 are too few for many right solutions
KILL = 9
READABLE = (*(folder for folder in FOLDERS if folder != "/etc"), *SYSTEM, sys.prefix, sys.base_prefix)


def main(fd: str) -> None:
    """Answer the grader at the other end of the socket `fd`."""
    die_with_parent(KILL)
    channel = Channel(socket.socket(fileno=int(fd)))
    domain = Domain(READABLE, level=ALONE)
    if not (domain.abi and domain.filters):
        channel.send({"unconfined": NOT_ALONE})
        return
    domain.enter()
    domain.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # files in memory do not count as memory of the process
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    sys.set_int_max_str_digits(0)  # the time limit bounds the cost of long integers
    sys.setrecursionlimit(MAX_DEPTH)
    sys.argv = [""]  # fileinput reads the files that are named here
    channel.send({"ready": True})
    names = _module("solution")
    is_open = True
    while is_open:
        messages, is_open = channel.receive(wait=True)
        for message in messages:
            if "code" not in message:
                channel.send(_answer(message["call"], names))
            elif message["program"]:
                channel.socket.close()
                names = _module("__main__")
                exec(message["setup"], names)
                exec(compile(message["code"], "<solution>", "exec"), names)
                return
            else:
                _define(message["code"], names)


def _module(name: str) -> dict[str, Any]:
    module = type(sys)(name)
    sys.modules[name] = module
    return vars(module)


def _define(code: str, names: dict[str, Any]) -> None:
    try:  # annotations are not evaluated, as in this file: `List` and `TreeNode` need no definition
        exec(compile(code, "<solution>", "exec"), names)
    except SystemExit:
        os._exit(1)
    except Exception as error:  # a name that is missing later says so in its test
        names.setdefault("__error__", error)


def _answer(call: str, names: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = {"value": as_json(eval(compile(call, "<test>", "eval"), names))}
        json.dumps(answer)
        return answer
    except Exception as error:
        first = names.get("__error__")
        return {"error": "; after ".join(f"{type(e).__name__}: {e}" for e in (error, first) if e)[:MAX_ERROR]}
