"""Sessions in processes: who shares one, what a failure costs, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import venv
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_environments import call
from processes import below, outliving
from waiting import WAIT_S, eventually

from rlhf.config.environment import EnvironmentConfig
from rlhf.environments.hosts import Hosts
from rlhf.environments.sessions import HostedSession, read_outcome
from rlhf.environments.turns import CallLimitError, FailedError

pytestmark = pytest.mark.slow  # they start processes

FILE = Path(__file__).parent / "games.py"
SEEDS = {"group": 7, "sample": 0}
LIMITS = {"cpu_seconds": 1.0, "wall_seconds": 2.0, "memory_mb": 256, "processes": 4}


@contextmanager
def hosts(
    name: str | None, *, tools: tuple[str, ...] = (), say: Callable[[str], None] = lambda line: None, **keys: Any
) -> Iterator[Hosts]:
    alone = keys.pop("alone", True)
    config = EnvironmentConfig(**{"name": name and f"{FILE}:{name}", **LIMITS, **keys})
    opened = Hosts(config, tools, say=say, alone=alone)
    try:
        yield opened
    finally:
        opened.close()


@asynccontextmanager
async def session(opened: Hosts, sample: int = 0, **row: Any) -> AsyncIterator[HostedSession]:
    one = await opened.open(row, {**SEEDS, "sample": sample})
    try:
        yield one
    finally:
        await one.close()


def test_a_group_starts_in_one_state_and_later_calls_have_their_own() -> None:
    async def play(opened: Hosts) -> tuple[str, list[str], Any]:
        async with session(opened, 0, answer="4") as one, session(opened, 1) as other:
            assert one.text == other.text
            secret = int(one.text.rpartition(" ")[2]) - 1
            answers = [(await each.call([call("guess", number=secret)])).messages[0] for each in (one, other)]
            outcome = await one.finish()
        return one.text, [answer["content"] for answer in answers], outcome

    with hosts("Guess") as opened:
        text, answers, outcome = asyncio.run(play(opened))
        assert answers[0].startswith("right")
        assert answers[0] != answers[1]
        assert outcome.reward == 1.0
        assert outcome.attributes["values"]["row"] == {"answer": "4"}
        assert (text, answers) == asyncio.run(play(opened))[:2]


@pytest.mark.parametrize(
    ("got", "error"),
    [
        ("row['swer'.join(['an', ''])]", "KeyError: 'answer'"),
        ("(lambda answer, **_: answer)(**row)", "TypeError: .* 'answer'"),
        ("types.SimpleNamespace(**row).answer", "AttributeError: .* 'answer'"),
    ],
)
def test_an_answer_that_was_left_out_is_named_where_it_is_missed(tmp_path: Path, got: str, error: str) -> None:
    reset = f"def reset(self, **row): self.facts = {{'got': {got}, 'all': len(row)}}"
    (tmp_path / "game.py").write_text(f"import types\nclass Game:\n    {reset}\n")

    async def play(opened: Hosts) -> Any:
        async with session(opened, Answer="5", answer="4", question="2 + 2") as one:
            return (await one.finish()).facts

    how: dict[str, Any] = {"name": f"{tmp_path / 'game.py'}:Game"}
    with Hosts(EnvironmentConfig(**how, **LIMITS), say=lambda line: None, answers=["answer"]) as opened:
        said = rf"{error}\. Rows leave out .* set environment\.gives_answer: true"
        with pytest.raises(FailedError, match=said):
            asyncio.run(play(opened))
    config = EnvironmentConfig(**how, **LIMITS, gives_answer=True)
    with Hosts(config, say=lambda line: None, answers=["answer"]) as opened:
        assert asyncio.run(play(opened)) == {"got": "4", "all": 3}


def test_a_full_server_makes_sessions_wait_until_one_of_ours_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.environments.hosts.FULL_PAUSE_S", 0.01)

    async def play(opened: Hosts) -> list[str]:
        async def one() -> str:
            async with session(opened) as own:
                return str((await own.call([call("play")])).messages[0]["content"])

        return list(await asyncio.gather(*(one() for _ in range(7))))

    said: list[str] = []
    with hosts("Crowded", say=said.append) as opened:
        assert asyncio.run(play(opened)) == ["played"] * 7
        assert asyncio.run(play(opened)) == ["played"] * 7
    (told,) = said
    assert "its server is full" in told
    assert "2/2 sessions active" in told


def test_a_server_that_others_have_filled_costs_the_rollout_after_wall_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.environments.hosts.FULL_PAUSE_S", 0.01)
    with hosts("AlwaysFull", wall_seconds=0.2) as opened, pytest.raises(FailedError, match="CAPACITY_REACHED"):
        asyncio.run(opened.open({}, SEEDS))


def test_a_server_that_another_worker_may_have_filled_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.environments.hosts.FULL_PAUSE_S", 0.01)
    with hosts("AlwaysFull", wall_seconds=0.2, alone=False) as opened, pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(opened.open({}, SEEDS), 1.0))


def test_calls_that_block_have_a_process_each_and_coroutines_share_one() -> None:
    async def pids(opened: Hosts) -> set[str]:
        async with session(opened) as one, session(opened) as other:
            said = await asyncio.gather(*(each.call([call("wait")]) for each in (one, other)))
            return {answers.messages[0]["content"] for answers in said}

    with hosts("Slow") as opened:
        assert len(asyncio.run(pids(opened))) == 1
        assert opened.size == 1


def test_sessions_wait_until_a_process_is_free() -> None:
    async def play(opened: Hosts) -> None:
        async def one(sample: int) -> None:
            async with session(opened, sample) as each:
                await each.call([call("guess", number=1)])

        await asyncio.gather(*(one(sample) for sample in range(12)))

    with hosts("Guess", processes=2) as opened:
        asyncio.run(play(opened))
        assert opened.size == 2


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("hang", "over 2 seconds by the clock"),
        ("spin", "over 1 CPU seconds"),
        ("memory", "over the memory"),
        ("fork", "over"),
    ],
)
def test_a_call_over_a_limit_is_the_models_doing(how: str, error: str) -> None:
    async def play(opened: Hosts) -> None:
        async with session(opened) as one:
            with pytest.raises(CallLimitError, match=error):
                await one.call([call("act", how=how)])

    with hosts("Hostile") as opened:
        asyncio.run(play(opened))


def test_64_hostile_rollouts_leave_no_process_and_the_others_finish() -> None:
    hows = ["raise", "hang", "fork", "big", "bytes", "marks", "exit", "memory", "die", "loop"]

    async def one(opened: Hosts, number: int) -> str:
        how = hows[number % len(hows)]
        try:
            async with session(opened, number) as each:
                answers = await each.call([call("act", how=how)])
                return f"{how} {answers.errors} {(await each.finish()).reward}"
        except (CallLimitError, FailedError) as error:
            return f"{how} {type(error).__name__}"

    async def play(opened: Hosts) -> list[str]:
        return await asyncio.gather(*(one(opened, number) for number in range(64)))

    with hosts("Hostile") as opened:
        outcomes = set(asyncio.run(play(opened)))
        started = below({opened.keeper.pid})
    assert outcomes == {
        "raise 1 1.0", "hang CallLimitError", "fork CallLimitError", "big 0 1.0", "bytes 0 1.0", "marks 0 1.0",
        "exit 1 1.0", "memory CallLimitError", "die FailedError", "loop 0 1.0",
    }  # fmt: skip
    assert outliving(started) == []


def holders(file: Path) -> set[str]:
    """The processes that have a file open."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if any(os.readlink(f"/proc/{pid}/fd/{fd}") == str(file) for fd in os.listdir(f"/proc/{pid}/fd")):
                found.add(pid)
    return found


