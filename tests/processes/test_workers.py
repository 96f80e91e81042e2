"""Workers forked from a template, with any interpreter: what they share, what they cannot do, and what a kill costs."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import venv
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S, eventually, wait_full, worker_pids

from rlhf.processes.forkers import PACKAGE
from rlhf.processes.workers import MAX_FAILED_STARTS, Worker, Workers

pytestmark = pytest.mark.slow  # they start processes

FIXTURES = Path(__file__).parents[1] / "fixtures"


class Told(Workers):
    """Tells workers what to do, and keeps what they say and how they end."""

    reload_s, ping_s, keeper_silent_s = 1.0, 0.1, WAIT_S

    def __init__(self, folder: Path, **options: Any) -> None:
        self.said: list[tuple[int, Any]] = []
        self.ended: list[tuple[int, str, str]] = []
        self.abouts: list[Any] = []
        self.printed: list[str] = []
        settings = {"size": 3, "cpu_seconds": 60.0, "wall_seconds": 60.0, "memory_mb": 500, "template": True}
        settings |= {"path": [str(FIXTURES)], "say": self.printed.append} | options
        hello = {"refuses": str(folder / "refuses")}
        super().__init__("environment", "template_work", hello, code=["template_work:load"], **settings)

    def on_ready(self, worker: Worker, about: Any) -> None:
        self.abouts.append(about)

    def on_message(self, worker: Worker, message: Any) -> None:
        worker.watch.stop()
        assert message["process"] == worker.pid
        self.said.append((worker.pid, message["said"]))

    def on_gone(self, worker: Worker, why: str, detail: str) -> None:
        self.ended.append((worker.pid, why, detail))

    def tell(self, worker: Worker, what: str, target: Any = None) -> None:
        self.call_soon(worker.watch.start, worker.pid)
        self.call_soon(self.send, worker, {"do": what, "with": target})

    def ask(self, worker: Worker, what: str, target: Any = None) -> Any:
        before = len(self.said)
        self.tell(worker, what, target)
        assert eventually(lambda: len(self.said) > before)
        return self.said[before][1]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    with Told(tmp_path_factory.mktemp("workers"), wall_seconds=1.0) as running:
        yield running


def test_a_bare_interpreter_keeps_workers_that_load_no_third_party_module(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with Told(tmp_path, python=python, size=1) as bare:
        assert wait_full(bare) == 1
        (worker,) = bare.free()
        files = [Path(file) for file in bare.ask(worker, "modules")]
        known = (PACKAGE, FIXTURES, sysconfig.get_path("stdlib"))
        assert not [file for file in files if not any(file.is_relative_to(folder) for folder in known)]
        assert not [file for file in files if "site-packages" in file.parts]
        interpreter, *path = bare.ask(worker, "interpreter")
    assert interpreter == python
    ours = {entry for entry in sys.path if entry.endswith("site-packages")}
    assert not ours & set(path)


def test_the_code_is_loaded_once_and_its_memory_is_shared(workers: Told) -> None:
    assert wait_full(workers) == 3
    (loaded_in,) = {about["loaded in"] for about in workers.abouts}
    assert loaded_in not in worker_pids(workers)
    for worker in workers.free():
        assert Path(f"/proc/{worker.pid}/oom_score_adj").read_text() == "1000\n"
        lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
        assert private < 16 << 10  # KiB; the module holds 64 MiB


def test_hundreds_of_workers_start_at_once(tmp_path: Path) -> None:
    with Told(tmp_path, size=0) as many:
        many.size = 200
        many.call_soon(lambda: None)
        assert wait_full(many) == 200  # a second or two where nothing else runs
        many.call_soon(lambda: [many.kill(worker, "died") for worker in many.free()] and setattr(many, "size", 0))
        assert eventually(lambda: len(many._workers) == 1)


def test_each_worker_has_its_own_folder_and_output(workers: Told) -> None:
    assert wait_full(workers) == 3
    first, second, _ = workers.free()
    files = [workers.ask(worker, "folder") for worker in (first, second)]
    assert len({Path(file).parent for file in files}) == 2
    assert workers.ask(first, "write", files[0]) == 1
    assert workers.ask(first, "write", files[1]) == "PermissionError"
    assert workers.ask(first, "signal", second.pid) == "PermissionError"
    assert workers.ask(first, "signal", os.getppid()) == "PermissionError"
    workers.ask(second, "print", "a line")
    assert eventually(lambda: "environment template_work:load: a line" in workers.printed)


@pytest.mark.parametrize(("how", "why"), [("limit", "timeout"), ("number", "died"), ("outside", "died")])
def test_a_killed_worker_harms_no_other(workers: Told, how: str, why: str) -> None:
    assert wait_full(workers) == 3
    lost, *others = workers.free()
    workers.ended.clear()
    if how == "limit":
        workers.tell(lost, "sleep")
    elif how == "number":
        workers.call_soon(workers.kill, lost, "died", "no longer needed")
    else:
        os.kill(lost.pid, signal.SIGKILL)
    assert eventually(lambda: workers.ended)
    ((pid, status, detail),) = workers.ended
    assert (pid, status) == (lost.pid, why)
    assert how != "limit" or detail == "over 1 seconds by the clock"
    assert wait_full(workers) == 3
    assert {worker.pid for worker in others} < set(worker_pids(workers))
    assert all(workers.ask(worker, "print", "still here") is None for worker in others)
    assert eventually(lambda: not Path(f"/proc/{lost.pid}").exists())


def test_a_killed_template_is_loaded_again_and_the_work_below_it_is_lost_by_name(workers: Told) -> None:
    assert wait_full(workers) == 3
    before, template = set(worker_pids(workers)), workers.abouts[-1]["loaded in"]
    workers.ended.clear()
    os.kill(template, signal.SIGKILL)
    assert eventually(lambda: len(workers.ended) >= 3)
    assert {(pid, why) for pid, why, _ in workers.ended} == {(pid, "lost") for pid in before}
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (template, *before)))
    assert wait_full(workers) == 3
    assert not before & set(worker_pids(workers))


def test_workers_that_are_lost_with_their_template_while_they_start_are_no_failed_starts(tmp_path: Path) -> None:
    with Told(tmp_path, size=1) as running:
        running.ended.clear()

        def lose_ten_that_start() -> None:
            (template,) = (worker for worker in running._workers.values() if worker.is_template)
            running.size = 11
            running._fork_missing()
            running.kill(template, "died")

        running.call_soon(lose_ten_that_start)
        assert eventually(lambda: running._broken or len(running.free()) == 11)
        assert not running._broken
        assert {why for _, why, _ in running.ended} == {"lost"}


def test_what_a_worker_said_before_it_ended_is_heard_if_its_end_is_read_first(tmp_path: Path) -> None:
    with Told(tmp_path, size=1, template=False) as running:
        (worker,) = running.free()

        def tell_and_read_its_end() -> None:
            running.send(worker, {"do": "exit"})
            while not running.ended:
                running._on_forker(running.keeper, None)

        running.call_soon(tell_and_read_its_end)
        assert eventually(lambda: running.ended)
        assert running.said == [(worker.pid, "goodbye")]


def test_a_call_is_made_or_refused_but_never_lost_at_the_end(tmp_path: Path) -> None:
    running, made = Told(tmp_path, size=0), list[int]()

    class Slow(deque[Any]):
        def append(self, call: Any) -> None:
            closing = threading.Thread(target=running.close)
            closing.start()
            closing.join(1.0)
            super().append(call)

    running._calls = Slow()
    running.call_soon(made.append, 1)
    running._thread.join()
    assert made == [1]


def test_code_that_cannot_be_loaded_fails_the_start_and_later_ends_the_workers(tmp_path: Path) -> None:
    ended = threading.Event()

    class Watched(Told):
        def on_end(self, reason: str) -> None:
            self.reason = reason
            ended.set()

    with Watched(tmp_path) as running:
        assert wait_full(running) == 3
        (tmp_path / "refuses").touch()
        os.kill(running.abouts[-1]["loaded in"], signal.SIGKILL)
        assert ended.wait(WAIT_S)
    assert "it cannot be loaded" in running.reason
    with pytest.raises(ValueError, match="it cannot be loaded"):
        Told(tmp_path)


class Unlucky(Told):
    """The first keepers are lost as soon as they have started."""

    lost_keepers, keepers = 2, 0

    def lose(self) -> None:
        os.kill(self.keeper.pid, signal.SIGKILL)

    def _start_keeper(self) -> None:
        super()._start_keeper()
        self.keepers += 1
        if self.keepers <= self.lost_keepers:
            self.lose()


def test_keepers_that_are_killed_while_the_processes_load_are_replaced_a_few_times(tmp_path: Path) -> None:
    lost: list[int] = []

    class Hopeless(Unlucky):
        lost_keepers = 100

        def lose(self) -> None:
            lost.append(self.keeper.pid)
            super().lose()

    with Unlucky(tmp_path, size=1) as running:
        assert wait_full(running) == 1
        assert running.keepers == 3
        assert [line.partition("process ")[2].partition(" ")[2] for line in running.printed] == [
            "was ended by signal 9. Another one starts, and the processes with it."
        ] * 2
    with pytest.raises(RuntimeError, match=r"^environment: the keeper of the processes.* was ended by signal 9\. "):
        Hopeless(tmp_path, size=1)
    assert len(lost) == MAX_FAILED_STARTS + 1


def test_a_keeper_that_fails_while_the_processes_load_says_why_and_fails_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Garbled(Unlucky):
        def lose(self) -> None:
            self.keeper.channel.socket.sendall(b"no JSON\n")

    with pytest.raises(RuntimeError, match=r"ended with exit status 1\. Its own messages"):
        Garbled(tmp_path, size=1)
    assert "RuntimeError: a message is not JSON" in capfd.readouterr().err


FULL = """
import os
real = os.fork

def fork():
    if os.path.exists({full!r}):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()

os.fork = fork
exec(open({work!r}).read())
"""


def test_where_no_process_can_be_forked_workers_are_tried_again_for_some_time(tmp_path: Path) -> None:
    class Patient(Told):
        reload_s = 240.0

    full, said = tmp_path / "full", list[str]()
    (tmp_path / "template_work.py").write_text(FULL.format(full=str(full), work=str(FIXTURES / "template_work.py")))

    def say(line: str) -> None:
        said.append(line)
        full.unlink()

    full.touch()
    with Patient(tmp_path, size=1, path=[str(tmp_path)], say=say) as running:
        assert wait_full(running) == 1
        (first,) = running.free()
        full.touch()
        running.size = 3
        assert wait_full(running) == 3
        assert first in running.free()
    assert len(said) == 2, "once for the template, once for two workers"
    assert all(
        "no process can be forked: [Errno 11] Resource temporarily unavailable. Look at" in line for line in said
    )
    full.touch()
    with pytest.raises(RuntimeError, match=r"no process can be forked.* New processes have tried for 1 s\.$"):
        Told(tmp_path, size=1, path=[str(tmp_path)])
