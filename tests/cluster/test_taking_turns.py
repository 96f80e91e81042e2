"""The order in which engine, policy and critic take turns on one GPU: its memory is counted, and never too small."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.cluster.actor_start import environment_of
from rlhf.cluster.actors import record_call
from rlhf.cluster.cluster import Cluster
from rlhf.cluster.engines import Engines
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.roles import CRITIC, ENGINE, LEARNER

GPU = 100
WEIGHTS, STATE, WORK, BUCKETS, KV_CACHE = 10, 40, 30, 10, 65


class Memory(dict[str, int]):
    """Of the GPU, by use."""

    peak = 0

    def hold(self, **uses: int) -> None:
        self.update(uses)
        assert sum(self.values()) <= GPU, f"out of memory: {self}"
        self.peak = max(self.peak, sum(self.values()))


class Ranks:
    """A trained role on the GPU. What it frees stays in its cache until it leaves."""

    def __init__(self, memory: Memory, name: str) -> None:
        self.memory, self.name = memory, name
        memory.hold(**{f"{name} weights": WEIGHTS, f"{name} state": STATE})

    def hold(self, **uses: int) -> None:
        self.memory.hold(**{f"{self.name} {use}": size for use, size in uses.items()})

    async def call(self, ask: Callable[[Any], Any]) -> list[None]:
        match record_call(ask):
            case "leave_gpu", offload:
                self.hold(cache=0, **({"state": 0} if offload else {}))
            case "update", _:
                self.hold(state=STATE, cache=WORK)
            case "send_weights", _, _:
                self.hold(cache=BUCKETS)
        return [None]


class FakeEngines:
    absent: frozenset[int] = frozenset()

    def __init__(self, memory: Memory) -> None:
        self.memory, self.calls = memory, []
        self.present = self.actors = ["engine 0"]
        self.homes = {"id 0": "engine 0"}

    async def call_one(self, rank: int, ask: Callable[[Any], Any], **_: Any) -> None:
        await self.call(ask)

    async def call(self, ask: Callable[[Any], Any], **_: Any) -> None:
        method, *arguments = record_call(ask)
        self.calls.append(" ".join([method, *(str(x) for argument in arguments for x in argument)]))
        match self.calls[-1]:
            case "sleep":
                self.memory.hold(weights=0, kv_cache=0)
            case "wake_up weights":
                self.memory.hold(weights=WEIGHTS)
            case "wake_up kv_cache":
                self.memory.hold(kv_cache=KV_CACHE)


class SharedGPU(Cluster):
    """A cluster of fakes on one GPU, with engines that have just been built."""

    def __init__(self, *, offload: bool = True) -> None:
        self.config: Any = SimpleNamespace(
            cluster=SimpleNamespace(
                placement="colocated", offload_while_sampling=offload, min_engines=1, step_deadline_s=1.0
            ),
            run=SimpleNamespace(max_restarts=0),
            request_deadline_s=1.0,
        )
        self.shares_gpus, self.trains, self.first_step, self.memory = True, True, 0, Memory()
        self.ranks: Mapping[str, Any] = {}

    async def begin(self) -> Engines:
        self.ranks = {LEARNER: Ranks(self.memory, "policy")}
        await self.leave_gpus()
        self.ranks |= {CRITIC: Ranks(self.memory, "critic")}
        await self.leave_gpus()
        self.ranks |= {ENGINE: FakeEngines(self.memory)}
        self.memory.hold(weights=WEIGHTS, kv_cache=KV_CACHE)
        engines = Engines(self, self.config)
        engines._connected = engines.group.present
        return engines

    def group(self, role: str) -> Any:
        return self.ranks[role]

    def trained(self) -> Any:
        return {role: self.ranks[role] for role in self.ranks if role != ENGINE}

    async def step(self, engines: Engines, version: int) -> None:
        await engines.sleep_if_colocated()
        roles = (CRITIC, LEARNER)
        await self.run_together({role: self.ranks[role].call(lambda rank: rank.update(version)) for role in roles})
        await engines.send_weights(version)


def test_engine_policy_and_critic_fit_in_turns_where_no_two_of_their_peaks_would() -> None:
    assert min(2 * (WEIGHTS + STATE + WORK), 3 * WEIGHTS + KV_CACHE + BUCKETS, 2 * WEIGHTS + STATE + KV_CACHE) > GPU
    cluster = SharedGPU()

    async def run() -> None:
        engines = await cluster.begin()
        for version in (1, 2):
            await cluster.step(engines, version)
        await engines.send_weights(3)  # to engines that are awake, as after a check of the canary

    asyncio.run(run())
    step = ["sleep", "wake_up weights", "pause", "wake_up kv_cache", "resume"]
    assert cluster.ranks[ENGINE].calls == [*step, *step, *step]
    assert cluster.memory.peak == 3 * WEIGHTS + KV_CACHE


def test_without_offloading_the_state_stays_on_the_gpu() -> None:
    cluster = SharedGPU(offload=False)
    with pytest.raises(AssertionError, match="out of memory"):
        asyncio.run(cluster.begin())
    assert cluster.memory["policy state"] == STATE


# --- what engines and learners on GPUs are started with ---


def flagship(*overrides: str) -> GRPOConfig:
    return load_config(GRPOConfig, [str(Path(__file__).parents[2] / "configs/math.yaml")], overrides)


def test_an_engine_that_is_sent_all_weights_keeps_none_while_it_sleeps() -> None:
    assert flagship().engine_sleep_level == 2
    assert flagship("model.lora={rank: 8}").engine_sleep_level == 1  # the base is never sent
    assert flagship("rollout.engine={quantization: fp8}").engine_sleep_level == 1  # nor are its scales
    assert flagship("rollout.engine={max_num_batched_tokens: 8192}").engine_sleep_level == 2


@pytest.mark.parametrize(
    ("role", "placement", "variables", "expected"),
    [
        (LEARNER, "separate", {}, True),
        (ENGINE, "separate", {}, False),
        (LEARNER, "colocated", {}, False),  # weights go by CUDA IPC
        (LEARNER, "separate", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, False),  # the user's own
    ],
)
def test_learners_on_gpus_of_their_own_use_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, role: str, placement: str, variables: dict[str, str], expected: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = environment_of(role, flagship(f"cluster.placement={placement}"), sockets=None)
    assert ("PYTORCH_CUDA_ALLOC_CONF" in environment) == expected