@pytest.mark.parametrize("how", ["tree", "chain"])
def test_all_that_a_call_over_a_limit_has_started_ends_with_its_process(tmp_path: Path, how: str) -> None:
    (held := tmp_path / "held").touch()

    async def play(opened: Hosts) -> None:
        async with session(opened) as one:
            with pytest.raises(CallLimitError, match="over"):
                await one.call([call("act", how=how)])
            assert await asyncio.to_thread(eventually, lambda: not holders(held))

    with hosts("Bomb", options={"path": str(held)}, files=(str(tmp_path),)) as opened:
        asyncio.run(play(opened))


def test_processes_that_a_call_has_left_and_that_have_ended_do_not_count(tmp_path: Path) -> None:
    (held := tmp_path / "held").touch()

    async def play(opened: Hosts) -> None:
        async with session(opened) as one:
            assert not (await one.call([call("act", how="ended")])).errors

    limits = {"cpu_seconds": WAIT_S, "wall_seconds": WAIT_S}
    with hosts("Bomb", options={"path": str(held)}, files=(str(tmp_path),), **limits) as opened:
        asyncio.run(play(opened))


@pytest.mark.parametrize("end", ["close", "keeper"])
def test_what_a_call_has_left_running_ends_when_all_is_closed_or_the_keeper_is_killed(tmp_path: Path, end: str) -> None:
    (held := tmp_path / "held").touch()

    async def play(opened: Hosts) -> None:
        one = await opened.open({}, SEEDS)
        await one.call([call("act", how="few")])
        assert await asyncio.to_thread(eventually, lambda: len(holders(held)) == 3)
        if end == "keeper":
            os.kill(opened.keeper.pid, signal.SIGKILL)
            assert await asyncio.to_thread(eventually, lambda: not holders(held))

    with hosts("Bomb", options={"path": str(held)}, files=(str(tmp_path),)) as opened:
        asyncio.run(play(opened))
    assert eventually(lambda: not holders(held))


