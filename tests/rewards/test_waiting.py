"""Rewards that wait run next to each other; groups, mappings and files as rewards; retries."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import WAIT_S, wait_full, worker_pids
from worlds import rollout_of

from rlhf.config.reward import RewardConfig, RewardPart
from rlhf.processes.channel import Channel
from rlhf.rewards.grade import Grade
from rlhf.rewards.patience import patiently
from rlhf.rewards.pool import Pool
from rlhf.rewards.registry import load_user_function
from rlhf.rewards.scorer import Scorer
from rlhf.rewards.worker import Grader
from rlhf.types import Prompt

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures"
WAITS = "hostile_rewards:waits"
COMPUTES = "hostile_rewards:by_response"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    sys.path.insert(0, str(FIXTURES))
    functions = [RewardPart(name=WAITS, concurrency=200), RewardPart(name=COMPUTES)]
    with Pool(workers=2, cpu_seconds=0.5, wall_seconds=2.5, memory_mb=300, user_functions=functions) as running:
        yield running
    sys.path.remove(str(FIXTURES))


def job(response: str, name: str = WAITS, **options: Any) -> dict[str, Any]:
    return {"name": name, "options": options, "response": response, "answer": "5", "columns": {}, "metadata": {}}


def grades(pool: Pool, responses: list[str], **options: Any) -> list[Grade]:
    futures = [pool.submit(job(response, **options)) for response in responses]
    return [future.result(timeout=WAIT_S) for future in futures]


def patient_pool(monkeypatch: pytest.MonkeyPatch, *, concurrency: int, wall_seconds: float = WAIT_S) -> Pool:
    """One worker for calls that wait, and one for others."""
    monkeypatch.syspath_prepend(FIXTURES)
    functions = [RewardPart(name=WAITS, concurrency=concurrency), RewardPart(name=COMPUTES)]
    return Pool(workers=1, cpu_seconds=60.0, wall_seconds=wall_seconds, memory_mb=300, user_functions=functions)


def test_calls_that_wait_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with patient_pool(monkeypatch, concurrency=200) as pool:
        results = grades(pool, ["x"] * 400, seconds=0.0, together=200)  # each waits until 200 have begun
    assert {(grade.value, grade.status) for grade in results} == {(0.5, "ok")}


def test_a_call_has_its_own_deadline_and_the_calls_next_to_it_go_on(pool: Pool) -> None:
    results = grades(pool, ["x", "never", "raise", "stubborn", "exit", "x"], seconds=0.1)
    assert [grade.status for grade in results] == ["ok", "timeout", "failed", "timeout", "failed", "ok"]
    assert results[1].detail == "over 2.5 seconds by the clock"
    assert results[2].detail.endswith("KeyError: 'a key'")


def test_a_deadline_counts_from_the_start_of_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with patient_pool(monkeypatch, concurrency=10, wall_seconds=5.0) as pool:
        results = grades(pool, ["x"] * 120, seconds=0.5)  # the last ones start after the limit
    assert {grade.status for grade in results} == {"ok"}


@pytest.mark.parametrize(("response", "status"), [("block", "timeout"), ("spin", "timeout"), ("crash", "died")])
def test_a_call_that_stops_its_worker_fails_alone(pool: Pool, response: str, status: str) -> None:
    results = grades(pool, ["x", "x", response, "x"], seconds=0.05)
    assert [grade.status for grade in results] == ["ok", "ok", status, "ok"]


def test_calls_whose_messages_arrive_together_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = map(Channel, socket.socketpair())
    responses, second_runs = ["first", "second"], asyncio.Event()
    messages = [{"jobs": [{**job(response, "mine:function"), "number": response}]} for response in responses]
    monkeypatch.setattr(theirs, "receive", lambda wait: (messages, False))  # then the driver hangs up

    async def function(response: str, **_: Any) -> float:
        if response == "second":
            second_runs.set()
        await second_runs.wait()
        return 1.0

    Grader({"mine:function": function}, wall_seconds=10.0).serve(theirs)
    replies = [reply for message in ours.receive()[0] for reply in message["replies"]]
    assert {reply["number"]: reply["status"] for reply in replies} == dict.fromkeys(responses, "ok")
    ours.socket.close()
    theirs.socket.close()


def test_a_worker_that_answers_many_calls_while_it_is_sent_large_ones_is_not_killed(pool: Pool) -> None:
    wait_full(pool)
    before = worker_pids(pool)
    small, large = [job("x", seconds=0.0)] * 600, [job("x" * 50_000, seconds=0.0)] * 200
    futures = pool.submit_many([*small, *large])  # neither direction of the socket has room for all
    assert {future.result(timeout=WAIT_S).value for future in futures} == {0.5}
    assert worker_pids(pool) == before


def test_calls_that_wait_do_not_keep_others_from_being_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go on"
    with patient_pool(monkeypatch, concurrency=200) as patient:
        waiting = [patient.submit(job("x", seconds=0.0, until=str(go_on))) for _ in range(50)]
        assert patient.submit(job("fine", COMPUTES)).result(timeout=WAIT_S).value == 1.0
        go_on.touch()
        assert {future.result(timeout=WAIT_S).value for future in waiting} == {0.5}


# --- groups, mappings, files ---


def scores(parts: list[Any], texts: list[str], answer: str = "5") -> Any:
    prompt = Prompt("p", 0, np.zeros(3, np.int32), ({"role": "user", "content": "?"},), answer, "math", {})
    with Scorer(RewardConfig.model_validate({"parts": parts, "workers": 1})) as scorer:
        return asyncio.run(scorer.score_group(prompt, [rollout_of([1]) for _ in texts], texts))


def test_a_function_may_grade_a_group_at_once_and_return_further_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    part = {"name": "hostile_rewards:ranks", "group": True, "weight": 2.0}
    results = scores([part, "math"], [r"\boxed{5}", r"so \boxed{6}", "a"])
    assert [score.reward for score in results] == [1.0, 2.0, 0.0]
    assert results[1].reward_parts == {"hostile_rewards:ranks": 1.0, "math": 0.0, "hostile_rewards:ranks/length": 12.0}


def test_a_group_whose_function_fails_is_unscorable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    results = scores([{"name": "hostile_rewards:ranks", "group": True}], ["a", "b"], answer="short")
    assert [(score.reward, score.status) for score in results] == [(None, "failed")] * 2


def test_a_file_is_loaded_once_for_all_its_functions_and_never_taken_for_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ["a/mine.py", "b/mine.py", "a_mine.py", "json.py"]
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("def f(*_, **__):\n    return 1\n\n\ndef g(*_, **__):\n    return 2\n")
    monkeypatch.chdir(tmp_path)
    known = sys.modules["json"]

    def load(name: str) -> Any:
        return load_user_function(RewardPart(name=name).model_dump())

    for path in paths:
        assert (
            load(f"{path}:f").__globals__ is load(f"{path}:g").__globals__ is load(f"{tmp_path}/{path}:f").__globals__
        )
    assert len({id(load(f"{path}:f").__globals__) for path in paths}) == len(paths)
    assert sys.modules["json"] is known


def test_a_file_that_cannot_be_imported_fails_for_each_of_its_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(*_, **__):\n    return 1\n\n\nraise OSError('no model')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="OSError: no model"):
            load_user_function(RewardPart(name=f"{tmp_path}/mine.py:f").model_dump())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hostile_rewards:takes_no_answer", {}, "cannot be called: .*'answer'"),
        ("hostile_rewards:length", {"scael": 1}, "cannot be called: .*'scael'"),
        ("no/such/file.py:score", {}, "no/such/file.py .*FileNotFoundError"),
        ("no_such_module_anywhere:reward", {}, r"no_such_module_anywhere:reward.*cannot be imported"),
        ("posixpath:reward", {}, "posixpath has no function reward"),
    ],
)
def test_a_function_that_cannot_be_called_is_one_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    (part,) = RewardConfig.model_validate([{"name": name, **options}]).parts
    with pytest.raises(ValueError, match=message):
        load_user_function(part.model_dump())


# --- clients ---


def test_a_call_is_tried_again_until_it_succeeds_or_the_retries_are_used() -> None:
    tries = []

    async def call() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("busy")
        return 7

    assert asyncio.run(patiently(call, retries=2, first_wait_s=0.0)) == 7
    tries.clear()
    with pytest.raises(OSError, match="busy"):
        asyncio.run(patiently(call, retries=1, first_wait_s=0.0))
