"""Grade a program: run the row's tests against the code of the response, in an untrusted process.

    worker (the grader)                           solution (`rlhf.processes.solution`)
      tests of the row ── f(2) ─────────────────>  confined: no files, network, processes or environment
      compares 4 == value  <──── JSON of a value ──  runs the code of the response

The expected results never leave the worker. The solution can lie, end, patch its interpreter or print anything: it is
only asked for values, and a test passes if the value is right. A program is tested by its output, each test in a new
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from rlhf.config.reward import WALL_PER_CPU, CodeOptions
from rlhf.processes.channel import Channel
from rlhf.processes.forkers import BOOT, PACKAGE
from rlhf.processes.outside import Stopwatch, threads_of
from rlhf.rewards.code_blocks import MAX_CHARACTERS, imports, program
from rlhf.rewards.code_tests import FORMS, CallTest, ProgramTest, Tests, read_tests
from rlhf.rewards.grade import BAD_GOLD, NO_ANSWER, UNSCORABLE, Grade

MAX_ANSWER_BYTES = 1 << 22  # of one result, or of the output of a program
READ_BYTES = 1 << 16
START_S = 5.0  # limit for the start of Python on a busy machine; less than `reward.wall_seconds`
POLL_S, PAUSE_S = 0.02, 0.001
MAX_THREADS = 512


class WrongError(Exception):
    """A test has no right result."""


class LateError(WrongError):
    """A test exceeded a time limit; later tests are not run."""


class NotStartedError(Exception):
    """The process did not start. The response is not to blame, since its code had not been sent."""


def code_reward(
    response: str | None,
    columns: dict[str, Any],
    options: CodeOptions,
    wall_seconds: float = 10.0,
    say_alive: Callable[[], None] = lambda: None,
) -> Grade:
    """1 if the code in the response passes all tests of the row, or the fraction of tests that it passes.

    Args:
        response: None only checks the tests: 1 if they can be read.
        wall_seconds: limit for all tests together, without process starts and without waiting for a core.
        say_alive: called before each test; each test also has its own limits.
    """
    try:
        if columns.get(options.tests) is None:
            raise ValueError(f"there is no column {options.tests!r}. Set `tests` to the column that has the tests.")
        tests = read_tests(columns[options.tests], str(columns.get(options.function) or ""), options.tolerance)
    except (ValueError, TypeError, AttributeError) as error:
        other = f"the tests have parts of another kind ({error}). {FORMS}."
        return Grade(None, BAD_GOLD, detail=str(error) if isinstance(error, ValueError) else other)
    if response is None:
        return Grade(1.0)
    code = find_code(response, tests, whole=options.whole_response)
    if code is None:
        return Grade(0.0, NO_ANSWER)
    try:
        passed, problem = _passed(code, tests, options, wall_seconds, say_alive)
    except NotStartedError as error:
        return Grade(None, UNSCORABLE, code, str(error))
    fraction = passed / (len(tests.calls) + len(tests.programs))
    return Grade(fraction if options.mode == "fraction" else float(fraction == 1), extracted=code, detail=problem)


def find_code(answer: str, tests: Tests, *, whole: bool) -> str | None:
    """The program in an answer, or the whole answer if it has no block of Python and `whole` is set; else None."""
    if (code := program(answer, tests)) is not None:
        return code
    return answer if whole and answer.strip() and len(answer) <= MAX_CHARACTERS else None


def _passed(
    code: str, tests: Tests, options: CodeOptions, wall_seconds: float, say_alive: Callable[[], None]
) -> tuple[int, str]:
    """The number of tests that pass, and the last failure (empty if all pass)."""
    passed, problem, setup = 0, "", imports(code, tests)
    watch = Stopwatch(cpu_seconds=options.cpu_seconds, wall_seconds=WALL_PER_CPU * options.cpu_seconds)
    solution: Solution | None = None
    with contextlib.ExitStack() as stack:
        every: tuple[CallTest | ProgramTest, ...] = (*tests.calls, *tests.programs)
        for number, test in enumerate(every, 1):
            say_alive()
            grading = time.process_time()
            try:
                if watch.total_s > wall_seconds:
                    raise LateError(f"the tests before took over {wall_seconds:g} seconds (reward.wall_seconds)")
                if isinstance(test, ProgramTest):
                    with Solution(watch, stdin=test.stdin) as started:
                        if not test.accepts(started.printed_by(setup, code)):
                            raise WrongError("it prints something else")
                else:
                    if solution is None or solution.ended:
                        stack.close()
                        solution = stack.enter_context(Solution(watch, again=solution is not None))
                        solution.define(f"{setup}\n{tests.setup}", code)
                    _check_call(solution, test)
                passed += 1
            except WrongError as error:
                problem = f"test {number}: {error}"
                if options.mode == "all" or isinstance(error, LateError):
                    break
            finally:
                watch.stop()
                watch.total_s += time.process_time() - grading
    return passed, problem


def _check_call(solution: Solution, test: CallTest) -> None:
    answer = solution.ask({"call": test.call}, test.max_bytes)
    try:
        if "value" not in answer:
            raise WrongError(str(answer.get("error")))
        right = test.accepts(answer["value"])
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:  # no value of our JSON
        raise WrongError(f"{type(error).__name__}: {error}") from None
    if not right:
        raise WrongError(f"{test.call[:80]} has another value")


class Solution(contextlib.AbstractContextManager["Solution"]):
    """A confined process with the code of a response; every test has its own limits.

    Args:
        watch: measures and limits the time of the response's tests.
        stdin: input of a program; None if functions are called instead.
        again: True if the code ended its last process, so that this start counts as its time.
    """

    def __init__(self, watch: Stopwatch, stdin: str | None = None, *, again: bool = False) -> None:
        self.ended = False  # True once the process no longer answers
        self._watch, self._rest, self._open = watch, bytearray(), contextlib.ExitStack()
        try:
            self._start(stdin, again=again)
        except (OSError, WrongError) as error:
            self.__exit__()
            raise (WrongError if again else NotStartedError)(f"no process for the solution: {error}") from None

    def _start(self, stdin: str | None, *, again: bool) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(self._open.enter_context(ours))
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with theirs, _file_of(stdin or "") as given:
            command = [sys.executable, "-I", "-X", "utf8", "-c", BOOT.format(module="solution"), PACKAGE]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=given,
                stdout=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,  # a signal to its group reaches itself alone
            )
        self._open.enter_context(self._process)  # waits for it at the end
        self._open.callback(self._process.kill)
        if again:
            self._watch.start(self._process.pid)
        if not select.select([ours], [], [], START_S)[0]:
            raise WrongError(f"Python did not start within {START_S:g} s")
        if (first := self._read_line(ours.fileno())) != {"ready": True}:
            raise WrongError(str(first.get("unconfined")))
        self._watch.stop()

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self._open.close()

    def define(self, setup: str, code: str) -> None:
        """Run `setup` (imports), then the code. Its time counts for the first test."""
        self._watch.start(self._process.pid)
        self._send({"code": setup, "program": False})
        self._send({"code": code, "program": False})

    def ask(self, message: dict[str, Any], max_bytes: int) -> dict[str, Any]:
        """The untrusted answer to a message. An answer over `max_bytes` is wrong without being read."""
        if not self._watch.running:
            self._watch.start(self._process.pid)
        self._send(message)
        answer = self._read_line(self._channel.socket.fileno(), max_bytes)
        self._watch.stop()
        if not isinstance(answer, dict):
            raise WrongError("the answer is no mapping")
        return answer

    def printed_by(self, setup: str, code: str) -> str:
        """The output of the code as a program, after the imports in `setup`; WrongError if its exit status is not 0."""
        assert self._process.stdout is not None
        self._watch.start(self._process.pid)
        self._send({"setup": setup, "code": code, "program": True})
        while self._read(self._process.stdout.fileno()):
            pass
        while self._process.poll() is None:
            self._check_time()
            time.sleep(PAUSE_S)
        if self._process.returncode:
            raise WrongError(f"the program ended with exit status {self._process.returncode}")
        return self._rest.decode(errors="replace")

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.queue(message)
        hung_up = select.poll()
        hung_up.register(self._channel.socket, 0)  # hang-ups and errors are always told
        while not self._channel.flush():  # the process may be computing
            if self._process.poll() is not None or hung_up.poll(0):
                self._fail("the process ended, or reads nothing")
            self._check_time()
            select.select([], [self._channel.socket], [], POLL_S)

    def _fail(self, problem: str, kind: type[WrongError] = WrongError) -> None:
        self.ended = True
        raise kind(problem)

    def _check_time(self) -> None:
        if self._watch.running and (limit := self._watch.exceeded()):
            self._fail(limit, LateError)
        if threads_of(self._process.pid) > MAX_THREADS:
            self._fail(f"over {MAX_THREADS} threads")

    def _read_line(self, fd: int, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
        while b"\n" not in self._rest:
            if not self._read(fd):
                self._fail("the process ended")
        line, _, self._rest = self._rest.partition(b"\n")
        if len(line) > max_bytes:
            raise WrongError(f"the value has {len(line)} bytes as JSON, and a right one at most {max_bytes}")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            self._fail("the answer is no JSON")

    def _read(self, fd: int) -> bool:
        """Read the available bytes; False at the end of the stream."""
        if self._rest:  # more is on its way, maybe byte by byte
            time.sleep(PAUSE_S)
        while not select.select([fd], [], [], POLL_S)[0]:
            self._check_time()
        self._check_time()
        try:
            data = os.read(fd, READ_BYTES)
        except OSError:  # reset
            data = b""
        self._rest += data
        if len(self._rest) > MAX_ANSWER_BYTES:
            self._fail(f"over {MAX_ANSWER_BYTES} bytes")
        return bool(data)


def _file_of(text: str) -> BinaryIO:
    """A file in memory that can be read from its start."""
    file = open(os.memfd_create("stdin"), "w+b")  # noqa: SIM115 - the caller closes it
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file
