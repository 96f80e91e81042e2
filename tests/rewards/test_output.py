"""What a reward prints reaches `say`: whole lines with the name of the part, not too many of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S, eventually

from rlhf.config.printing import to_stderr
from rlhf.config.reward import RewardPart
from rlhf.processes.output import MAX_LINE, MAX_LINES, OutputPipe, PrintedLines
from rlhf.rewards.grade import Grade
from rlhf.rewards.pool import Pool

CODE = """
import asyncio, os, subprocess, sys, threading
print("imported")

def computes(response, *, answer, **_):
    exec(response)
    return 1.0

def stops(response, *, answer, **_):
    breakpoint()

def stops_with_pdb(response, *, answer, **_):
    import pdb; pdb.set_trace()
    return 1.0

async def waits(response, *, answer, **_):
    for word in response.split():
        print(word, end=" ")
        await asyncio.sleep(0.01)
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prints") / "prints.py"
    path.write_text(CODE)
    return path


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def pool(file: Path, said: list[str]) -> Iterator[Pool]:
    parts = [RewardPart(name=f"{file}:computes"), RewardPart(name=f"{file}:waits")]
    parts += [RewardPart(name=f"{file}:{name}") for name in ("stops", "stops_with_pdb")]
    heard: list[str] = []  # all of it; the tests forget what was said before them

    def say(line: str) -> None:
        heard.append(line)
        said.append(line)

    with Pool(workers=2, wall_seconds=2.0, user_functions=parts, say=say) as running:
        running._printed._began = float("inf")  # every test may print MAX_LINES
        yield running
    assert heard.count(f"reward {file}:computes: imported") == 1


@pytest.fixture
def grade(pool: Pool, file: Path, said: list[str]) -> Callable[..., Grade]:
    assert eventually(lambda: f"reward {file}:computes: imported" in said)
    del said[1:]
    pool._printed._shown = 0

    def grade(response: str, function: str = "computes") -> Grade:
        job = {"options": {}, "response": response, "answer": "", "columns": {}, "metadata": {}}
        return pool.submit({"name": f"{file}:{function}", **job}).result(timeout=WAIT_S)

    return grade


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("print('one', 2); print('three')", ["one 2", "three"]),
        ("print('a\\nb')", ["a", "b"]),
        ("print('no end', end='')", ["no end"]),
        ("print('to stderr', file=sys.stderr)", ["to stderr"]),
        ("print('\\x1b[2J\\u00e9')", ["\x1b[2Jé"]),
        ("sys.stdout.buffer.write(b'bytes\\n')", ["bytes"]),
        ("print('last words'); os._exit(1)", ["last words"]),
        ("print('x' * 5000)", ["x" * MAX_LINE]),
    ],
)
def test_lines_are_whole_and_named(
    grade: Callable[..., Grade], file: Path, said: list[str], code: str, lines: list[str]
) -> None:
    grade(code)
    assert eventually(lambda: said[1:] == [f"reward {file}:computes: {line}" for line in lines]), said


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run(['echo', 'from below'])",
        "os.write(1, b'from below\\n')",
        "thread = threading.Thread(target=print, args=('from below',)); thread.start(); thread.join()",
    ],
)
def test_lines_of_programs_and_threads_are_heard_too(grade: Callable[..., Grade], said: list[str], code: str) -> None:
    assert grade(code).value == 1.0
    assert eventually(lambda: said[1:] == ["reward: from below"]), said


@pytest.mark.slow
def test_each_part_has_its_own_lines(grade: Callable[..., Grade], file: Path, said: list[str]) -> None:
    grade("these are words", "waits")
    grade("print('computed')")
    wanted = [f"reward {file}:waits: these are words ", f"reward {file}:computes: computed"]
    assert eventually(lambda: sorted(said[1:]) == sorted(wanted)), said


@pytest.mark.slow
@pytest.mark.parametrize("function", ["stops", "stops_with_pdb"])
def test_a_breakpoint_says_why_it_cannot_work_and_what_to_do(
    grade: Callable[..., Grade], file: Path, function: str
) -> None:
    detail = grade("", function).detail
    assert detail.startswith(f"{file}:")
    assert ": BdbQuit. A grading process has no terminal" in detail
    assert "rlhf score FILE" in detail


@pytest.mark.slow
def test_nothing_goes_to_the_terminal_directly(grade: Callable[..., Grade], capfd: pytest.CaptureFixture[str]) -> None:
    grade("print('a line'); subprocess.run(['echo', 'a line'])")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def printed(names: list[str], said: list[str]) -> tuple[PrintedLines, OutputPipe, Callable[[bytes], Any]]:
    printed = PrintedLines("reward", names, said.append)
    output = OutputPipe(printed)
    return printed, output, lambda data: (os.write(output.pipe, data), output.read())


def test_a_line_that_arrives_in_pieces_is_one_line() -> None:
    said: list[str] = []
    _, output, write = printed(["mine.py:f"], said)
    write(b"mine.py:f\x1fa li")
    write(b"ne\nmine.py:f\x1fan")
    write(b"other\nraw")
    os.close(output.pipe)
    output.close()
    assert said == [f"reward mine.py:f: {line}" for line in ("a line", "another", "raw")]


def test_lines_beyond_the_limit_are_counted_until_the_window_ends() -> None:
    said: list[str] = []
    lines, output, write = printed(["mine.py:f"], said)
    write(b"x\n" * (MAX_LINES + 7))
    assert said == ["reward mine.py:f: x"] * MAX_LINES
    lines._began -= 60.0
    write(b"y\n")
    assert said[MAX_LINES:] == ["reward mine.py:f: 7 more printed lines are not shown", "reward mine.py:f: y"]
    os.close(output.pipe)
    output.close()


def test_what_is_printed_cannot_command_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    PrintedLines("reward", ["mine.py:f"], to_stderr).lines(b"mine.py:f\x1f\x1b[2J\n")
    assert capfd.readouterr().err == "reward mine.py:f: \\u001b[2J\n"


def test_a_terminal_that_is_gone_does_not_end_the_grading() -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    PrintedLines("reward", ["mine.py:f"], broken).lines(b"a\nb\n")
