"""No response runs code: payloads that other graders have executed, under an audit hook, with a canary file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import WAIT_S

from rlhf.config.reward import STEPS_OF_MODE
from rlhf.rewards.answers.arithmetic import start_work
from rlhf.rewards.answers.compare import compare
from rlhf.rewards.answers.errors import UndefinedError
from rlhf.rewards.answers.extract import extract
from rlhf.rewards.answers.tree import parse
from rlhf.rewards.answers.value import evaluate
from rlhf.rewards.sandbox import RefusedError, refusing_side_effects

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


@pytest.mark.parametrize(
    "text",
    [
        r"\sum_{a=1}^{2000}\sum_{b=1}^{2000}ab",
        r"\sum_{k=1}^{1999}\frac{1}{3^k+1}",
        "+".join([r"\binom{20000}{10000}"] * 400),
        "+".join([r"(3^{99999})^{1/7}"] * 500),
    ],
)
def test_a_value_that_costs_too_much_is_not_computed(text: str) -> None:
    start_work()
    with pytest.raises(UndefinedError, match="too much"):
        evaluate(parse(text), {})


def test_each_comparison_has_its_own_bound() -> None:
    assert not compare(r"\sum_{a=1}^{2000}\sum_{b=1}^{2000}ab", "7")
    assert compare(r"\sum_{k=1}^{1000}k", "500500")


def test_a_megabyte_of_marks_costs_milliseconds() -> None:
    texts = [
        mark * (1_000_000 // len(mark))
        for mark in ("Answer: ", "**", "* ", "`", "$5 ", "####", "<answer>", "_1 ", "1,")
    ]
    started = time.process_time()
    for text in texts:
        extract(text, STEPS_OF_MODE["lenient"])
    assert (time.process_time() - started) / len(texts) < 0.25


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
