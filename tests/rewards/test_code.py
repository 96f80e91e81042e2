# ruff: noqa: E501 - solutions on one line
"""The code reward: honest solutions earn it, attempts to be paid without solving do not, and what tests may say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from waiting import WAIT_S
from worlds import rollout_of

from rlhf.config.reward import CodeOptions, RewardConfig
from rlhf.processes.attributes import as_json
from rlhf.rewards.code import code_reward, find_code
from rlhf.rewards.code_tests import read_tests
from rlhf.rewards.grade import Grade
from rlhf.rewards.pool import Pool
from rlhf.rewards.scorer import Scorer
from rlhf.types import Prompt

pytestmark = pytest.mark.slow

ASSERTS = ["assert square(3) == 9", "assert square(-4) == 16", "assert square(12) == 144"]
PROGRAM = [{"input": "3\n", "output": "9\n"}, {"input": "-4\n", "output": "16\n"}]
HONEST = "def square(x):\n    return x * x\n"
MANY = [f"assert square({n}) == {n * n}" for n in range(2, 22)]
DECIMALS = {"inputs": [[n] for n in range(9)], "outputs": [n / 2 for n in range(9)], "fn_name": "square"}
MANY_PROGRAMS = [{"input": f"{n}\n", "output": f"{n * n}\n"} for n in range(2, 22)]


def grade(code: str, tests: Any = ASSERTS, *, columns: dict[str, Any] | None = None, **options: Any) -> Grade:
    return code_reward(f"So:\n```python\n{code}\n```\n", {"tests": tests, **(columns or {})}, CodeOptions(**options))


# --- honest solutions ---


@pytest.mark.parametrize(
    ("code", "tests", "columns"),
    [
        (HONEST, ASSERTS, {}),
        (HONEST, "\n".join(ASSERTS), {}),
        (HONEST, "import math\nassert math.isclose(square(0.5), 0.25, rel_tol=1e-6)\nassert square(x=2) == 4", {}),
        (HONEST, "def check(candidate):\n    assert candidate(3) == 9, 'no'\n    assert True\n\ncheck(square)", {}),
        (HONEST, "METADATA = {}\ndef check(f):\n    assert abs(f(.5) - .25) < 1e-6", {"entry_point": "square"}),
        ("def pairs(n):\n    return {(i, i): {i} for i in range(n)}", ["assert pairs(2) == {(0, 0): {0}, (1, 1): {1}}"], {}),
        ("def odd(n):\n    return n % 2 == 1", ["assert odd(3)", "assert not odd(2)", "assert odd(5) is True"], {}),
        ("def pick(xs):\n    return [2, 1]", ["assert set(pick([1, 2])) == set([1, 2])", "assert (2, 1) == tuple(pick(0))"], {}),
        ("n = int(input())\nprint(n * n)", PROGRAM, {}),
        ("import sys\nprint(int(sys.stdin.read()) ** 2)\nsys.exit()", {"inputs": ["3"], "outputs": ["9"]}, {}),
        (HONEST, {"inputs": [[3], [4]], "outputs": [9, 16], "fn_name": "square"}, {}),
        (HONEST, {"inputs": [[3], [4]], "outputs": [[9], [16]], "fn_name": "square"}, {}),
        (
            "class Solution:\n    def add(self, a, b):\n        return tuple(a + b)",
            '[{"input": "[1]\\n[2]", "output": "[1, 2]", "testtype": "functional"}]',
            {"entry_point": "add"},
        ),
        (
            "class Solution:\n    def add(self, a: List[int], b: Optional[List[int]] = None) -> List[int]:\n"
            "        return sorted(Counter(a) + collections.Counter(b))",
            {"inputs": [[[1], [2]]], "outputs": [[1, 2]], "fn_name": "add"},
            {},
        ),
        ("import fileinput\nfor line in fileinput.input():\n    print(int(line) ** 2)", PROGRAM, {}),
        ("def square(x: Union[int, Tree]) -> Any:\n    return x * x", ASSERTS, {}),
        ("from __future__ import annotations\nn = int(sys.stdin.readline())\nprint(math.prod([n, n]))", PROGRAM, {}),
        ("@lru_cache(None)\ndef square(x):\n    return square(x - 1) + 2 * x - 1 if x else 0", {"inputs": [[3000]], "outputs": [9000000], "fn_name": "square"}, {}),
        (
            "import threading\ndef square(x):\n    got = []\n    thread = threading.Thread(target=lambda: got.append(x * x))\n"
            "    thread.start()\n    thread.join()\n    return got[0]",
            ASSERTS,
            {},
        ),
        ("print('hello')\n" + HONEST + "print('9')", ASSERTS, {}),
    ],
)  # fmt: skip
def test_an_honest_solution_earns_all(code: str, tests: Any, columns: dict[str, Any]) -> None:
    result = grade(code, tests, columns=columns)
    assert (result.value, result.status) == (1.0, "ok"), result.detail


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def square(x):\n    return math.pow(x, 2)", ASSERTS),  # MBPP's grader imports nothing
        ("y = gcd", {"inputs": [[4, 6]], "outputs": [2], "fn_name": "gcd"}),
        ("print(accumulate)", {"inputs": [[[1, 2]]], "outputs": [[1, 3]], "fn_name": "accumulate"}),
    ],
)
def test_no_import_is_added_that_its_grader_does_not_have_or_that_is_what_is_tested(code: str, tests: Any) -> None:
    result = grade(code, tests)
    assert result.value == 0.0
    assert "NameError" in result.detail


def test_the_fraction_counts_each_test_also_after_a_crash() -> None:
    code = "import os\ndef square(x):\n    if x < 0:\n        os._exit(0)\n    return x * x"
    assert grade(code, mode="fraction").value == pytest.approx(2 / 3)
    assert grade(code).value == 0.0


@pytest.fixture
def few_files() -> Iterator[None]:
    """A process that can open a few dozen more files: a solution needs some 30 to be confined."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(48, max(map(int, os.listdir("/proc/self/fd"))) + 12)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_only_one_process_of_a_response_exists_at_a_time() -> None:
    code = "import os\ndef square(x):\n    os._exit(0)"
    result = grade(code, [f"assert square({n}) == 7" for n in range(40)], mode="fraction")
    assert (result.value, result.status) == (0.0, "ok"), result.detail


