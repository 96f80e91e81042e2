"""A program as an environment: how it is started, what it may reach, what becomes of its reward, what it leaves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import all_processes, below
from waiting import WAIT_S, eventually

from rlhf.config.environment import EnvironmentConfig
from rlhf.environments.hosts import Hosts, readable_folders
from rlhf.environments.program import named_files
from rlhf.environments.turns import CallLimitError, FailedError
from rlhf.types import Outcome

pytestmark = pytest.mark.slow  # they start processes

SEEDS = {"group": 7, "sample": 0}
REWARD = "import json, os; left = open(os.environ['RLHF_REWARD'], 'w')\n"


@contextmanager
def hosts(tmp_path: Path, source: str, *, port: int = 1, **keys: Any) -> Iterator[Hosts]:
    (tmp_path / "agent.py").write_text(textwrap.dedent(source))
    command = [sys.executable, str(tmp_path / "agent.py")]
    config = EnvironmentConfig(**{"name": "program", "command": command, "timeout_s": WAIT_S, "processes": 8, **keys})
    opened = Hosts(config, say=lambda line: None, port=port)
    try:
        yield opened
    finally:
        opened.close()


async def outcome(opened: Hosts, port: int = 1, **row: Any) -> Outcome | Exception:
    session = await opened.open(row, SEEDS)
    try:
        return await session.run({"url": f"http://127.0.0.1:{port}", "key": "sk-1"})
    except (CallLimitError, FailedError) as error:
        return error
    finally:
        await session.close()


def run(tmp_path: Path, source: str, *, times: int = 1, **keys: Any) -> list[Any]:
    async def together(opened: Hosts) -> list[Any]:
        port = keys.get("port", 1)
        return list(await asyncio.gather(*(outcome(opened, port, number=i) for i in range(times))))

    with hosts(tmp_path, source, **keys) as opened:
        return asyncio.run(together(opened))


def test_a_program_gets_its_row_and_leaves_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    source = REWARD + (
        "row = json.load(open(os.environ['RLHF_ROW']))\n"
        "os.environ['no_proxy']\n"  # a proxy that `env` names is not for the endpoint
        "names = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'ANTHROPIC_BASE_URL', 'ANTHROPIC_API_KEY', 'RLHF_SEED']\n"
        "facts = {name: os.environ[name] for name in names}\n"
        "json.dump({'score': row['number'], 'speed': 0.5, 'facts': facts}, left)\n"
    )
    assert run(tmp_path, source, times=3) == [
        Outcome(
            "ok",
            float(number),
            {"speed": 0.5},
            {
                "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
                "OPENAI_API_KEY": "sk-1",
                "ANTHROPIC_BASE_URL": "http://127.0.0.1:1",
                "ANTHROPIC_API_KEY": "sk-1",
                "RLHF_SEED": "7",
            },
        )
        for number in range(3)
    ]


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        ("raise SystemExit('no luck')", FailedError, "no luck"),
        ("import time; time.sleep(100)", CallLimitError, "over 1 seconds by the clock"),
        (REWARD + "left.write('{')", CallLimitError, "the reward file holds no reward"),
        (REWARD + "left.write('NaN')", CallLimitError, "no finite number"),
        (REWARD + "left.write('\"1\"')", CallLimitError, "no finite number"),
        (REWARD + "left.write('{\"score\": [1]}')", CallLimitError, "the reward file holds no reward"),
        (REWARD + "left.write('{\"reward\": 1}')", CallLimitError, "without score"),
        (REWARD + "left.write('[' * 100000)", CallLimitError, "the reward file holds no reward"),
        (
            REWARD + f'left.write(\'{{"score": 1, "facts": {{"a": {"[" * 950 + "]" * 950}}}}}\')',
            CallLimitError,
            "recursion",
        ),
        ("import os; os.mkfifo(os.environ['RLHF_REWARD'])", CallLimitError, "the reward file holds no reward"),
        ("import os; os.symlink('/etc/hostname', os.environ['RLHF_REWARD'])", CallLimitError, "holds no reward"),
        (REWARD + "left.write('2'); left.close(); raise SystemExit(3)", FailedError, "ended with status 3"),
        (REWARD + "left.write('2'); left.close(); os.kill(os.getpid(), 9)", CallLimitError, "ended by signal 9"),
        (REWARD + "left.write('2'); left.close(); os._exit(128 + 15)", CallLimitError, "ended by signal 15"),
        ("import sys\nwhile True: sys.stdout.write('x' * 1_000_000)", CallLimitError, "the program printed "),
        ("import os; os.truncate(1, 1 << 30)", CallLimitError, "the program printed 1,073,741,824 bytes"),
        (
            "import os, time\nfor _ in range(100):\n    if os.fork() == 0: break\ntime.sleep(300)",
            CallLimitError,
            "over 64 processes",
        ),
    ],
)
def test_a_program_that_fails_costs_its_rollout(tmp_path: Path, source: str, kind: type[Exception], says: str) -> None:
    (failed,) = run(tmp_path, source, timeout_s=1 if "clock" in says else WAIT_S)
    assert isinstance(failed, kind)
    assert says in str(failed)


def test_a_program_that_ends_well_without_a_reward_leaves_it_to_the_other_parts(tmp_path: Path) -> None:
    assert run(tmp_path, "print(1)") == [Outcome()]


def test_files_that_are_asked_for_are_returned_as_texts(tmp_path: Path) -> None:
    source = (
        "import os; os.makedirs('src/deep'); os.mkfifo('pipe.txt'); os.symlink('/etc/hostname', 'link.txt')\n"
        "for name in ('answer.txt', 'other.md', 'src/a.py', 'src/deep/b.py'): open(name, 'w').write(name)\n"
        "open('big.txt', 'wb').write(b'\\xff' + b'x' * 1_000_000)\n"
    )
    (ended,) = run(tmp_path, source, returned_files=["*.txt", "src/**/*.py", "none"])
    files = ended.files
    big = files.pop("big.txt")
    assert files == {name: name for name in ("answer.txt", "src/a.py", "src/deep/b.py")}
    assert big == "\ufffd" + "x" * 65535
    (none,) = run(tmp_path, "", returned_files=["*.txt"])
    assert none.files == {}


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ("for i in range(40): open(f'{i}', 'w')", "the program left over 32 files of environment.returned_files"),
        ("for _ in range(20): os.mkdir('x' * 250); os.chdir('x' * 250)", "cannot be searched for returned_files"),
    ],
)
def test_more_files_than_can_be_returned_cost_the_rollout(tmp_path: Path, left: str, says: str) -> None:
    (failed,) = run(tmp_path, f"import os\n{left}", returned_files=["*", "**/x"])
    assert isinstance(failed, CallLimitError)
    assert says in str(failed)


def test_no_file_is_returned_through_a_link_in_place_of_the_folder(tmp_path: Path) -> None:
    source = "import os; os.rename('../work', '../other'); os.symlink('/etc', '../work')"
    (ended,) = run(tmp_path, source, returned_files=["host*"])
    assert ended.files == {}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["python", "nowhere/agent.py"], "there is no file nowhere/agent.py"),
        (["nowhere/agent"], "program nowhere/agent was not found"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused_before_any_rollout(
    tmp_path: Path, command: list[str], says: str
) -> None:
    with pytest.raises(ValueError, match=says), hosts(tmp_path, "", command=command):
        raise AssertionError("it started")


@pytest.mark.parametrize("command", [["/agent.py"], ["-c", "1", "/"]])
def test_a_command_that_would_let_a_program_read_everything_is_refused(tmp_path: Path, command: list[str]) -> None:
    with (
        pytest.raises(ValueError, match=r"lies directly in /|no file /agent\.py"),
        hosts(tmp_path, "", command=["python", *command]),
    ):
        raise AssertionError("it started")


def test_of_a_folder_bin_only_that_of_an_interpreter_opens_what_is_around_it(tmp_path: Path) -> None:
    for around, packages in (("home", ""), ("venv", "lib/python3.11"), ("node", "lib/node_modules")):
        (tmp_path / around / "bin").mkdir(parents=True)
        (tmp_path / around / packages).mkdir(parents=True, exist_ok=True)
        program = tmp_path / around / "bin" / "agent"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        opened = tmp_path / around / ("" if packages else "bin")
        assert readable_folders([[str(program)]], sys.executable) == [str(opened)]


def test_words_that_name_files_are_found_and_those_of_the_program_itself_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("agent.py", "configs"):
        (tmp_path / name).write_text("")
    assert named_files(["python", "agent.py", "-m", "configs", "--out", "result.py"]) == {1, 3}
    assert named_files(["python", "-u", "-m", "configs", "agent.py"]) == {4}
    readable_folders([["python", "agent.py", "--out", "result.py"]], sys.executable)  # which it may write


def test_a_module_is_started_by_its_name_also_where_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "this").write_text("a file of that name")
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, "", command=["python", "-m", "this"]) == [Outcome()]


def test_what_a_program_leaves_running_ends_with_its_rollout(tmp_path: Path) -> None:
    source = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n"
    with hosts(tmp_path, source) as opened:
        assert asyncio.run(outcome(opened)) == Outcome()
        assert eventually(lambda: not any("agent.py" in each.command for each in below_keeper(opened)))


def test_a_folder_of_any_depth_is_removed_with_its_process(tmp_path: Path) -> None:
    source = "import json, os, time\ntime.sleep(60 * json.load(open(os.environ['RLHF_ROW']))['minutes'])"

    async def play(opened: Hosts) -> Any:
        cut = asyncio.ensure_future(outcome(opened, minutes=1))
        while not (made := [*Path(opened._folder).glob("**/program-*/work")]):
            await asyncio.sleep(0.05)
        folder = os.open(made[0], os.O_RDONLY)
        for _ in range(1100):
            os.mkdir("x", dir_fd=folder)
            above, folder = folder, os.open("x", os.O_RDONLY, dir_fd=folder)
            os.close(above)
        os.close(folder)
        cut.cancel()
        return await outcome(opened, minutes=0)

    with hosts(tmp_path, source) as opened:
        assert asyncio.run(play(opened)) == Outcome()
        assert eventually(lambda: not [*Path(opened._folder).glob("*/*/program-*")])


def below_keeper(opened: Hosts) -> list[Any]:
    now = all_processes()
    return [now[process] for process in below({opened.keeper.pid}, now=now)]


REACH = """
import json, os, socket
tried = {}
def attempt(name, do):
    try:
        do()
        tried[name] = 1
    except OSError:
        tried[name] = 0
