"""The pool: which processes are killed, which jobs survive, and that no process is left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import WAIT_S, eventually, wait_full, worker_pids

from rlhf.config.reward import RewardConfig, RewardPart
from rlhf.processes.outside import Stopwatch, children_of, may_signal
from rlhf.processes.workers import TIMEOUT
from rlhf.rewards.grade import Grade
from rlhf.rewards.pool import Pool, default_workers, shared_out

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures"
FUNCTION = "hostile_rewards:by_response"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    sys.path.insert(0, str(FIXTURES))
    with Pool(
        workers=2,
        cpu_seconds=0.4,
        wall_seconds=1.5,
        memory_mb=200,
        user_functions=[RewardPart(name=FUNCTION)],
    ) as running:
        yield running
    sys.path.remove(str(FIXTURES))


def job(response: str, name: str = FUNCTION, **more: object) -> dict[str, object]:
    return {"name": name, "options": {}, "response": response, "answer": "5", "columns": {}, "metadata": {}, **more}


def math_job(response: str, gold: str = "5") -> dict[str, object]:
    return job(response, "math", answer=gold, options={"mode": "lenient"})


def descendants() -> set[int]:
    """Every process below this one, zombies not counted."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry)] = int(parent)
    below, frontier = set(), {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        below |= frontier
    return below


def with_wardens(workers: list[int]) -> set[int]:
    """Workers and the processes that guard them, their parents."""
    wardens = set()
    for worker in workers:
        with contextlib.suppress(OSError):  # it has ended
            wardens.add(int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]))
    return {*workers, *wardens}


def test_jobs_for_a_worker_that_has_just_ended_are_computed_by_another(pool: Pool) -> None:
    assert wait_full(pool) == pool.size
    submitted = threading.Event()

    def end_first_worker() -> None:
        """In the thread of the workers, which hears of the end only after it has given out the jobs."""
        first = worker_pids(pool)[0]
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: not may_signal(first))
        submitted.wait()

    pool.call_soon(end_first_worker)
    futures = pool.submit_many([math_job(r"\boxed{5}")] * 8)
    submitted.set()
    assert {future.result(timeout=WAIT_S).value for future in futures} == {1.0}


@pytest.mark.parametrize(
    ("response", "status", "detail"),
    [
        ("raise", "failed", "KeyError"),
        ("exit", "failed", "SystemExit"),
        ("none", "unscorable", ""),
        ("nan", "failed", "nan"),
        ("text", "failed", "returned str"),
        ("two", "failed", "returned 2 values"),
        ("one", "ok", ""),
        ("print", "ok", ""),
    ],
)
def test_a_failing_user_function_gives_a_status_to_its_own_response(
    pool: Pool, response: str, status: str, detail: str, capfd: pytest.CaptureFixture[str]
) -> None:
    grade = pool.submit(job(response)).result(timeout=WAIT_S)
    assert grade.status == status
    assert detail in grade.detail


@pytest.mark.parametrize(
    ("response", "status"),
    [("spin", "timeout"), ("ignore", "timeout"), ("sleep", "timeout"), ("allocate", "died"), ("crash", "died")],
)
def test_a_worker_that_exceeds_a_limit_is_replaced_by_the_same_keeper_and_another_answers(
    pool: Pool, response: str, status: str
) -> None:
    assert wait_full(pool) == pool.size
    before, keeper = set(worker_pids(pool)), pool.keeper
    assert pool.submit(job(response)).result(timeout=WAIT_S).status == status
    assert pool.submit(math_job(r"\boxed{5}")).result(timeout=WAIT_S).value == 1.0
    assert wait_full(pool) == pool.size
    assert pool.keeper is keeper
    assert eventually(lambda: len(before & descendants()) == pool.size - 1)


@pytest.mark.parametrize(("response", "limit"), [("spin", "CPU seconds"), ("sleep", "seconds by the clock")])
def test_a_timeout_names_the_limit_that_was_exceeded(pool: Pool, response: str, limit: str) -> None:
    assert pool.submit(job(response)).result(timeout=WAIT_S).detail.endswith(limit)


def test_detached_children_of_a_killed_worker_are_killed(pool: Pool) -> None:
    assert wait_full(pool) == pool.size
    before = descendants()  # a worker that an earlier test has killed may still be among them
    assert pool.submit(job("fork")).result(timeout=WAIT_S).status == "timeout"
    assert wait_full(pool) == pool.size
    assert eventually(lambda: descendants() - with_wardens(worker_pids(pool)) <= before)