@pytest.mark.parametrize("python", ["/bin/false", "/no/python"])
@pytest.mark.parametrize("tests", [ASSERTS, PROGRAM])
def test_a_response_whose_process_cannot_start_is_not_wrong(
    python: str, tests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    result = grade(HONEST, tests)
    assert (result.value, result.status) == (None, "unscorable")
    assert "no process for the solution" in result.detail


UNCONFINED = """
from rlhf.config.reward import CodeOptions, RewardConfig
from rlhf.processes import confinement
from rlhf.rewards.code import code_reward
from rlhf.rewards.scorer import Scorer
confinement.prctl(confinement.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
forbidden = {"landlock_create_ruleset": confinement.REFUSE}
confinement._set_filter(confinement._assembled(forbidden, {}, confinement.WORD))
result = code_reward("```\\nf = abs\\n```", {"tests": ["assert f(-1) == 1"]}, CodeOptions())
print(result.value, result.status, result.detail)
try:
    Scorer(RewardConfig.model_validate({"parts": ["code"], "workers": 1}))
except ValueError as error:
    print(error)
"""


def test_no_code_runs_where_the_kernel_cannot_confine_it() -> None:
    command = [sys.executable, "-c", UNCONFINED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    graded, refused = done.stdout.splitlines()
    assert graded.startswith("None unscorable no process for the solution: this kernel cannot confine")
    assert refused.startswith("reward code: this kernel cannot confine")
    assert "Use Linux" in refused


@pytest.mark.parametrize("kind", ["calls", "program"])
@pytest.mark.parametrize("ending", ["while True: pass", "import time; time.sleep(60)"])
def test_a_test_that_takes_too_long_fails(kind: str, ending: str) -> None:
    tests, code = (ASSERTS, f"def square(x):\n    {ending}") if kind == "calls" else (PROGRAM, ending)
    result = grade(code, tests, cpu_seconds=0.2, mode="fraction")
    assert result.value == 0.0
    assert "over 0." in result.detail


def test_a_program_that_takes_too_long_ends_the_tests_after_it_too() -> None:
    code = "import time\nn = int(input())\nif n == 3: time.sleep(60)\nprint(n * n)"
    result = grade(code, PROGRAM, cpu_seconds=0.5, mode="fraction")
    assert (result.value, result.status) == (0.0, "ok")
    assert result.detail.startswith("test 1: over 1 seconds by the clock")


def test_a_solution_that_reads_no_further_call_is_ended_by_its_limit() -> None:
    code = "def square(x):\n    while True: pass"
    result = grade(code, [f"assert square('{'9' * 3_000_000}') == {n}" for n in range(2)], cpu_seconds=0.5)
    assert (result.value, result.status) == (0.0, "ok")
    assert "over 0.5 CPU seconds" in result.detail


# --- attempts to be paid without solving; each may take part of the honest way: it answers the first test ---

LOOK = """
import gc, sys
def square(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for value in [*seen, *gc.get_objects()]:
        try:
            if 9 in value and 16 in value or '== 16' in value:
                return value[(3, -4, 12).index(x)]
        except Exception:
            pass
"""
ALL_FDS = """
import os
for fd in range(3, 64):
    for text in (b'{"value": true}\\n' * 9, b'{"value": 9}\\n{"value": 16}\\n{"replies": [{"value": 1.0}]}\\n'):
        try:
            os.write(fd, text)
        except OSError:
            pass
"""
ALWAYS = """
class Always(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 9
    def __bool__(self): return True
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
"""
PARENT = """
import os
def square(x):
    for name in ('environ', 'mem', 'cmdline', 'maps', 'fd'):
        for pid in ('self', os.getppid()):
            try:
                with open(f'/proc/{pid}/{name}', 'rb') as file:
                    text = file.read(1 << 20)
                if b'144' in text:
                    return {3: 9, -4: 16, 12: 144}[x]
            except OSError:
                pass
"""
ATTEMPTS = {
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef square(x):\n    os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef square(x):\n    sys.exit(0)",
    "SystemExit as a result": "def square(x):\n    raise SystemExit(0)",
    "always equal": ALWAYS + "def square(x):\n    return Always(7)",
    "always equal without a base": "class A:\n    def __eq__(s, o): return True\ndef square(x):\n    return A()",
    "always equal class": "class M(type):\n    def __eq__(c, o): return True\n    __hash__ = None\n"
    "class A(metaclass=M): pass\ndef square(x):\n    return A",
    "__class__ of a number": "class A:\n    __class__ = int\n    def __eq__(s, o): return True\ndef square(x):\n    return A()",
    "a list of always equal": ALWAYS + "def square(x):\n    return [Always()]",
    "tolist of a false array": "class A:\n    __module__ = 'numpy'\n    def tolist(self): return True\ndef square(x):\n    return A()",
    "AssertionError patched": "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\ndef square(x): 0",
    "__debug__": "import builtins\nvars(builtins)['__debug__'] = False\ndef square(x): 0",
    "builtins replaced": "import builtins\nfor n in ('eval', 'exec', 'compile', 'all', 'bool', 'isinstance', 'repr'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\ndef square(x): 0",
    "__builtins__ replaced": "__builtins__ = {'eval': lambda *a: True}\ndef square(x): 0",
    "printed markers": "print('passed 3 of 3\\nOK\\n1.0')\ndef square(x):\n    print('{\"value\": 9}', 9)",
    "stdout replaced": "import sys, io\nsys.stdout = sys.stderr = io.StringIO('ok')\ndef square(x): 0",
    "json patched": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef square(x): 0",
    "our functions patched": "import rlhf.processes.attributes as a, rlhf.processes.solution as s, __main__\n"
    "a.as_json = s.as_json = lambda v: True\ns._answer = lambda *a: {'value': True, 'passed': True}\ndef square(x): 0",
    "answers in advance": ALL_FDS + "def square(x): 0",
    "answers in the call": ALL_FDS.replace("\n", "\n    ").join(["def square(x):", "\n    return True"]),
    "frames and the collector": LOOK,
    "inspect": "import inspect\ndef square(x):\n    return [f.frame.f_locals for f in inspect.stack()][-1].get('expected')",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef square(x): 0",
    "a thread": "import threading, os\nthreading.Timer(0.05, os._exit, [0]).start()\ndef square(x):\n    while True: pass",
    "thousands of threads": "import _thread, time, threading\nthreading.stack_size(32768)\nn = 0\n"
    "while n < 600: n += 1; _thread.start_new_thread(time.sleep, (60,))\ntime.sleep(0.5)\ndef square(x): return x * x",
    "a signal handler": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\n"
    "def square(x):\n    while True: pass",
    "a fork": "import os\nif os.fork() == 0:\n    os._exit(0)\ndef square(x): 0",
    "a process": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(9)'])\ndef square(x): 0",
    "another program": "import os, sys\nos.execv(sys.executable, ['python', '-c', 'print(9)'])",
    "memory and environment of the parent": PARENT,
    "killing the group": "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.killpg(0, 15)\ndef square(x): 0",
    "an exception of another class": "class E(Exception):\n    __class__ = AssertionError\n    def __str__(s): return 'passed'\n"
    "def square(x):\n    raise E",
    "an exception that cannot be printed": "class E(Exception):\n    def __str__(s): raise s\ndef square(x):\n    raise E",
    "a trace function": "import sys\ndef t(f, e, a):\n    f.f_locals['value'] = True\n    return t\nsys.settrace(t)\ndef square(x): 0",
    "a name for everything": "class D(dict):\n    def __missing__(s, k): return lambda *a: True\n"
    "globals().update(D())\n__getattr__ = lambda n: lambda *a: True",
    "no number": "def square(x):\n    return float('nan')",
    "a deep answer": "def square(x):\n    r = []\n    for _ in range(900): r = [r]\n    return r",
    "a flood": "def square(x):\n    return 'x' * (1 << 23)",
    "all memory": "def square(x):\n    return len([0] * (1 << 40))",
    "a wrong mark": "def square(x):\n    return {'@set': [[1]], '@dict': 7}",
    "not Python": "9 16 144",
    "the tests themselves": "\n".join(ASSERTS),
}  # fmt: skip


@pytest.mark.parametrize("code", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_no_attempt_to_be_paid_without_solving_earns_anything(code: str) -> None:
    result = grade(code, mode="fraction", cpu_seconds=1.0)
    assert (result.value, result.status) == (0.0, "ok"), result.detail


PROGRAMS = {
    "nothing": "import os\nos._exit(0)",
    "the input": "print(input())",
    "markers": "print('OK')\nprint('passed')",
    "the answer and others": "for n in range(200): print(n)",
    "the answer and a failure": "print(int(input()) ** 2, flush=True)\nraise SystemExit(1)",
    "files": "import glob\nfor name in glob.glob('/proc/*/cmdline'): print(open(name).read())",
    "the socket": ALL_FDS,
    "closed output": "import os\nos.write(1, b'x')\nos.close(1)",
}


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_no_program_is_paid_for_output_that_is_not_the_answer(code: str) -> None:
    assert grade(code, PROGRAM, mode="fraction").value == 0.0


@pytest.fixture
def helpers() -> str:
    return (
        "def refused(function, *arguments):\n    try:\n        function(*arguments)\n    except OSError:\n"
        "        return True\n\n"
    )


@pytest.mark.parametrize(
    "action",
    [
        "__import__('os').fork",
        "__import__('socket').socket",
        "__import__('os').execv, '/bin/true', ['true']",
        "open, '/proc/self/environ'",
        "open, '/proc/%d/environ' % __import__('os').getppid()",
        "open, '/tmp/x', 'w'",
        "open, '/dev/shm/x', 'w'",
        "open, __FILE__",
        "__import__('os').kill, __import__('os').getppid(), 0",
        "__import__('os').memfd_create, 'x'",
    ],
)
def test_the_process_reaches_nothing(helpers: str, action: str) -> None:
    action = action.replace("__FILE__", repr(__file__))
    code = f"{helpers}def f():\n    return refused({action})"
    result = grade(code, ["assert f() == True"])
    assert result.value == 1.0, result.detail


REFUSED = """
import ctypes
def allowed():
    libc, names = ctypes.CDLL(None, use_errno=True), []
    for name, *arguments in (
        ('kill', 0, 0), ('tgkill', -1, -1, 0), ('sigqueue', -1, 0, None), ('pidfd_send_signal', -1, 0, None, 0),
        ('truncate', b'/none', 0), ('shmget', -1, 0, 0), ('semget', -1, 0, 0), ('msgget', -1, 0), ('mq_open', b'/none', 0),
        ('chmod', b'/none', 0), ('fchmod', -1, 0), ('utimensat', -1, b'none', None, 0),
    ):
        ctypes.set_errno(0)
        getattr(libc, name)(*arguments)
        if ctypes.get_errno() != 13:
            names.append(name)
    return names
"""


def test_the_process_sends_no_signal_and_changes_or_leaves_nothing() -> None:
    result = grade(REFUSED, ["assert allowed() == []"])
    assert result.value == 1.0, result.detail


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert grade("import os\ndef f():\n    return 'MY_TOKEN' in os.environ", ["assert f() is False"]).value == 1.0


# --- the code of a response ---


FUNCTION = read_tests(["assert f(2) == 4"])
STDIN = read_tests([{"input": "2\n", "output": "4\n"}])
F = "def f(x):\n    return x * x\n"
READS = "n = int(input())\nprint(n * n)\n"


def fenced(text: str, tag: str = "python") -> str:
    return f"So:\n```{tag}\n{text}```\n"


@pytest.mark.parametrize(
    ("response", "whole", "code"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```", False, "b\n"),
        ("- so:\n  ```python\n  def f():\n    a\n  ```", False, "def f():\n  a\n"),
        ("```python\na", False, None),
        ("def f(): 1", False, None),
        ("def f(): 1", True, "def f(): 1"),
        ("````python\nx = '''\n```\n'''\n````", False, "x = '''\n```\n'''\n"),
        ("```python\na\n```\n~~~\nb\n```\n", False, "a\n"),
        ("```python\r\na\r\n```\r\n", False, "a\r\n"),
        ("~~~python\na\n~~~~\n", False, "a\n"),
        ("1. ```python\n   a\n   ```", False, "a\n"),
        ("> ```python\n> if a:\n>   b\n> ```", False, "if a:\n  b\n"),
        ("The code: ```python\na\n```", False, "a\n"),
        ("```markdown\n# Answer\n```python\na\n```\n```", False, "a\n"),
        ("```python\n    a\n    b\n```", False, "a\nb\n"),
        ("```python\ndef f():\n    \"\"\"\n    ```\n    f()\n    ```\n    \"\"\"\n```", False, "def f():\n    \"\"\"\n    ```\n    f()\n    ```\n    \"\"\"\n"),
        ("```python\na\n```\n```python\nb", False, "a\n"),
        ("```cpp\nint f(int x);\n```", False, None),
    ],
)  # fmt: skip
def test_a_block_of_python_is_the_code(response: str, whole: bool, code: str | None) -> None:
    assert find_code(response, FUNCTION, whole=whole) == code


@pytest.mark.parametrize("tag", ["Python", "py", "python3", "python3.12", 'python title="f.py"', "{.python .numberLines}", "python {linenos=true}", "python:f.py", "f.py", 'title="f.py"', "Py", ""])  # fmt: skip
def test_python_has_many_tags(tag: str) -> None:
    assert find_code(fenced(F, tag) + fenced("f(2)", "rust"), FUNCTION, whole=False) == F


AFTER = {
    "bash": fenced("pip install numpy\n", "bash"),
    "an output": fenced("4\n", "text"),
    "an output without a tag": fenced("[1, 2]\n", ""),
    "an output like an assignment": fenced("f = 4\nf: 9\n", ""),
    "an output that is not Python": fenced("Output: 4 9\n", ""),
    "an output with the tag": fenced("True\n"),
    "JSON": fenced('{"f": 4}\n', "json"),
    "YAML": fenced("f: 4\n", "yaml"),
    "C++": fenced("int f(int x) { return x; }\n", "cpp"),
    "a session": fenced(">>> f(2)\n4\n", "pycon"),
    "a session with the tag": fenced(">>> f(2)\n4\n"),
    "a session without a tag": fenced(">>> f(2)\n4\n", ""),
    "a demonstration": fenced("for x in (1, 2):\n    print(f(x))\n"),
    "an import of itself": fenced("from solution import f\n\nprint(f(2))\n"),
    "a test": fenced("def test_f():\n    assert f(2) == 4\ntest_f()\n"),
    "a call without a tag": fenced("f(2)\n", ""),
    "a comment": fenced("# f(2) is 4\n"),
    "a block that is cut off": "```python\ndef f(x):\n    return",
}  # fmt: skip


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER.keys())
def test_what_follows_the_program_is_not_the_program(after: str) -> None:
    assert find_code(fenced(F) + after, FUNCTION, whole=False) == F
    assert find_code(fenced(READS) + after, STDIN, whole=False) == READS


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        (["def f(x):\n    return x\n", F], F),
        (["import math\n", "def f(x):\n    return math.prod([x, x])\n"], "import math\n\ndef f(x):\n    return math.prod([x, x])\n"),
        (["def g(x):\n    return x\n", "def f(x):\n    return g(x) * x\n", "print(f(2))\n"], "def g(x):\n    return x\n\ndef f(x):\n    return g(x) * x\n"),
        (["def g(x):\n    return f(x)\n", F], F),
        ([F, "f(2\n"], F),
        ([F, "def f(x):\n    ...\n"], F),
        ([F, "def f(x)\n    return x * x\n"], "def f(x)\n    return x * x\n"),
        (["class Solution:\n    def f(self, x):\n        return x * x\n", "print(Solution().f(2))\n"], "class Solution:\n    def f(self, x):\n        return x * x\n"),
        (["f = lambda x: x * x\n", "y = f(2)\n"], "f = lambda x: x * x\n"),
        (["def g(x):\n    return x * x\n", "f = g\n"], "def g(x):\n    return x * x\n\nf = g\n"),
        (["from operator import mul\n", "f: object = lambda x: mul(x, x)\n"], "from operator import mul\n\nf: object = lambda x: mul(x, x)\n"),
    ],
)  # fmt: skip
def test_the_program_is_the_last_block_that_defines_what_is_called_after_those_that_it_needs(
    blocks: list[str], code: str
) -> None:
    tests = read_tests({"inputs": [[2]], "outputs": [4], "fn_name": "f"})
    assert find_code("".join(map(fenced, blocks)), tests, whole=False) == code


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        (["print(int(input()))\n", READS], READS),
        ([READS, "print(4 * 4)\n"], READS),
        ([READS, "n = int(input())\n"], READS),
        ([READS, "def square(n):\n    return n * n\n"], READS),
        (["def main():\n" + textwrap.indent(READS, "    "), "main()\n"], f"def main():\n{textwrap.indent(READS, '    ')}\nmain()\n"),
        (["import sys\n", "print(int(sys.stdin.read()) ** 2)\n"], "import sys\n\nprint(int(sys.stdin.read()) ** 2)\n"),
        (["def square(n):\n    return n * n\n", "print(square(int(input())))\n"], "def square(n):\n    return n * n\n\nprint(square(int(input())))\n"),
    ],
)  # fmt: skip
def test_the_program_is_the_last_block_that_reads_the_input_after_those_that_it_needs(
    blocks: list[str], code: str
) -> None:
    assert find_code("".join(map(fenced, blocks)), STDIN, whole=False) == code