def test_the_environments_own_failures_are_failures() -> None:
    async def play(opened: Hosts) -> None:
        with pytest.raises(FailedError, match=rf"^open: {FILE}:\d+: ValueError: no board$"):
            await opened.open({"where": "reset"}, SEEDS)
        async with session(opened, where="get_reward") as one:
            await one.call([call("act")])
            with pytest.raises(FailedError, match=r"finish: .*games\.py:\d+: KeyError"):
                await one.finish()

    with hosts("Broken") as opened:
        asyncio.run(play(opened))


def test_what_is_no_exception_costs_its_rollout_and_not_those_in_the_same_process() -> None:
    errors = {"exit": "SystemExit: 3", "network": "no network", "cancel": "CancelledError", "unprintable": r"\\udcff"}

    async def play(opened: Hosts) -> None:
        async with asyncio.timeout(WAIT_S), session(opened) as other:
            before = (await other.call([call("act")])).messages
            for how, error in errors.items():
                with pytest.raises(FailedError, match=f"open: .*{error}"):
                    await opened.open({"how": how}, SEEDS)
            async with session(opened, how="number") as one:
                with pytest.raises(FailedError, match=r"finish: .*cannot be sent"):
                    await one.finish()
            assert (await other.call([call("act")])).messages == before  # its process lives

    with hosts("Escapes") as opened:
        asyncio.run(play(opened))


def test_a_coroutine_that_waits_too_long_costs_its_call_and_not_the_others() -> None:
    async def play(opened: Hosts) -> None:
        async with session(opened) as one, session(opened) as other:
            late = asyncio.ensure_future(one.call([call("wait", how="for ever")]))
            assert (await other.call([call("wait")])).messages
            with pytest.raises(CallLimitError, match="over 2 seconds"):
                await late
            assert (await other.finish()).parts == {"calls": 1.0}

    with hosts("Slow") as opened:
        asyncio.run(play(opened))