def test_of_many_quick_responses_only_the_one_that_hangs_fails(pool: Pool) -> None:
    many = json.dumps([str(gold) for gold in range(100)])  # each costs a fraction of a second
    hard = math_job(r"\boxed{\sum_{a=1}^{2000}\sum_{b=1}^{2000}\frac{1}{a+b}}", many)
    futures = [pool.submit(hard if k == 30 else math_job(r"\boxed{5}")) for k in range(100)]
    statuses = [future.result(timeout=WAIT_S).status for future in futures]
    assert [k for k, status in enumerate(statuses) if status != "ok"] == [30]


@pytest.mark.parametrize(
    "message",
    [
        {"replies": [{"number": 0, "value": 1.0}] * 3, "cpu": 0.0},
        {"replies": [{"number": 0, "value": 10**400}], "cpu": 0.0},
        {"replies": [{"number": 0, "value": 1.0, "metrics": [1]}], "cpu": 0.0},
        {"ready": True, "cpu": 0.0, "waits": ["math"]},
        ["not", "a", "mapping"],
    ],
)
def test_what_a_hijacked_worker_sends_ends_that_worker_alone(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(workers=1) as pool:
        (worker,) = pool._workers.values()
        receive = worker.channel.receive
        monkeypatch.setattr(worker.channel, "receive", lambda: ([message], receive()[1]))
        pool.submit(math_job(r"\boxed{5}")).result(timeout=WAIT_S)
        assert pool.submit(math_job(r"\boxed{5}")).result(timeout=WAIT_S).value == 1.0


def test_a_hijacked_worker_cannot_prolong_the_time_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "beats.py").write_text(
        "import os, stat, time\n"
        "def score(response, **_):\n"
        "    sockets = [fd for fd in range(3, 64) if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "    sockets = [fd for fd in sockets if stat.S_ISSOCK(os.fstat(fd).st_mode)]\n"
        "    while True:\n"
        "        for fd in sockets:\n"
        "            os.write(fd, b'{\"replies\": []}\\n')\n"
        "        time.sleep(0.1)\n"
    )
    name = f"{tmp_path}/beats.py:score"
    with Pool(workers=1, wall_seconds=0.5, user_functions=[RewardPart(name=name)]) as pool:
        assert pool.submit(job("x", name)).result(timeout=WAIT_S).status == "timeout"


@pytest.mark.stack
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_keeper_is_started_again(number: signal.Signals) -> None:
    with Pool(workers=2) as pool:
        keeper = pool.keeper.pid
        os.kill(keeper, number)
        assert eventually(lambda: not Path(f"/proc/{keeper}").exists())
        assert pool.submit(math_job(r"\boxed{5}")).result(timeout=WAIT_S).value == 1.0
        assert wait_full(pool) == pool.size


def test_a_worker_starts_without_the_folder_of_temporary_files_and_says_why_if_it_cannot(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Pool(workers=1) as pool:
        shutil.rmtree(pool._folder)
        (first,) = worker_pids(pool)
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: worker_pids(pool) not in ([first], []))
        assert pool.submit(math_job(r"\boxed{5}")).result(timeout=WAIT_S).value == 1.0
        shutil.rmtree(pool._folder)
        Path(pool._folder).touch()
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        assert eventually(lambda: "die while they start" in pool._broken)
    os.remove(pool._folder)
    assert "FileExistsError" in capfd.readouterr().err


class Impatient(Pool):
    keeper_silent_s = 1.0
    ping_s = 0.1


def test_an_unresponsive_keeper_is_replaced() -> None:
    with Impatient(workers=1) as pool:
        keeper = pool.keeper.pid
        os.kill(keeper, signal.SIGSTOP)
        assert eventually(lambda: not Path(f"/proc/{keeper}").exists())
        assert pool.submit(math_job(r"\boxed{5}")).result(timeout=WAIT_S).value == 1.0


def test_a_warden_that_was_stopped_ends_its_worker_and_itself() -> None:
    with Pool(workers=1) as pool:
        workers = worker_pids(pool)
        both = with_wardens(workers)
        for warden in both - set(workers):
            os.kill(warden, signal.SIGSTOP)
    assert len(both) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in both)