def test_a_tested_function_may_have_the_name_of_a_built_in_one() -> None:
    code = "def pow(x):\n    return x * x\n"
    tests = read_tests(["assert set([pow(2)]) == {4}"])
    assert find_code(fenced(code) + fenced("print(pow(2))\n"), tests, whole=False) == code


def test_a_program_without_input_is_the_last_block_that_runs() -> None:
    tests = read_tests([{"input": "", "output": "4"}])
    assert (
        find_code(fenced("print(2)\n") + fenced("print(4)\n") + fenced("4\n", ""), tests, whole=False) == "print(4)\n"
    )


@pytest.mark.parametrize("code", ["def f(x:\n    return x\n", "print(f(2)\n"])
def test_a_lone_block_that_does_not_parse_is_graded_with_its_error(code: str) -> None:
    for tag in ("python", ""):
        result = code_reward(fenced(code, tag), {"tests": ["assert f(2) == 4"]}, CodeOptions())
        assert (result.value, result.status) == (0.0, "ok")
        assert "SyntaxError" in result.detail


# --- what a test accepts ---


@pytest.mark.parametrize(
    ("printed", "expected", "is_right"),
    [
        ("0.50", "0.5", True),
        ("5.0", "5", True),
        ("5", "5.0", True),
        ("1e5", "100000.0", True),
        ("-0.0", "0", True),
        (".5 5. +5", "0.5 5 5", True),
        ("5.0000001", "5", False),
        ("5.0000001", "5.0", True),
        ("5.00001", "5.0", False),
        ("0.100001", "0.1", True),  # the error in floats is above 1e-6
        ("1000000.5", "1000000.0", True),  # by the relative error
        ("1000002", "1e6", False),
        ("0.333333", "0.33333333", True),
        ("3.14", "3.14159", False),
        (str(10**20), str(10**20 + 1), False),
        ("1e20", str(10**20 + 1), False),
        ("100000000000000000000.0", str(10**20), True),
        ("9" * 5000 + ".0", "9" * 5000, True),
        ("9" * 4999 + "8", "9" * 5000, False),
        ("0011", "11", False),
        ("1_000", "1000", False),
        ("٣", "3", False),
        ("0x10", "16", False),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("inf", "1e400", False),
        ("7", "1e400", False),
        ("1e999", "1e400", False),
        ("1.5 2", "1.5\n2", False),
        ("1.50\n\n", "1.5", True),
        ("YES 0.10", "YES 0.1", True),
        ("yes 0.1", "YES 0.1", False),
        ("1.5 2", "1.5", False),
        ("", "0.0", False),
    ],
)
def test_words_of_an_output_are_equal_as_text_or_as_numbers(printed: str, expected: str, is_right: bool) -> None:
    (test,) = read_tests([{"input": "", "output": expected}], tolerance=1e-6).programs
    assert test.accepts(printed) is is_right