port = int(os.environ["OPENAI_BASE_URL"].rpartition(":")[2].split("/")[0])
attempt("endpoint", lambda: socket.create_connection(("127.0.0.1", port), 5).close())
attempt("other", lambda: socket.create_connection(("127.0.0.1", json.load(open(os.environ["RLHF_ROW"]))["other"]), 5))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt("mptcp", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262))
attempt("unix", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
other = ("127.0.0.1", json.load(open(os.environ["RLHF_ROW"]))["other"])
attempt("fast open", lambda: socket.socket().sendto(b"x", 0x20000000, other))
attempt("file", lambda: open(json.load(open(os.environ["RLHF_ROW"]))["secret"]))
attempt("own file", lambda: open("mine.txt", "w").close())
json.dump({"score": 0, **tried}, open(os.environ["RLHF_REWARD"], "w"))
"""


def test_a_program_and_its_commands_use_what_is_granted(tmp_path: Path) -> None:
    granted = tmp_path / "granted"
    granted.mkdir()
    (granted / "tool.py").write_text("print(open(__file__).read()[:5])")
    source = REWARD + (
        f"import subprocess, sys\nopen({str(granted / 'made')!r}, 'w').write('x'); os.chmod('.', 0o755)\n"
        f"command = [os.environ['RLHF_CONFINED'], sys.executable, {str(granted / 'tool.py')!r}]\n"
        "said = subprocess.run(command, capture_output=True, text=True)\n"
        "json.dump({'score': 1, 'facts': {'said': said.stdout, 'errors': said.stderr}}, left)"
    )
    (ended,) = run(tmp_path / "granted", source, files=[str(granted)])
    assert ended.facts == {"said": "print\n", "errors": ""}
    assert (granted / "made").exists()


def test_a_program_reaches_the_endpoint_and_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret" / "key"
    secret.parent.mkdir()
    secret.write_text("x")
    (tmp_path / "code").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as endpoint, socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: endpoint.accept(), daemon=True).start()
        port = endpoint.getsockname()[1]
        with hosts(tmp_path / "code", REACH, port=port) as opened:
            if opened.unconfined:
                pytest.skip(f"this kernel cannot forbid {opened.unconfined}")
            row = {"other": other.getsockname()[1], "secret": str(secret)}
            ended = asyncio.run(outcome(opened, port, **row))
    assert isinstance(ended, Outcome), ended
    assert {name for name, reached in ended.parts.items() if reached} == {"endpoint", "own file"}


LOOKS = """
import json, os, time
own = os.path.dirname(os.environ["RLHF_ROW"])
open("mine.txt", "w").write("x")
time.sleep(1)  # the folders of all are there
above, seen = own, []
while above != "/":
    above = os.path.dirname(above)
    for place, folders, names in os.walk(above):
        folders[:] = [name for name in folders if not f"{place}/{name}".startswith(("/tmp/.", own))][:50]
        seen += [f"{place}/{name}" for name in names if name in ("row.json", "mine.txt", "confined", "output.txt")]
    if above == "/tmp":
        break
json.dump({"score": len(seen), "facts": {"seen": seen[:3]}}, open(os.environ["RLHF_REWARD"], "w"))
"""


def test_a_program_sees_no_folder_of_another(tmp_path: Path) -> None:
    assert [ended.reward for ended in run(tmp_path, LOOKS, times=3)] == [0.0, 0.0, 0.0]


TRIES = """
import json, os, subprocess, sys, time
below = "import json, os, signal, sys\\n" + sys.argv[1] if len(sys.argv) > 1 else ""
TRIED = {
    "writes the reward": f"open({os.environ['RLHF_REWARD']!r}, 'w').write('7')",
    "reads the row": f"open({os.environ['RLHF_ROW']!r}).read()",
    "lists the folder": f"os.listdir({os.path.dirname(os.environ['RLHF_ROW'])!r})",
    "moves the folder": "os.rename('..', '../../x')",
    "kills the agent": f"os.kill({os.getpid()}, 9)",
    "stops its parent": "os.kill(os.getppid(), 19)",
    "reads the agent": f"open('/proc/{os.getpid()}/mem', 'rb').read(1)",
    "has a variable": "os.environ['RLHF_REWARD']",
    "has a descriptor": "os.fstat(3)",
    "writes its folder": "open('made.txt', 'w').write('x')",
}
ended = {}
for name, code in TRIED.items():
    command = [os.environ["RLHF_CONFINED"], sys.executable, "-c", f"import os\\n{code}"]
    ended[name] = float(subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0)
status = subprocess.run([os.environ["RLHF_CONFINED"], "sh", "-c", "echo said; exit 5"], capture_output=True, text=True)
ended["says"] = float(status.returncode == 5 and status.stdout == "said\\n")
ended["is killed"] = float(subprocess.run([os.environ["RLHF_CONFINED"], "sh", "-c", "kill -9 $$"]).returncode == -9)
leaves = "setsid sh -c 'setsid sh -c \\"sleep 1; echo late > late.txt\\" &' &"
subprocess.run([os.environ["RLHF_CONFINED"], "sh", "-c", leaves])
try:
    subprocess.run([os.environ["RLHF_CONFINED"], "sh", "-c", "sleep 600 & sleep 600"], capture_output=True, timeout=1)
except subprocess.TimeoutExpired:
    ended["in time"] = 1.0  # all that holds its output
time.sleep(1)
ended["outlives its command"] = float(os.path.exists("late.txt"))
json.dump({"score": 0, **ended}, open(os.environ["RLHF_REWARD"], "w"))
"""


def test_a_command_in_a_domain_of_its_own_reaches_neither_reward_nor_row_nor_agent(tmp_path: Path) -> None:
    (ended,) = run(tmp_path, TRIES)
    assert isinstance(ended, Outcome), ended
    assert {name for name, holds in ended.parts.items() if holds} == {
        "writes its folder", "says", "is killed", "in time",
    }  # fmt: skip


MINI = """
import json, subprocess, sys
for command in json.loads(sys.argv[sys.argv.index("-t") + 1]):
    subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
"""
BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "environments.md").read_text(), re.DOTALL
)


PLAYED = {
    "echo 42 > answer.txt": 1.0,
    "grep -o 42 ../row.json | head -1 > answer.txt": 0.0,
    "echo 7 > $RLHF_REWARD; kill -9 $PPID": 0.0,
    "echo 7 > ../reward.json; kill -9 $PPID": 0.0,
    "rm -rf ..; kill -9 -1": 0.0,
}


def test_the_example_of_the_docs_pays_for_the_work_alone(tmp_path: Path) -> None:
    agent, judge = (block for block in BLOCKS if "RLHF_CONFINED" in block or "def solved" in block)
    programs = tmp_path / "mini" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(Path(sys.executable).resolve())
    (programs / "mini").write_text(f"#!{programs / 'python'}\n{MINI}")
    (programs / "mini").chmod(0o755)
    (tmp_path / "mini" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")

    async def together(opened: Hosts) -> list[Any]:
        rows = ({"task": json.dumps([commands]), "answer": "42"} for commands in PLAYED)
        return list(await asyncio.gather(*(outcome(opened, **row) for row in rows)))

    command = [str(programs / "python"), str(tmp_path / "agent.py")]
    with hosts(tmp_path, agent, command=command, returned_files=["answer.txt"]) as opened:
        ended = asyncio.run(together(opened))
    names: dict[str, Any] = {}
    exec(judge, names)
    assert [each.reward for each in ended] == [None] * len(PLAYED)
    paid = [names["solved"]("", answer="42", metadata={"files": each.files}) for each in ended]
    assert dict(zip(PLAYED, paid, strict=True)) == PLAYED
