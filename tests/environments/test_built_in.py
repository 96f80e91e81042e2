"""The built-in tools."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Seen, all_processes
from waiting import WAIT_S, eventually

from rlhf.environments.calculator import compute
from rlhf.environments.python_tool import python_tool
from rlhf.processes import confinement, domains
from rlhf.processes.confinement import ABI_SCOPES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), ("-3 ** 2", "-9"), ("2 ** -2", "0.25"), ("2^10", "1024"),
        ("0.1 + 0.2", "0.3"), ("1 / 3", "0.333333333333333"), ("7 // 2", "3"), ("-7 % 3", "2"), ("1e3", "1000"),
        ("1,234,567 + 1", "1234568"), ("2 × 3 ÷ 4 − 1", "0.5"), ("-0.05", "-0.05"), ("16 ** 0.5", "4"),
        ("2 ** 0.5", "1.4142135623731"), ("10 ** 40", "1" + "0" * 40), ("0 ** 99999999", "0"), (" 1 \n", "1"),
        ("1 / 8 ** 5", "0.000030517578125"),
    ],
)  # fmt: skip
def test_arithmetic_is_exact_where_a_decimal_is(expression: str, value: str) -> None:
    assert compute(expression)[:15] == value[:15]
    assert len(compute(expression)) <= max(len(value), 17)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "Division by zero"), ("1 % 0", "Division by zero"), ("0 ** -1", "Division by zero"),
        ("9 ** 9 ** 9", "too large"), ("10 ** 5000", "too large"), ("1e9999", "arithmetic|too large"),
        ("((10 ** 600) ** 2) ** 2", "too large"), ("2.5 ** 10000.5", "too large"), ("(-8) ** 0.5", "not a real"),
        ("__import__('os')", "Only numbers"), ("x + 1", "Only numbers"), ("True + 1", "Only numbers"),
        ("'a' * 3", "Only numbers"), ("2j", "Only numbers"), ("1, 2", "Only numbers"), ("1 +", "Not an arithmetic"),
        ("", "Not an arithmetic"), ("(" * 300 + "1" + ")" * 300, "Not an arithmetic"), ("\0", "Not an arithmetic"),
        ("1" * 1001, "over 1000 characters"), ("~1", "Only numbers"),
    ],
)  # fmt: skip
def test_everything_else_is_refused_at_once(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compute(expression)


def run(code: str, **limits: float) -> str:
    return asyncio.run(python_tool(**limits)(code))  # type: ignore[arg-type]


def test_a_program_returns_what_it_prints_with_its_errors_and_without_the_folder_it_ran_in() -> None:
    assert run("print(sum(range(10)))") == "45\n"
    said = run("print('before')\n1 / 0")
    assert said.startswith("before\nTraceback")
    assert '  File "main.py", line 2, in <module>' in said
    assert said.endswith("ZeroDivisionError: division by zero\n")
    assert run("import os; print(os.getcwd())") == ".\n"
    assert run("import sys; sys.exit(3)") == "[exit status 3]"
    assert run("pass") == ""
    assert "EOFError" in run("input()")
    assert run("import sys; sys.stdout.buffer.write(b'a\\xff')") == "a\\xff"
    assert run("print('\\ud800')") == "\\ud800\n"
    assert run("print(len('\ud800'))") == "1\n"  # no valid UTF-8: written as an escape


def test_an_error_of_a_program_names_no_place_of_this_machine_but_those_that_it_named_itself() -> None:
    answer = run("import json; json.loads('{')")
    assert 'File "main.py", line 1' in answer
    assert 'File "decoder.py", line' in answer
    assert "/" not in run("from json import nothing")
    assert "'/usr/lib/no/such'" in run("open('/usr/lib/no/such')")


def test_each_program_starts_anew_in_an_empty_folder() -> None:
    assert run("open('x', 'w').close(); import os; print(os.listdir('.'))").count("'") == 4
    assert "'x'" not in run("import os; print(os.listdir('.'))")
    assert run("print(hash('a'))") == run("print(hash('a'))")


def test_long_output_is_cut_and_does_not_block_the_program() -> None:
    assert run("print('x' * 1_000_000)", max_output_characters=10) == f"{'x' * 10}\n[output cut after 10 characters]"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_time_and_memory_end_a_program_and_all_that_it_started() -> None:
    assert run("print(1, flush=True)\nwhile True: pass", seconds=1.0) == "1\n\n[stopped after 1 seconds]"
    assert "MemoryError" in run("x = bytearray(10**9)", memory_mb=200)
    assert run("import os; os.kill(os.getpid(), 9)") == f"[ended by signal {signal.SIGKILL.value}]"
    pid = int(run(
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    ))  # fmt: skip
    assert eventually(lambda: not is_running(pid))


EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # of a thread
DELETED = "kept = [open(str(n), 'wb') for n in range(9)]\nfor n, file in enumerate(kept): os.unlink(str(n)); "
DELETED += "file.write(bytes(60_000_000))"


OVER = [
    ("import os\nwhile True:\n    os.fork()", "it has over 32 processes"),
    (
        "import contextlib, os\nwith contextlib.suppress(OSError):\n"
        "    for _ in range(40):\n        if os.fork() == 0: os.setsid(); break",
        "it has over 32 processes",
    ),
    (
        "import threading, time\nthreading.stack_size(65536)\n"
        "for _ in range(600): threading.Thread(target=time.sleep, args=(60,)).start()",
        "it has over 512 threads",
    ),
    ("for n in range(9): open(str(n), 'wb').write(bytes(60_000_000))", "its files have over 256 MiB"),
    (f"import os\n{DELETED}", "its files have over 256 MiB"),
    (
        f"import os, threading, time\ndef write():\n    time.sleep(0.2)\n    exec({DELETED!r})\n"
        "    time.sleep(60)\nthreading.Thread(target=write).start()\n"
        f"import ctypes; ctypes.CDLL(None).syscall({EXIT}, 0)",
        "its files have over 256 MiB",
    ),
    ("for n in range(5000): open(str(n), 'w')", "it has over 4096 files"),
    ("import os\nfor _ in range(400): os.mkdir('d' * 99); os.chdir('d' * 99)", "its files cannot be seen"),
]


@pytest.mark.parametrize(
    ("code", "says", "scopes"), [*((*each, True) for each in OVER), *((*each, False) for each in OVER[:3])]
)
def test_a_program_over_a_bound_is_stopped_and_leaves_nothing(
    code: str, says: str, scopes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if not scopes:  # Landlock does not judge signals
        real = confinement._call
        monkeypatch.setattr(confinement, "_call", lambda *a: ABI_SCOPES - 1 if a[1:] == (None, 0, 1) else real(*a))
        monkeypatch.setattr(domains, "scope_signals", lambda: False)
    assert run(f"{code}\nimport time; time.sleep(60)").endswith(f"[stopped because {says}]")
    assert not [*tmp_path.iterdir()]


def test_a_program_that_forks_without_end_cannot_outrun_who_counts() -> None:
    """Each start waits until it is counted, so the bound holds however slow the counting is."""
    said = run("import os\nwhile True:\n    if os.fork() == 0: os.write(1, b'x')", seconds=WAIT_S)
    assert said.endswith("[stopped because it has over 32 processes]")
    assert said.count("x") <= 2 * 33  # a count misses at most one start in progress of each process that it sees


def test_processes_that_have_ended_do_not_count() -> None:
    """Orphans that the program has left are not reaped by it."""
    said = run(
        "import os\nfor _ in range(40):\n    if os.fork() == 0:\n"
        "        if os.fork() != 0: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)\n        os._exit(0)\n"
        "    os.wait()\nprint('all')",
        seconds=WAIT_S,
    )
    assert said == "all\n"


def test_paths_of_other_programs_stay_in_the_output_of_a_program() -> None:
    said = "'see /etc/' + 'passwd, /of-nobody/' + 'data.txt > /dev/' + 'null'"
    assert run(f"print({said})") == "see /etc/passwd, /of-nobody/data.txt > /dev/null\n"


def test_what_a_program_started_ends_with_its_caller_and_by_close_although_its_warden_stopped(tmp_path: Path) -> None:
    sleeps = "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.setsid()\n"
    sleeps += "        os.execlp('sleep', 'sleep', '98765')\nimport time; time.sleep(60)"
    script = (
        f"import asyncio\nfrom rlhf.environments.python_tool import python_tool\nasyncio.run(python_tool()({sleeps!r}))"
    )

    def sleepers() -> list[Seen]:
        return [process for process in all_processes().values() if process.command.endswith("sleep 98765")]

    caller = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert eventually(lambda: bool(sleepers()))
    caller.kill()
    caller.wait()
    assert eventually(lambda: not sleepers())

    variables = {"PATH": os.environ["PATH"]}
    command = domains.Command([sys.executable, "-c", sleeps], tmp_path, work=tmp_path, variables=variables)
    command.begin()
    assert eventually(lambda: bool(sleepers()))
    os.kill(command._warden, signal.SIGSTOP)
    command.close()
    assert not sleepers()  # a warden that is killed ends only the program itself


def test_a_program_is_refused_where_no_further_domain_can_be_made() -> None:
    script = """
import asyncio
from rlhf.environments.python_tool import python_tool
from rlhf.processes.confinement import scope_signals
while scope_signals():  # Linux nests 16 layers
    pass
print(asyncio.run(python_tool()("print(1)")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == ""
    assert "it cannot run in a domain of its own: ConfinementError" in done.stderr


def test_a_program_runs_where_the_limits_are_lower_than_its_own() -> None:
    script = """
import asyncio, resource
from rlhf.environments.python_tool import python_tool
for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
    resource.setrlimit(limit, (3 if limit == resource.RLIMIT_CPU else 500 * 2**20,) * 2)
print(asyncio.run(python_tool(memory_mb=9000)("print(1 + 1)")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "2\n\n", done.stderr


def test_many_programs_run_at_the_same_time_in_one_process() -> None:
    async def many() -> list[str]:
        tool = python_tool()
        return await asyncio.gather(*(tool(f"print({number})") for number in range(4)))

    assert asyncio.run(many()) == [f"{number}\n" for number in range(4)]


def test_a_limit_must_be_above_0() -> None:
    with pytest.raises(ValueError, match="above 0"):
        python_tool(seconds=0)