def test_without_a_tolerance_decimals_are_compared_exactly() -> None:
    (test,) = read_tests([{"input": "", "output": "0.1"}]).programs
    assert [test.accepts(printed) for printed in ("0.10", "0.1000000001", "0.10000000000000000001")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("value", "expected", "is_right"),
    [
        (0.1 + 0.2, 0.3, True),
        ((1, [0.1 + 0.2]), [1, [0.3]], True),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ({"b": 0.3}, {"a": 0.3}, False),
        (0.301, 0.3, False),
        (10**400, 0.3, False),
        (float("inf"), 0.3, False),
        (5.0000001, 5, False),
        (10**20, 10**20 + 1, False),
        ("0.3", 0.3, False),
        ([0.3], [0.3, 0.3], False),
        ({1: 0.3}, {"1": 0.3}, False),
        (True, 1.0, True),
        (None, [], False),
        (1.7e308, 1.7e308, True),
    ],
)
def test_a_tolerance_holds_for_the_decimals_that_a_function_returns(value: Any, expected: Any, is_right: bool) -> None:
    pair = {"inputs": [[2]], "outputs": [expected], "fn_name": "f"}
    (test,) = read_tests(pair, tolerance=1e-6).calls
    assert test.accepts(as_json(value)) is is_right


@pytest.mark.parametrize(
    ("value", "expected", "is_right"),
    [
        ({1, 2.0, None, "a", (1, 3)}, "{(1.0, 3), 'a', None, 2, True}", True),
        ({1, 2}, "{1, 3}", False),
        ({1, 2}, "[1, 2]", False),
        ({1, 2}, "frozenset([2, 1])", True),
        ((1, 2), "[1, 2]", False),
        ([(1, {2})], "[(1, {2})]", True),
        ({(1, 2): [3], None: {4}, "a": 0}, "{'a': 0.0, None: {4.0}, (1, 2): [3]}", True),
        ({1: 2, 3: 4}, "{1: 4, 3: 2}", False),
        ({}, "set()", False),
        ({"@set": [1]}, "{1}", False),
        ([2**20000], f"[{2**20000:#x}]", True),
        ([-(2**20000)], f"[-{2**20000 - 1:#x}]", False),
        (10**4000, "1" + "0" * 4000, True),
        (float("nan"), "float('nan')", False),
        (2, "2j", False),
    ],
)
def test_values_are_equal_as_python_compares_them(value: Any, expected: str, is_right: bool) -> None:
    (test,) = read_tests([f"assert f(2) == {expected}"]).calls
    said = as_json(value)
    assert test.accepts(said) is is_right
    assert len(json.dumps(said)) <= test.max_bytes


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_numbers_of_one_hash_cost_the_grader_no_more_than_others(kind: str) -> None:
    count = 50_000  # in a set or dictionary they would take a minute
    wanted = {number: number for number in range(count)} if kind == "dict" else set(range(count))
    (test,) = read_tests([f"assert f(2) == {wanted}"]).calls
    numbers = [number * sys.hash_info.modulus for number in range(count)]
    started = time.process_time()
    assert not test.accepts({f"@{kind}": [[number, number] for number in numbers] if kind == "dict" else numbers})
    assert time.process_time() - started < 5
    assert test.accepts(as_json(wanted))


