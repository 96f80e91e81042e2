"""Reserves resources for a role and creates its actors: their bundles, locations and order.

Learners form one DeepSpeed world whose ranks on a node are neighbours. Engines are independent, each on one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf.cluster.actors import ActorGroup, ClusterError, HostedActor, HostedAsyncActor, Location, wait_for
from rlhf.cluster.rank_group import RankGroup
from rlhf.config.roles import Role
from rlhf.config.sections import LearnersConfig
from rlhf.plan import GPU
from rlhf.types import Place


@dataclass(frozen=True)
class Placed:
    """The actors of a role, in the order of their ranks.

    Attributes:
        locations: of each actor.
        bundles: the role's own reservation; None if its actors are in the bundles of another role.
        order: the bundle of each actor, by number.
    """

    role: Role
    group: ActorGroup
    locations: list[Location]
    bundles: PlacementGroup | None
    order: list[int]


async def create(
    role: Role, cluster: LearnersConfig, *, guests: Sequence[Role] = (), learners: Placed | None = None
) -> Placed:
    """Reserve what a role asks for and create its actors; nothing is loaded in them yet.

    Args:
        guests: for learners: the roles that will share their GPUs, and so need CPUs in their bundles.
        learners: for a guest: the learners whose GPUs it shares; each actor is in the bundle of its first learner.

    Raises:
        ClusterError: the resources were not free within the deadline. Nothing stays reserved.
    """
    if learners is not None:
        assert learners.bundles is not None
        each = len(learners.order) // role.count
        placed = await _start_actors(role, cluster, learners.bundles, learners.order[::each], role.cpus / each)
        return replace(placed, bundles=None)
    # Any learner may be the first of an engine, whose actor then joins that learner's bundle. So all bundles are equal.
    shared = sum(guest.cpus * guest.count / role.count for guest in guests)
    bundle = {"CPU": role.cpus + shared} | ({GPU: role.gpus} if role.gpus else {})
    bundles = placement_group([bundle] * role.count, strategy="PACK")
    try:
        await _wait_until_reserved(bundles, f"{role.count} {role.name}s of {bundle} each", cluster.start_deadline_s)
        return await _start_actors(role, cluster, bundles, range(role.count), role.cpus)
    except BaseException:
        remove_placement_group(bundles)
        raise


async def _start_actors(
    role: Role, cluster: LearnersConfig, bundles: PlacementGroup, order: Sequence[int], cpus: float
) -> Placed:
    """Create the actors of a role in these bundles; ranks of a trained role that share a node become neighbours."""
    group = (ActorGroup if role.training is None else RankGroup)(
        role.name,
        [new_actor(role, cpus, bundles, index) for index in order],
        deadline_s=cluster.step_deadline_s,
    )
    locations = await group.locate(deadline_s=cluster.start_deadline_s)
    if role.training is not None:
        neighbours = _neighbours_together(locations)
        group.reorder(neighbours, locations)
        locations, order = [locations[i] for i in neighbours], [order[i] for i in neighbours]
    return Placed(role, group, locations, bundles, list(order))


def rank_places(
    locations: Sequence[Location], threads: int, device: str, *, deterministic: bool, version: int = 0
) -> list[Place]:
    """The place of each actor of a role: of a trained one, its rank in one world; ranks of a node are neighbours."""
    places, meeting = [], locations[0]
    for rank, location in enumerate(locations):
        before = sum(other.node == location.node for other in locations[:rank])
        on_node = sum(other.node == location.node for other in locations)
        # A learner sees only its own GPU, as device 0; on CPU the ranks of a node are numbered.
        local_rank = 0 if device == "cuda" else before
        meets = meeting.host, meeting.port
        places.append(Place(rank, len(locations), local_rank, *meets, threads, on_node, deterministic, version))
    return places


def shared_gpus(learners: Sequence[Location], role: Role, number: int) -> str:
    """The GPUs of the learners that an actor of a role shares; they must be on one node."""
    each = len(learners) // role.count
    own = learners[number * each : (number + 1) * each]
    if len({location.node for location in own}) > 1:
        raise ClusterError(
            f"cluster.placement=colocated: the {each} GPUs of {role.name} {number} are on several nodes "
            f"({', '.join(sorted({location.host for location in own}))}). Choose cluster.tensor_parallel so that it "
            "divides the GPUs of a node."
        )
    return ",".join(gpu for location in own for gpu in location.gpu_ids)


async def _wait_until_reserved(bundles: PlacementGroup, what: str, deadline_s: float) -> None:
    available = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", GPU)}
    await wait_for(
        bundles.ready(),
        what=f"resources for {what}, the whole cluster having {available}",
        deadline_s=deadline_s,
    )


def new_actor(role: Role, cpus: float, bundles: PlacementGroup, index: int) -> Any:
    """Create an actor of a role in one bundle; it starts when the bundle is reserved and free."""
    options: dict[str, Any] = {"max_concurrency": 10_000} if role.coroutines else {}
    actor: Any = ray.remote(HostedAsyncActor if role.coroutines else HostedActor).options(
        num_cpus=cpus,
        num_gpus=role.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=index),
        **options,
    )
    return actor.remote(*role.hosted.split(":"))


def _neighbours_together(locations: Sequence[Location]) -> list[int]:
    """An order in which actors of one node are neighbours; nodes keep the order of their first actor."""
    nodes = list(dict.fromkeys(location.node for location in locations))
    return sorted(range(len(locations)), key=lambda i: (nodes.index(locations[i].node), i))
