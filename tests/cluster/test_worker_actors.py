"""The actors of rollout workers: what a new one is told, and how long one may be silent. Without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import make_config

from rlhf.cluster import actors, worker_actors
from rlhf.cluster.actors import Location, SilentError
from rlhf.cluster.cluster import Cluster
from rlhf.cluster.worker_actors import WorkerActors


class Actor:
    """An actor that answers every call, but `build` when `built` is set."""

    def __init__(self) -> None:
        self.told = list[tuple[Any, ...]]()
        self.building, self.built = asyncio.Event(), asyncio.Event()
        for name in ("locate", "build", "call", "end_children"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _locate(self) -> Location:
        return Location("1", "a", "10.0.0.1", 1, 2, (), 1)

    async def _build(self, *_: Any) -> None:
        self.building.set()
        await self.built.wait()

    async def _end_children(self) -> None:
        pass

    def _call(self, method: str, *arguments: Any) -> Answer:
        self.told.append((method, *arguments))
        return Answer(self._answer())

    async def _answer(self) -> bytes:
        return pickle.dumps(["news"])


class Answer:
    """As Ray's, it may be awaited again after a time-out."""

    def __init__(self, answer: Coroutine[Any, Any, bytes]) -> None:
        self._task = asyncio.ensure_future(answer)

    def __await__(self) -> Generator[Any, Any, bytes]:
        return asyncio.shield(self._task).__await__()


class Without(Cluster):
    """A cluster without Ray."""

    async def _start(self) -> None:
        pass


def play(
    monkeypatch: pytest.MonkeyPatch, folder: Path, scenario: Callable[[WorkerActors, list[Actor]], Any]
) -> list[Actor]:
    started: list[Actor] = []
    node = SimpleNamespace(get_node_id=lambda: "a")

    def start(*_: Any) -> Actor:
        started.append(Actor())
        if len(started) == 1:  # a later one is built when the scenario says so
            started[0].built.set()
        return started[-1]

    new = SimpleNamespace(remote=start)
    ray: Any = SimpleNamespace(
        nodes=lambda: [{"NodeID": "a", "Alive": True}], get_runtime_context=lambda: node, kill=lambda _: None,
        remote=lambda _: SimpleNamespace(options=lambda **_: new), is_initialized=lambda: True,
    )  # fmt: skip
    monkeypatch.setattr(worker_actors, "ray", ray)
    monkeypatch.setattr(actors, "ray", ray)
    monkeypatch.setattr(worker_actors, "node_names", lambda _: {"a": "a"})
    monkeypatch.setattr(worker_actors, "RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(worker_actors, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)

    async def run() -> None:
        config = make_config(folder / "model", run={"dir": str(folder)})
        async with Without(config) as cluster:
            recovery = SimpleNamespace(subscribe=lambda _: None, unsubscribe=lambda _: None)
            group = SimpleNamespace(locations=[SimpleNamespace(node="a")], absent=())
            engines: Any = SimpleNamespace(cluster=cluster, recovery=recovery, group=group)
            workers = WorkerActors(engines, config, {}, None)
            workers.set_scale(0.0, 1.0)
            await workers.start(["a"])
            await scenario(workers, started)
            await workers.end()

    asyncio.run(asyncio.wait_for(run(), 60))
    return started


def test_a_worker_hears_of_the_scale_and_the_engines_that_changed_while_it_was_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(workers: WorkerActors, started: list[Actor]) -> None:
        again = asyncio.ensure_future(workers.start_again(0))
        while len(started) < 2:
            await asyncio.sleep(0.001)
        await started[1].building.wait()
        workers.set_scale(2.0, 3.0)
        workers.update(7, {}, "too many")
        assert started[1].told == []
        started[1].built.set()
        await again

    first, second = play(monkeypatch, tmp_path, scenario)
    assert ("close",) in first.told
    assert second.told == [("update_engines", 7, {}, "too many"), ("set_scale", 2.0, 3.0), ("close",)]


def test_a_worker_is_lost_after_two_silences_in_a_row_since_one_may_be_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silences, deadlines = [True, False, True, True], list[float]()

    async def wait_for(answer: Answer, *, deadline_s: float, **_: Any) -> bytes:
        deadlines.append(deadline_s)
        if silences.pop(0):
            raise SilentError("no answer")
        return await answer

    async def scenario(workers: WorkerActors, started: list[Actor]) -> None:
        answer: Any = ["news"]
        with monkeypatch.context() as patched:
            patched.setattr(worker_actors, "wait_for", wait_for)
            assert await workers.exchange(0, []) == answer
            with pytest.raises(SilentError):
                await workers.exchange(0, [])

    play(monkeypatch, tmp_path, scenario)
    assert deadlines == [worker_actors.SILENT_S / 2] * 4
