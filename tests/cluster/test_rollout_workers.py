"""The rollout workers of a run: where they run, what the loss of one costs, and what is said of it. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_dispatch import PURPOSE, Worker, names, no_pauses, prompt, settled
from worlds import make_config

from rlhf.cluster import rollout_workers
from rlhf.cluster.actors import LostError
from rlhf.cluster.dispatch import FailedRequest, News, Order, Printed
from rlhf.cluster.rollout_workers import RolloutWorkers
from rlhf.cluster.worker_actors import node_for, share, worker_config, worker_nodes
from rlhf.types import RolloutGroup

__all__ = ["no_pauses"]  # a fixture

SERVICE = {"name": "service", "url": "http://h:1"}
FAR = {**SERVICE, "endpoint_host": "10.0.0.1"}


@pytest.mark.parametrize(
    ("value", "engines", "cores", "environment", "nodes"),
    [
        ("auto", "a", 7, {}, ""),
        ("auto", "a", 8, {}, "a"),
        ("auto", "aab", 64, {}, "ab"),
        ("auto", "abcd", 12, {}, "abc"),
        (0, "ab", 64, {}, ""),
        (1, "ab", 2, {}, "a"),
        (3, "aab", 2, {}, "aba"),
        ("auto", "ab", 64, SERVICE, "d"),
        (2, "ab", 64, SERVICE, "dd"),
        ("auto", "ab", 64, FAR, "ab"),
    ],
)
def test_where_the_workers_run(value: Any, engines: str, cores: float, environment: dict[str, Any], nodes: str) -> None:
    config = make_config(Path("model"), cluster={"rollout_workers": value}, environment=environment)
    assert worker_nodes(config, list(engines), cores, "d") == list(nodes)


def test_more_workers_than_cores_are_refused() -> None:
    config = make_config(Path("model"), cluster={"rollout_workers": 10_000})
    with pytest.raises(ValueError, match=r"cluster\.rollout_workers=10000: the cluster has 16 cores"):
        worker_nodes(config, ["a"], 16, "a")


def test_a_lost_worker_starts_on_its_node_or_on_the_one_of_engines_with_the_fewest() -> None:
    assert node_for("ab", 0, "ab", {"a", "b"}) == "a"
    assert node_for("abc", 0, "abc", {"b", "c", "d"}) == "b"
    assert node_for("abbc", 0, "abc", {"b", "c"}) == "c"
    with pytest.raises(LostError, match="no node with engines is left"):
        node_for("ab", 0, "ab", {"d"})


@pytest.mark.parametrize(
    ("nodes", "environment", "processes"),
    [("aab", {}, [4, 3, 7]), ("aab", SERVICE, [3, 2, 2]), ("a" * 8, {}, [1] * 8)],
)
def test_workers_share_what_is_one_for_a_node_or_a_run(
    nodes: str, environment: dict[str, Any], processes: list[int]
) -> None:
    model = {"endpoint": "http://h:2", "replicas": 4}
    config = make_config(Path("model"), environment={"processes": 7} | environment, reward_model=model)
    configs = [worker_config(config, number, nodes) for number in range(len(nodes))]
    assert [each.environment.processes for each in configs] == processes
    replicas = [each.reward_model.replicas for each in configs if each.reward_model]
    assert replicas == [share(4, len(nodes), number) for number in range(len(nodes))]
    assert sum(replicas) == max(4, len(nodes))


class Actors:
    """Worker actors as the driver's side knows them; `again` is what starting one again does."""

    ended = False

    def __init__(self, again: Callable[[int], None]) -> None:
        self.workers, self.several_nodes, self._again = [Worker(), Worker()], True, again

    async def start(self, nodes: list[str]) -> None:
        self.workers = [Worker() for _ in nodes]

    def node(self, rank: int) -> str:
        return "ab"[rank]

    async def exchange(self, rank: int, orders: Sequence[Order]) -> Sequence[News]:
        return await self.workers[rank].exchange(orders)

    def send(self, rank: int, orders: Sequence[Order]) -> None:
        self.workers[rank].send(orders)

    async def end(self) -> None:
        self.ended = True

    async def start_again(self, rank: int) -> None:
        await asyncio.sleep(0)
        self._again(rank)
        self.workers[rank] = Worker()