def test_hostile_functions_leave_no_process(pool: Pool) -> None:
    before = descendants() - with_wardens(worker_pids(pool))
    kinds = ["child", "detach", "bomb", "fork", "spin", "crash", "child", "detach"]
    grades = [pool.submit(job(kind)) for kind in kinds * 8]
    statuses = {kind: grade.result(timeout=WAIT_S).status for kind, grade in zip(kinds * 8, grades, strict=True)}
    assert statuses["child"] == statuses["detach"] == "ok"
    assert statuses["bomb"] in ("died", "timeout")
    assert wait_full(pool) == pool.size
    assert eventually(lambda: descendants() - with_wardens(worker_pids(pool)) <= before)


@pytest.mark.parametrize("kind", ["child", "detach", "orphan"])
def test_what_a_call_started_dies_with_it_and_not_with_the_worker(pool: Pool, kind: str) -> None:
    assert wait_full(pool) == pool.size
    kept = with_wardens(worker_pids(pool))
    for _ in range(2 * pool.size):
        assert pool.submit(job(kind)).result(timeout=WAIT_S).status == "ok"
    assert with_wardens(worker_pids(pool)) == kept
    assert eventually(lambda: not {child for process in kept for child in children_of(process)} - kept)


def test_closing_leaves_no_process_and_answers_every_job() -> None:
    before = descendants()
    pool = Pool(workers=1, user_functions=[])
    waiting = [pool.submit(math_job(r"\boxed{\sum_{n=1}^\infty \frac{1}{n^2}}", "2")) for _ in range(5)]
    pool.close()
    assert descendants() == before
    assert all(future.done() for future in waiting)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(math_job("5"))


@pytest.mark.stack
def test_every_process_ends_with_a_driver_that_is_killed_by_sigkill(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(FIXTURES)!r})\n"
        "from rlhf.config.reward import RewardPart\n"
        "from rlhf.rewards.pool import Pool\n"
        f"pool = Pool(workers=2, cpu_seconds=60, wall_seconds=60, user_functions=[RewardPart(name={FUNCTION!r})])\n"
        f"pool.submit({job('fork')!r})\n"
        "time.sleep(1000)\n"
    )
    before = descendants()
    driver = subprocess.Popen([sys.executable, str(script)])
    grown = eventually(lambda: len(descendants() - before) >= 8)  # driver, keeper, and two wardens, workers and forks
    group = descendants() - before
    assert grown, group
    driver.kill()
    driver.wait()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in group))


def test_jobs_held_with_one_that_hangs_are_tried_again_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one at once, 200 calls of half a minute would take an hour; all at once again would never end."""
    pool = Pool.__new__(Pool)  # no processes: the test is the thread of the workers
    pool._computing, pool._waits, pool._concurrency = 1, frozenset(["judge"]), {"judge": 200}
    pool._queues, pool._workers, pool._numbers_of_jobs = {}, {}, itertools.count()
    monkeypatch.setattr(pool, "call_soon", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(pool, "send", lambda worker, message: None)
    monkeypatch.setattr(Stopwatch, "start", lambda watch, pid: None)
    futures = pool.submit_many([{"name": "judge"}] * 200)
    held: list[int] = []
    while not futures[7].done():
        worker = SimpleNamespace(work={}, kind=None, watch=Stopwatch(cpu_seconds=2.0, wall_seconds=10.0), pid=1)
        monkeypatch.setattr(pool, "free", lambda worker=worker: [worker])
        pool.on_turn()
        if 7 in worker.work:
            held.append(len(worker.work))
            pool.on_gone(worker, TIMEOUT, "over the limit")
        else:
            pool.on_message(worker, {"replies": [{**Grade(1.0, "ok").as_message(), "number": n} for n in worker.work]})
    assert held == [200, 25, 3, 1]
    assert futures[7].result().status == "timeout"
    assert [future.result().status for future in futures[:7]] == ["ok"] * 7


@pytest.mark.parametrize(("configured", "workers", "share"), [(8, 2, 4), (8, 3, 2), (1, 4, 1), (None, 1, None)])
def test_the_grading_processes_of_a_node_are_divided_among_its_rollout_workers(
    configured: int | None, workers: int, share: int | None
) -> None:
    config = RewardConfig(workers=configured)
    assert shared_out(config, workers).workers == (share or default_workers())