def test_a_cancelled_rollout_gives_its_process_back() -> None:
    async def play(opened: Hosts) -> None:
        async with session(opened) as one:
            task = asyncio.ensure_future(one.call([call("act", how="hang")]))
            await asyncio.sleep(0.2)
            task.cancel()
        async with session(opened) as other:
            assert (await other.call([call("act", how="raise")])).errors == 1

    with hosts("Hostile", processes=1, wall_seconds=100.0) as opened:
        asyncio.run(play(opened))


def test_functions_are_tools_without_a_class() -> None:
    async def play(opened: Hosts) -> Any:
        async with session(opened) as one:
            return one.tools, await one.call([call("add", a=1, b=2), call("nope")]), await one.finish()

    with hosts(None, tools=(f"{FILE}:add", "calculator")) as opened:
        tools, answers, outcome = asyncio.run(play(opened))
    assert [tool["function"]["name"] for tool in tools] == ["add", "calculator"]
    assert sorted(message["content"] for message in answers.messages) == ["3", "{'error': 'Tool nope not found.'}"]
    assert (outcome.reward, outcome.attributes, outcome.status) == (None, {}, "ok")


def test_the_row_chooses_among_several() -> None:
    parts = {"by_name": {"a": f"{FILE}:Guess", "b": {"name": f"{FILE}:Slow", "options": {"pause": 0.5}}}}

    async def play(opened: Hosts) -> None:
        async with session(opened, environment="a") as one, session(opened, environment="b") as other:
            assert [each.tools[0]["function"]["name"] for each in (one, other)] == ["guess", "wait"]
        with pytest.raises(FailedError, match=r"'c', but environment\.by_name has only a, b"):
            await opened.open({"environment": "c"}, SEEDS)
        with pytest.raises(FailedError, match="column `environment` is"):
            await opened.open({"environment": ["a"]}, SEEDS)

    with hosts(None, **parts) as opened:
        asyncio.run(play(opened))


@pytest.mark.parametrize("changed", [{"reward": 10**400}, {"parts": {"a": 10**400}}, {"facts": []}, {"reward": []}])
def test_an_outcome_that_our_code_does_not_send_is_a_failure(changed: dict[str, Any]) -> None:
    said = {"reward": 1.0, "parts": {}, "facts": {}, "attributes": None}
    assert read_outcome(said).reward == 1.0
    with pytest.raises(FailedError, match="answered something else"):
        read_outcome(said | changed)