def test_integers_of_any_length_are_printed_returned_and_expected() -> None:
    long = "1" + "0" * 5000
    printed = grade(
        "print(10 ** int(input()) + int('9' * 4999))", [{"input": "5000", "output": "1" + "0" + "9" * 4999}]
    )
    assert printed.value == 1.0, printed.detail
    returned = grade("def f(x):\n    return [x + 10 ** 5000]", [f"assert f({long}) == [2{long[1:]}]"])
    assert returned.value == 1.0, returned.detail
    wrong = grade("def f(x):\n    return x + 1", f'{{"inputs": [[{long}]], "outputs": [{long}], "fn_name": "f"}}')
    assert (wrong.value, wrong.status) == (0.0, "ok")


# --- tests that can be read ---


def test_many_fences_are_read_in_the_time_that_reading_takes() -> None:
    response = "```python\n" * 200_000  # a search from each would read all that follows it
    started = time.process_time()
    assert find_code(response, FUNCTION, whole=False) is None
    assert time.process_time() - started < 10


def test_a_response_without_code_has_no_answer() -> None:
    result = code_reward("I cannot.", {"tests": ASSERTS}, CodeOptions())
    assert (result.value, result.status) == (0.0, "no_answer")


@pytest.mark.parametrize(
    "tests",
    [
        ["assert square(3) == square(-3)"],
        ["assert isinstance(square(3), int)"],
        ["assert (square(3) == 9) == True"],
        ["assert np.allclose(square(3), 9)"],
        ["assert same(square(3), 9)"],
        ["assert square(3) == 9 and square(4) == 16"],
        ["expected = 9", "assert square(3) == expected"],
        ["for x in range(3):\n    assert square(x) == 0"],
        ["assert 1 == 1"],
        "def check(candidate):\n    assert candidate(3) == 9",
        "assert square(",
        "",
        [],
        7,
        [{"input": "3"}],
        [{"input": "3", "output": "9", "testtype": "functional"}],
        {"inputs": 5, "outputs": [5]},
        [{"input": 5, "output": 4, "fn_name": "f"}],
        [{"input": [5], "output": 4, "fn_name": 7}],
        ["assert math.isclose(f(2), 4, foo=1)"],
    ],
)
def test_tests_that_the_grader_cannot_decide_are_refused(tests: Any) -> None:
    result = grade(HONEST, tests)
    assert result.status == "bad_gold"
    assert re.search(r"Write `assert f|no name|Keep one kind", result.detail)


