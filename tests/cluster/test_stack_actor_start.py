"""Reservations of the roles on a Ray with pretended GPUs: what they take together, and what a failure leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import ray
from ray.util import placement_group_table
from ray_cluster import ray_folder
from waiting import STACK_WAIT_S

from rlhf.cluster.actor_start import create, create_guest, shared_cores, shared_gpus
from rlhf.cluster.actors import ClusterError, Location
from rlhf.config.roles import CRITIC, ENGINE, LEARNER, Role, Training
from rlhf.config.sections import ClusterConfig, TrainedConfig
from rlhf.types import World

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

CPUS, GPUS = 4, 2
COLOCATED = {"placement": "colocated", "engines": 1, "learners": 2, "tensor_parallel": 2, "cpus_per_engine": 1.0}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_folder() as folder:
        ray.init(
            address="local", num_cpus=CPUS, num_gpus=GPUS, include_dashboard=False, log_to_driver=False,
            _temp_dir=folder, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )  # fmt: skip
        yield
        ray.shutdown()


TRAINING = Training(TrainedConfig(), epochs_per_step=1, minibatches_per_epoch=1, steps=1)
CRITICS = Role(
    CRITIC, "critic", "model.path", "m", 2, cpus=0.5, gpus=0, hosted="rlhf.learner.critic:Critic", memory="",
    training=TRAINING,
)  # fmt: skip


def learners(count: int) -> Role:
    hosted = "rlhf.learner.policy:Learner"
    return Role(
        LEARNER, "learner", "model.path", "m", count, cpus=1.0, gpus=1, hosted=hosted, memory="", training=TRAINING
    )


def engines(cpus: float) -> Role:
    hosted = "rlhf.sampling.engine:RolloutEngine"
    return Role(ENGINE, "rollout", "model.path", "m", 1, cpus=cpus, gpus=0, hosted=hosted, memory="", coroutines=True)


def test_colocated_roles_fit_a_machine_that_has_what_the_resource_check_counts() -> None:
    config = ClusterConfig(**COLOCATED, start_deadline_s=STACK_WAIT_S)  # type: ignore[arg-type]
    guests = (CRITICS, engines(1.0))
    assert sum(role.count * role.cpus for role in (learners(2), *guests)) == CPUS

    async def place() -> list[Any]:
        ranks = await create(learners(2), config, guests=guests)
        return [ranks, *[await create_guest(guest, config, ranks) for guest in guests]]

    ranks, critics, engine = asyncio.run(place())
    assert shared_gpus(ranks.locations, guests[1], 0) == "0,1"
    assert [shared_gpus(ranks.locations, CRITICS, i) for i in range(2)] == ["0", "1"]
    assert critics.reservation is engine.reservation is None
    for actor in (*ranks.actors, *critics.actors, *engine.actors):
        ray.kill(actor)
    ray.util.remove_placement_group(ranks.reservation)


def test_a_role_that_finds_no_resources_in_time_leaves_no_reservation() -> None:
    with pytest.raises(ClusterError, match=r"resources for 3 learners of .* no answer within 2 s"):
        asyncio.run(create(learners(GPUS + 1), ClusterConfig(start_deadline_s=2.0)))
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


class OffloadedRank:
    """Hosted by an actor: a rank on a GPU, but for the world that it would join."""

    def __init__(self, threads: int) -> None:
        import torch

        from rlhf.config.sections import ModelConfig
        from rlhf.learner import rank

        self.by_default = os.environ["OMP_NUM_THREADS"], torch.get_num_threads()
        world = World(0, 1, 0, "127.0.0.1", 0, threads=threads)
        training = dataclasses.replace(TRAINING, section=TrainedConfig(offload_optimizer=True))
        with mock.patch.object(rank, "join_world", return_value=torch.device("cpu")):
            rank.TrainedRank(world, name="policy", training=training, model=ModelConfig(path="m"), device="cuda")

    def threads(self) -> tuple[tuple[str, int], int]:
        import torch

        return self.by_default, torch.get_num_threads()


def test_an_optimizer_in_host_memory_gets_threads_although_ray_gives_its_actor_one() -> None:
    hosted = f"{__name__}:{OffloadedRank.__name__}"
    role = dataclasses.replace(learners(1), hosted=hosted, cpus=0.5, gpus=0)

    async def threads() -> tuple[tuple[str, int], int]:
        ranks = await create(role, ClusterConfig(start_deadline_s=STACK_WAIT_S))
        assert ranks.locations[0].cores == len(os.sched_getaffinity(0))
        await ranks.build([({"DS_ACCELERATOR": "cpu"}, 3)], deadline_s=STACK_WAIT_S)
        (found,) = await ranks.call(lambda rank: rank.threads())
        ray.kill(ranks.actors[0])
        ray.util.remove_placement_group(ranks.reservation)
        return found

    assert asyncio.run(threads()) == (("1", 1), 3)


def test_the_cores_of_a_node_are_divided_among_the_ranks_of_all_trained_roles_there() -> None:
    trained = [Location(str(i), node, "host", i, 1, (), 8) for i, node in enumerate("aaabcccccccccc")]
    assert [shared_cores(trained[i], trained) for i in (0, 3, 4)] == [2, 8, 1]