class Run:
    """What the workers know of a run.

    Attributes:
        said: printed lines.
        ended: the errors that ended the run.
        reports: failed requests on engines.
        checked: graded groups, by the id of their prompt.
    """

    def __init__(self, max_restarts: int) -> None:
        self.said, self.ended, self.reports = list[str](), list[Exception](), list[Any]()
        self.closed, self.checked = list[str](), list[str]()
        cluster = SimpleNamespace(
            trains=True,
            rollout_worker_nodes=lambda: ["a", "b"],
            watch_stage=lambda name: nullcontext(),
            background=asyncio.ensure_future,
            end_with=self.ended.append,
        )
        recovery = SimpleNamespace(report=lambda *report: self.reports.append(report))
        self.engines: Any = SimpleNamespace(cluster=cluster, choice=None, recovery=recovery, version=0)
        self.config: Any = SimpleNamespace(reward_model=None, run=SimpleNamespace(max_restarts=max_restarts))

    def check(self, group: RolloutGroup) -> None:
        self.checked.append(group.prompt.id)

    def scorer(self) -> Any:
        return SimpleNamespace(warnings=("known",), sources={}, close=lambda: self.closed.append("scorer"))


def starts(rank: int) -> None:
    pass


def refuses(rank: int) -> None:
    raise ConnectionError("it does not start")


@asynccontextmanager
async def started(
    monkeypatch: pytest.MonkeyPatch, again: Callable[[int], None] = starts, max_restarts: int = 3
) -> AsyncIterator[tuple[RolloutWorkers, Run, Actors]]:
    run, actors = Run(max_restarts), Actors(again)
    monkeypatch.setattr(rollout_workers, "WorkerActors", lambda *_: actors)
    workers = RolloutWorkers(run.engines, run.config, None, run.scorer(), None, say=run.said.append, check=run.check)
    async with workers:
        await settled()
        yield workers, run, actors
    assert actors.ended


def test_a_lost_worker_is_started_again_and_costs_its_groups_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with started(monkeypatch) as (workers, run, actors):
            assert run.closed == ["scorer"]
            groups = [asyncio.ensure_future(workers.rollout_group(prompt(name), PURPOSE)) for name in "123"]
            await settled()
            a, b = actors.workers
            assert (names(a), names(b)) == (["1", "3"], ["2"])
            a.die()
            await settled()
            assert sorted(names(b)) == ["1", "2", "3"]
            b.answer("1", "2", "3")
            assert [(await group).prompt.id for group in groups] == ["1", "2", "3"]
            assert sorted(run.checked) == ["1", "2", "3"]
            assert run.said == [
                "warning: the actor died. Its 2 open groups began anew; the worker is started again.",
                "rollout worker 0 runs again on node a",
            ]
            more = [asyncio.ensure_future(workers.rollout_group(prompt(name), PURPOSE)) for name in "45"]
            await settled()
            assert [len(names(worker)) for worker in actors.workers] == [1, 1]  # the first is a new one
            assert not run.ended
            for group in more:
                group.cancel()

    asyncio.run(play())


def test_the_run_goes_on_without_a_worker_that_does_not_start_and_ends_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        async with started(monkeypatch, refuses) as (_, run, actors):
            actors.workers[0].die()
            await settled()
            assert run.said[-1] == "warning: the run goes on without rollout worker 0: it does not start"
            assert not run.ended
            actors.workers[1].die()
            await settled()
            assert list(map(str, run.ended)) == ["it does not start"]

    asyncio.run(play())


def test_a_worker_is_started_again_at_most_max_restarts_times_between_two_transfers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        async with started(monkeypatch, max_restarts=2) as (_, run, actors):
            for version in (0, 1):
                run.engines.version = version
                for rank in (0, 1, 0, 1):
                    actors.workers[rank].die()
                    await settled()
            assert not run.ended
            actors.workers[0].die()
            await settled()
            assert list(map(str, run.ended)) == ["the actor died"]

    asyncio.run(play())


def test_after_the_last_step_the_loss_of_a_worker_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with started(monkeypatch, refuses, max_restarts=0) as (workers, run, actors):
            await workers.stop_replacing()
            actors.workers[0].die()
            await settled()
            assert (run.said, run.ended) == ([], [])

    asyncio.run(play())


def test_lines_are_printed_with_their_node_and_each_warning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with started(monkeypatch) as (_, run, actors):
            a, b = actors.workers
            for worker in (a, b):
                worker.tell(Printed("a line"), Printed("warning: it is slow"), Printed("warning: known"))
                await settled()
            b.tell(FailedRequest(1, 3, "it died", True))
            await settled()
            assert run.said == ["node a: a line", "warning: node a: it is slow", "node b: a line"]
            assert run.reports == [(1, 3, "it died", True)]

    asyncio.run(play())