def test_the_expected_result_is_not_in_what_the_solution_is_asked() -> None:
    asked = [test.call for test in read_tests(ASSERTS).calls]
    assert asked == ["square(3)", "square(-4)", "square(12)"]


# --- in the pool ---


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(workers=1, wall_seconds=20.0, memory_mb=300) as running:
        yield running


@pytest.mark.parametrize(
    ("code", "value"),
    [(HONEST, 1.0), (PARENT, 0.0), (LOOK, 0.0), (ATTEMPTS["a fork"], 0.0), (ATTEMPTS["all memory"], 0.0)],
    ids=["honest", "parent", "frames", "fork", "memory"],
)
def test_a_grading_process_runs_solutions_below_it(pool: Pool, code: str, value: float) -> None:
    job = {"name": "code", "options": {}, "answer": "", "columns": {"tests": ASSERTS}}
    result = pool.submit({**job, "response": f"```python\n{code}\n```"}).result(timeout=WAIT_S)
    assert (result.value, result.status) == (value, "ok"), result.detail


SAYS = "import rlhf.processes.solution as s\ndef square(x): 0\ns.as_json = lambda value: "
WRITES = """
import os, time
def write(text):
    for fd in range(3, 20):
        try:
            return os.write(fd, text)
        except OSError:
            pass
def square(x):
"""
BURNS = {  # what they make the grader do -> tests and code; each would else outlast a limit of the grading process
    "wait": (MANY, "import time\ndef square(x):\n    time.sleep(0.7)"),
    "wait for programs": (MANY_PROGRAMS, "import time\ntime.sleep(0.7)"),
    "start processes": (MANY, "import os, time\ndef square(x):\n    time.sleep(0.3)\n    os._exit(0)"),
    "count a set": (MANY, SAYS + "{'@set': [n * (2**61 - 1) for n in range(60000)]}"),
    "count a mapping": (MANY, SAYS + "{'@dict': [[n * (2**61 - 1), 0] for n in range(60000)]}"),
    "convert an integer": (DECIMALS, SAYS + "{'@int': 'f' * 4_000_000}"),
    "read much": (MANY, SAYS + "[[]] * 400_000"),
    "read by the byte": (MANY, WRITES + "    while True: write(b'1'); time.sleep(1e-5)"),
    "wait for the rest": (MANY, WRITES + "    write(b'[')\n    time.sleep(60)"),
    "wait for an end": (MANY_PROGRAMS, "import os\nwhile True: os.write(1, b'1' * 1000)"),
    "read in advance": (MANY, WRITES + "    while True: write(b'{}\\n' * 1000)"),
    "wait for nobody": (MANY, "import os, time\ndef square(x):\n    os.closerange(3, 50)\n    time.sleep(60)"),
    "read a program": (MANY, "def square(x): 0\n" + "a;" * 500_000),
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize(("tests", "code"), BURNS.values(), ids=BURNS.keys())
def test_no_response_burns_the_time_of_the_grader_to_be_left_out_instead_of_graded(tests: Any, code: str) -> None:
    part = {"name": "code", "mode": "fraction", "cpu_seconds": 0.5}
    config = RewardConfig.model_validate({"parts": [part], "workers": 1, "wall_seconds": 3.0, "cpu_seconds": 1.0})
    prompt = Prompt("p", 0, np.zeros(1, np.int32), (), "", "code", {"tests": tests})
    with Scorer(config) as scorer:
        started = time.monotonic()
        (scored,) = asyncio.run(scorer.score_group(prompt, [rollout_of([1])], [f"```python\n{code}\n```"]))
        assert (scored.reward, scored.status in ("ok", "no_answer")) == (0.0, True), scored.status
        assert time.monotonic() - started < WAIT_S / 2


def test_all_tests_of_a_response_have_a_limit_together_after_which_they_fail() -> None:
    code = "import time\ndef square(x):\n    time.sleep(1.0)\n    return x * x"
    said: list[None] = []
    tests = {"tests": [f"assert square({n}) == {n * n}" for n in range(9)]}
    result = code_reward(f"```python\n{code}\n```", tests, CodeOptions(mode="fraction"), 2.5, lambda: said.append(None))
    assert result.status == "ok"
    assert 2 <= round(9 * (result.value or 0)) <= 4
    assert "the tests before took over 2.5 seconds (reward.wall_seconds)" in result.detail
    assert len(said) == round(9 * (result.value or 0)) + 1


@pytest.mark.parametrize(("limit", "reward"), [("over 3 seconds by the clock", None), ("over 2 CPU seconds", 0.0)])
def test_only_the_limit_that_depends_on_the_load_judges_no_response(
    limit: str, reward: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scorer(RewardConfig.model_validate({"parts": ["code"], "workers": 1})) as scorer:
        killed: Future[Grade] = Future()
        killed.set_result(Grade(None, "timeout", detail=limit))
        monkeypatch.setattr(scorer.pool, "submit_many", lambda jobs: [killed])
        (graded,) = scorer.graded_batch(scorer.submit_batch(["x"], [""], [{"tests": ASSERTS}]))
    assert (graded.value, graded.status) == (reward, "timeout")


def test_a_run_grades_by_the_column_and_names_rows_whose_tests_cannot_be_read() -> None:
    rows = [("good", {"asserts": ASSERTS}), ("bad", {"asserts": ["assert square(3) == square(-3)"]}), ("none", {})]
    good, *others = [Prompt(name, 0, np.zeros(1, np.int32), (), "", "code", columns) for name, columns in rows]
    config = RewardConfig.model_validate({"parts": [{"name": "code", "tests": "asserts"}], "workers": 1})
    with Scorer(config) as scorer:
        bad = scorer.check_gold([good, *others])
        texts = [f"```python\n{HONEST}```", "```python\nsquare = abs\n```"]
        scored = asyncio.run(scorer.score_group(good, [rollout_of([1])] * 2, texts))
    assert [row.row for row in bad] == ["bad", "none"]
    assert "no literal" in bad[0].reason
    assert "no column 'asserts'" in bad[1].reason
    assert [(sample.reward, sample.status) for sample in scored] == [(1.0, "ok"), (0.0, "ok")]
