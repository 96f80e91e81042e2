"""No response runs code: payloads that other graders have executed, under an audit hook, with a canary file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import WAIT_S

from rlhf.rewards.refusal import RefusedError, refusing_side_effects

TOUCH = "__import__('os').system('touch CANARY')"
PAYLOADS = [
    TOUCH,
    f"[{TOUCH}]",
    f"{{{TOUCH}}}",
    f"({TOUCH}, 1)",
    f"\\text{{{TOUCH}}}",
    f"\\mathrm{{{TOUCH}}}",
    f"\\operatorname{{{TOUCH}}}",
    f"\\begin{{pmatrix}}{TOUCH}\\\\2\\end{{pmatrix}}",
    f"\\frac{{{TOUCH}}}{{1}}",
    f"\\int_0^1 {TOUCH} dx",
    f"x_{{{TOUCH}}}",
    "exec(\"open('CANARY','w').write('x')\")",
    "eval(\"open('CANARY','w')\")",
    "open('CANARY','w')",
    "().__class__.__bases__[0].__subclasses__()",
    "lambda: open('CANARY','w')",
    "x.__class__.__init__.__globals__['__builtins__']['open']('CANARY','w')",
    "{{7*7}}",
    "$(touch CANARY)",
    "`touch CANARY`",
    "'; touch CANARY; '",
    "f\"{open('CANARY','w')}\"",
    "Symbol('x').__class__",
    "sympify(\"open('CANARY','w')\")",
]
GOLDS = ["1", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\int_0^1 x dx", r"\text{yes}"]

PROGRAM = """
import json, sys
from rlhf.config.reward import MathOptions
from rlhf.rewards.math import math_reward

events, watching = [], False

def audit(event, arguments):
    if not watching:
        return
    if event in ("exec", "compile"):
        name = arguments[0].co_filename if event == "exec" else arguments[1]
        if not str(name).startswith("/"):
            events.append([event, str(name)])
    elif event == "open" and any(c in str(arguments[1]) for c in "wax+"):
        events.append([event, str(arguments[0])])
    elif event.startswith(("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess", "socket", "ctypes")):
        events.append([event, ""])

sys.addaudithook(audit)
payloads, golds = json.load(sys.stdin)
right, watching = [], True
for payload in payloads:
    for gold in golds:
        for form in ("\\\\boxed{%s}", "The answer is %s", "$%s$", "%s"):
            grade = math_reward(form.replace("%s", payload), gold, MathOptions(mode="lenient"))
            if grade.value:
                right.append([payload, gold])
watching = False
print(json.dumps([events, right]))
"""


@pytest.mark.slow
def test_no_payload_runs_code_or_passes_for_an_answer(tmp_path: Path) -> None:
    payloads = [payload.replace("CANARY", "canary") for payload in PAYLOADS]  # a path with numbers would hold answers
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([payloads, GOLDS]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    assert json.loads(done.stdout) == [[], []]
    assert list(tmp_path.iterdir()) == []


def test_confined_code_cannot_run_strings_write_start_processes_or_connect(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    forbidden = [
        lambda: eval("1 + 1"),
        lambda: exec("pass"),
        lambda: open(file, "w"),  # noqa: SIM115
        lambda: os.open(file, os.O_WRONLY),
        lambda: os.system("true"),
        lambda: os.remove(file),
        lambda: os.fork(),
        lambda: subprocess.run(["true"]),
        lambda: socket.socket().connect(("127.0.0.1", 9)),
    ]
    for action in forbidden:
        with refusing_side_effects(), pytest.raises(RefusedError):
            action()
    with refusing_side_effects():
        assert file.read_text() == "text"
    assert eval("1 + 1") == 2