def test_an_instance_is_closed_when_it_is_dropped_and_when_all_ends(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.touch()

    async def play(opened: Hosts) -> None:
        with pytest.raises(FailedError, match="no session"):
            await opened.open({"fails": True}, SEEDS)
        # at once, not when the next session comes
        assert await asyncio.to_thread(eventually, lambda: closed.read_text() == "closed\n", 10.0)
        async with session(opened) as one:
            await one.call([call("act")])

    with hosts("Closes", options={"path": str(closed)}, files=(str(closed),)) as opened:
        asyncio.run(play(opened))
    assert closed.read_text() == "closed\n" * 2


def test_a_program_of_the_model_that_starts_processes_without_end_is_killed() -> None:
    code = "import subprocess, time\nall = [subprocess.Popen(['sleep', '60']) for _ in range(12)]\ntime.sleep(60)"

    async def play(opened: Hosts) -> None:
        async with session(opened) as one:
            with pytest.raises(CallLimitError, match="over 8 processes"):
                await one.call([call("python", code=code)])

    with hosts(None, tools=("python",)) as opened:
        opened.shared_processes = 8
        asyncio.run(play(opened))


def test_another_interpreter_runs_them(tmp_path: Path) -> None:
    """One without any package: what runs there needs the standard library alone."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)

    async def play(opened: Hosts) -> Any:
        async with session(opened) as one:
            await one.call([call("guess", number=1)])
            return await one.finish()

    with hosts("Guess", python=str(tmp_path / "venv/bin/python")) as opened:
        assert asyncio.run(play(opened)).reward == 0.0


def test_an_interpreter_that_is_not_there_is_named_with_its_key() -> None:
    with (
        pytest.raises(ValueError, match=r"^environment\.python=venv/none: the program was not found"),
        hosts("Guess", python="venv/none"),
    ):
        raise AssertionError("it started")


def test_what_cannot_be_sent_costs_its_rollout_and_not_the_processes() -> None:
    async def play(opened: Hosts) -> None:
        with pytest.raises(FailedError, match="open: keys must be"):
            await opened.open({"column": {(1, 2): 3}}, SEEDS)
        async with session(opened) as one:
            await one.call([call("guess", number=1)])

    with hosts("Guess") as opened:
        asyncio.run(play(opened))


def test_an_answer_that_comes_after_its_rollout_was_cancelled_harms_nobody() -> None:
    async def play(opened: Hosts) -> None:
        async with session(opened) as other:
            for _ in range(5):
                async with session(opened) as one:
                    task = asyncio.ensure_future(one.call([call("wait")]))
                    await asyncio.sleep(0.01)
                    task.cancel()
                assert (await other.call([call("wait")])).messages

    with hosts("Slow") as opened:
        asyncio.run(play(opened))


def test_a_class_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"environment name=.* no type hint"), hosts("Untyped"):
        pass


def test_a_coroutine_asks_the_driver_for_its_turns() -> None:
    asked: list[Any] = []

    async def answer(request: Any) -> dict[str, Any]:
        asked.append(request)
        content = f"turn {len(asked)}"
        return {"role": "assistant", "content": content, "finish_reason": "stop", "token_ids": [1]}

    async def play(opened: Hosts, **row: Any) -> Any:
        async with session(opened, **row) as one:
            assert one.plays
            return await one.play(answer)

    with hosts("debate") as opened:
        outcome = asyncio.run(play(opened, question="why"))
        assert (outcome.reward, outcome.facts) == (2.0, {"said": "\\ud800"})
        assert asked[1]["messages"] == asked[2]["messages"]
        assert [message["content"] for message in asked[1]["messages"]] == ["why", "turn 1", "more"]
        assert asyncio.run(play(opened)).parts == outcome.parts  # the same seeds
        with pytest.raises(FailedError, match=r"play: .*games\.py:\d+: ValueError: no debate"):
            asyncio.run(play(opened, fails=True))
        with pytest.raises(FailedError, match=r"play: .*SystemExit: 3"):
            asyncio.run(play(opened, exits=True))


def test_an_error_of_the_engines_ends_the_coroutine_and_is_raised() -> None:
    async def answer(_: Any) -> dict[str, Any]:
        raise ConnectionError("no engine")

    async def play(opened: Hosts) -> None:
        async with session(opened) as one:
            await one.play(answer)

    with hosts("debate") as opened, pytest.raises(ConnectionError):
        asyncio.run(play(opened))


DRAWS = """
import asyncio
import random

async def draw():
    await asyncio.sleep(0.001)
    return random.random()

async def play(row, generate, seed):
    await generate([{"role": "user", "content": "x"}])
    first, second = await asyncio.gather(draw(), asyncio.create_task(draw()))
    return {"score": first, "second": second, "seed": seed}
"""


def test_tasks_of_a_coroutine_have_the_random_state_of_their_rollout(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)

    async def turn(request: Any) -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return {"role": "assistant", "content": "", "finish_reason": "stop", "token_ids": []}

    async def drawn(opened: Hosts, *samples: int) -> list[Any]:
        async def one(sample: int) -> Any:
            async with session(opened, sample) as each:
                outcome = await each.play(turn)
            return outcome.reward, outcome.parts

        return await asyncio.gather(*map(one, samples))

    with Hosts(EnvironmentConfig(name=f"{tmp_path / 'draws.py'}:play", **LIMITS), say=lambda line: None) as opened:
        together = asyncio.run(drawn(opened, 0, 1, 2))
        assert together == [asyncio.run(drawn(opened, sample))[0] for sample in (0, 1, 2)]
    numbers = {number for reward, parts in together for number in (reward, parts["second"])}
    assert len(numbers) == 6
    assert all(parts["seed"] == SEEDS["group"] for _, parts in together)


PLAYER = """
class Player:
    def __init__(self, level, args):
        if level < 1:
            raise ValueError(f"environment.level={level}: below 1.")
        self.level, self.rows = level, {"train": 5}

    async def play(self, row, generate):
        turn = await generate([{"role": "user", "content": f"{row['number'] * self.level}"}])
        return {"score": float(turn["content"]), "level": args_of(self)}

def args_of(player):
    return player.level
"""


OPENER = """
import asyncio
import random

class Place:
    taken = 0

    def __init__(self, number, seed):
        Place.taken += 1
        if Place.taken > 2:
            Place.taken -= 1
            raise RuntimeError("CAPACITY_REACHED")
        self.number, self.seed, self.drawn = number, seed, random.random()

    async def begin(self):
        self.drawn_later = random.random()
        return self

    async def close(self):
        Place.taken -= 1

class Opener:
    async def open(self, row, seed):
        place = Place(row["number"], seed)
        await asyncio.sleep(0.001)
        return await asyncio.create_task(place.begin())

    async def play(self, row, generate, place):
        await generate([{"role": "user", "content": "?"}])
        if row.get("fails"):
            raise ValueError("no game")
        drawn = {"first": place.drawn, "second": place.drawn_later}
        return {"score": place.number, "seed": place.seed, "taken": Place.taken, **drawn}
"""


def test_a_class_that_plays_may_open_something_that_is_closed_with_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.environments.hosts.FULL_PAUSE_S", 0.01)
    (tmp_path / "opener.py").write_text(OPENER)

    async def play(opened: Hosts, number: int, **row: Any) -> Any:
        async def turn(_: Any) -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return {"role": "assistant", "content": "", "finish_reason": "stop", "token_ids": []}

        async with session(opened, number=number, **row) as one:
            return await one.play(turn)

    async def together(opened: Hosts) -> Any:
        with pytest.raises(FailedError, match="no game"):
            await play(opened, 9, fails=True)
        return await asyncio.gather(*(play(opened, number) for number in range(6)))

    config = EnvironmentConfig(name=f"{tmp_path / 'opener.py'}:Opener", **LIMITS)
    with Hosts(config, say=lambda line: None) as opened:
        outcomes = asyncio.run(together(opened))
    assert [outcome.reward for outcome in outcomes] == [0, 1, 2, 3, 4, 5]
    # all have the seed and the random state of the group
    assert len({tuple(outcome.parts[name] for name in ("seed", "first", "second")) for outcome in outcomes}) == 1
    assert max(outcome.parts["taken"] for outcome in outcomes) == 2  # the others waited for a place


def test_a_class_that_plays_has_options_and_says_how_many_problems_it_has(tmp_path: Path) -> None:
    (tmp_path / "player.py").write_text(PLAYER)
    how: dict[str, Any] = {"name": f"{tmp_path / 'player.py'}:Player", **LIMITS}

    async def play(opened: Hosts) -> Any:
        async def turn(request: Any) -> dict[str, Any]:
            return {
                "role": "assistant",
                "content": request["messages"][0]["content"],
                "finish_reason": "stop",
                "token_ids": [],
            }

        async with session(opened, number=4) as one:
            return await one.play(turn)

    with Hosts(EnvironmentConfig(**how, options={"level": 3, "args": {}}), say=lambda line: None) as opened:
        assert opened.about[""]["rows"] == {"train": 5}
        outcome = asyncio.run(play(opened))
        assert (outcome.reward, outcome.parts) == (12.0, {"level": 3.0})
    with pytest.raises(ValueError, match=r"^environment.level=0: below 1\.$"):
        Hosts(EnvironmentConfig(**how, options={"level": 0, "args": {}}))
    with pytest.raises(ValueError, match=r"it cannot be made: TypeError: .* 'args'"):
        Hosts(EnvironmentConfig(**how, options={"level": 1}))
