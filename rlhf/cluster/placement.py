"""The actors of a role on the nodes: what they reserve, where they are, in which order.

Learners form one DeepSpeed world whose ranks on a node are neighbours. Engines are independent, each on one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf.cluster.actors import ActorGroup, ClusterError, HostedActor, HostedAsyncActor, Location, wait_for
from rlhf.cluster.ranks import RankGroup
from rlhf.config.roles import CRITIC, ENGINE, LEARNER, REWARD_MODEL, Role
from rlhf.config.sections import ClusterConfig
from rlhf.plan import GPU

HOSTED = {
    LEARNER: "rlhf.learner.worker:Learner",
    CRITIC: "rlhf.learner.critic:Critic",
    REWARD_MODEL: "rlhf.learner.reward_scorer:RewardScorer",
    ENGINE: "rlhf.rollout.engine:RolloutEngine",
}


@dataclass(frozen=True)
class Placed:
    """The actors of a role, in the order of their ranks.

    Attributes:
        locations: of each actor.
        bundles: what the role reserves; None where it is part of another role's.
        order: the bundle of each actor.
    """

    role: Role
    group: ActorGroup
    locations: list[Location]
    bundles: PlacementGroup | None
    order: list[int]


async def create(role: Role, cluster: ClusterConfig, *, beside: Placed | None = None) -> Placed:
    """Reserve what a role asks for and create its actors; nothing is loaded in them yet.

    Args:
        beside: the learners whose GPUs engines share; engine i is in the bundle of its first learner.

    Raises:
        ClusterError: the resources were not to be had in time.
    """
    if beside is None:
        # On shared GPUs an engine has no bundle of its own: its CPUs are part of its first learner's.
        shared = cluster.cpus_per_engine if role.name == LEARNER and cluster.placement == "colocated" else 0.0
        bundle = {"CPU": role.cpus + shared} | ({GPU: role.gpus} if role.gpus else {})
        reserved = bundles = await _reserve([bundle] * role.count, f"{role.name}s", cluster.start_deadline_s)
        order = list(range(role.count))
    else:
        assert beside.bundles is not None
        reserved, bundles, order = beside.bundles, None, beside.order[:: cluster.tensor_parallel]
    actors = [_actor(role, reserved, index) for index in order]
    kind = ActorGroup if role.training is None else RankGroup
    group = kind(
        role.name, actors, deadline_s=cluster.step_deadline_s, ends_by="shutdown" if role.name == ENGINE else "close"
    )
    locations = await group.locate(deadline_s=cluster.start_deadline_s)
    if role.training is not None:
        neighbours = _neighbours_together(locations)
        group.reorder(neighbours, locations)
        locations, order = [locations[i] for i in neighbours], [order[i] for i in neighbours]
    return Placed(role, group, locations, bundles, order)


def shared_gpus(learners: Sequence[Location], engine: int, tensor_parallel: int) -> str:
    """The GPUs of the learners that an engine shares; they must be of one node."""
    own = learners[engine * tensor_parallel : (engine + 1) * tensor_parallel]
    if len({location.node for location in own}) > 1:
        raise ClusterError(
            f"cluster.placement=colocated: the {tensor_parallel} GPUs of engine {engine} are on several nodes "
            f"({', '.join(sorted({location.host for location in own}))}). Choose cluster.tensor_parallel so that it "
            "divides the GPUs of a node."
        )
    return ",".join(gpu for location in own for gpu in location.gpu_ids)


async def _reserve(bundles: list[dict[str, float]], what: str, deadline_s: float) -> PlacementGroup:
    reserved = placement_group(bundles, strategy="PACK")
    available = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", GPU)}
    await wait_for(
        reserved.ready(),
        what=f"resources for {len(bundles)} {what} of {bundles[0]} each, the whole cluster having {available}",
        deadline_s=deadline_s,
    )
    return reserved


def _actor(role: Role, reserved: PlacementGroup, bundle: int) -> Any:
    hosts_coroutines = role.name == ENGINE
    options: dict[str, Any] = {"max_concurrency": 10_000} if hosts_coroutines else {}
    actor: Any = ray.remote(HostedAsyncActor if hosts_coroutines else HostedActor).options(
        num_cpus=role.cpus,
        num_gpus=role.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundle),
        **options,
    )
    return actor.remote(*HOSTED[role.name].split(":"))


def _neighbours_together(locations: Sequence[Location]) -> list[int]:
    """The order in which those of a node are neighbours; nodes keep the order of their first actor."""
    nodes = list(dict.fromkeys(location.node for location in locations))
    return sorted(range(len(locations)), key=lambda i: (nodes.index(locations[i].node), i))
