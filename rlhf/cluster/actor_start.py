"""How the actors of a role start: reserved resources, bundles, and environment variables.

Learners form one DeepSpeed world whose ranks on a node are neighbours. Engines are independent, each on one node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf.check.resources import GPU
from rlhf.cluster.actors import ActorGroup, ClusterError, HostedActor, HostedAsyncActor, Location, wait_for
from rlhf.cluster.rank_group import RankGroup
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.roles import ENGINE, Role
from rlhf.config.sections import LearnersConfig
from rlhf.weights.cpu_kernels import EQUAL_ROWS

ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}  # torch's settings of its memory; the user's stay


async def create(role: Role, cluster: LearnersConfig, *, guests: Sequence[Role] = ()) -> ActorGroup[Any]:
    """Reserve the resources of a role and create its actors; they have loaded nothing yet.

    `guests`: roles that share the learners' GPUs and need CPUs in their bundles. ClusterError if the resources are not
    free in time; nothing stays reserved then.
    """
    # Any learner may be the first of an engine, whose actor then joins that learner's bundle. So all bundles are equal.
    shared = sum(guest.cpus * guest.count / role.count for guest in guests)
    bundle = {"CPU": role.cpus + shared} | ({GPU: role.gpus} if role.gpus else {})
    available = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", GPU)}
    reservation = placement_group([bundle] * role.count, strategy="PACK")
    try:
        await wait_for(
            reservation.ready(),
            what=f"resources for {role.count} {role.name}s of {bundle} each, the whole cluster having {available}",
            deadline_s=cluster.start_deadline_s,
        )
        group = await _start_actors(role, cluster, reservation, range(role.count), role.cpus)
    except BaseException:
        remove_placement_group(reservation)
        raise
    group.reservation = reservation
    return group


async def create_guest(role: Role, cluster: LearnersConfig, learners: ActorGroup[Any]) -> ActorGroup[Any]:
    """Create the actors of a role that shares the GPUs of the learners, each in the bundle of its first learner."""
    assert learners.reservation is not None
    each = len(learners.actors) // role.count
    return await _start_actors(role, cluster, learners.reservation, learners.bundles[::each], role.cpus / each)


async def _start_actors(
    role: Role, cluster: LearnersConfig, reservation: PlacementGroup, bundles: Sequence[int], cpus: float
) -> ActorGroup[Any]:
    """Create the actors of a role in these bundles; ranks of a trained role that share a node become neighbours."""
    actors = [new_actor(role, cpus, reservation, bundle) for bundle in bundles]
    group: ActorGroup[Any] = ActorGroup(role.name, actors, deadline_s=cluster.step_deadline_s)
    if role.training is not None:
        group = RankGroup(
            role.name, actors, deadline_s=cluster.step_deadline_s, ranks_per_shard=cluster.sequence_parallel
        )
    group.bundles = list(bundles)
    nodes = [location.node for location in await group.locate(deadline_s=cluster.start_deadline_s)]
    if role.training is not None:  # nodes keep the order of their first actor
        group.reorder(sorted(range(len(nodes)), key=lambda i: nodes.index(nodes[i])))
    return group


def new_actor(role: Role, cpus: float, reservation: PlacementGroup, bundle: int) -> Any:
    """Create an actor of a role in one bundle; it starts when the bundle is reserved and free."""
    options: dict[str, Any] = {"max_concurrency": 10_000} if role.coroutines else {}
    actor: Any = ray.remote(HostedAsyncActor if role.coroutines else HostedActor).options(
        num_cpus=cpus,
        num_gpus=role.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(reservation, placement_group_bundle_index=bundle),
        **options,
    )
    return actor.remote(*role.hosted.split(":"))


def shared_gpus(learners: Sequence[Location], role: Role, number: int) -> str:
    """The GPUs of the learners that an actor of a role shares; they must be on one node."""
    each = len(learners) // role.count
    shared = learners[number * each : (number + 1) * each]
    if len({location.node for location in shared}) > 1:
        raise ClusterError(
            f"cluster.placement=colocated: the {each} GPUs of {role.name} {number} are on several nodes "
            f"({', '.join(sorted({location.host for location in shared}))}). Choose cluster.tensor_parallel so that it "
            "divides the GPUs of a node."
        )
    return ",".join(gpu for location in shared for gpu in location.gpu_ids)


def shared_cores(rank: Location, trained: Sequence[Location]) -> int:
    """The CPU cores of a rank: those of its node, divided by the ranks of all trained roles there; at least 1."""
    return max(1, rank.cores // sum(location.node == rank.node for location in trained))


def environment_of(role: str, config: TrainingProgramConfig, *, sockets: str | None) -> dict[str, str]:
    """The environment variables of an actor, which libraries read when they are imported.

    `sockets`: the folder for vLLM's sockets; None: its own choice.
    """
    environment = {
        "VLLM_LOGGING_LEVEL": config.logging.level.upper(),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if config.cluster.device == "cpu":
        environment |= {
            "DS_ACCELERATOR": "cpu",
            # Threads that spin at a barrier take the core that another process needs: on a busy machine an update
            # took ten times as long.
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if role == ENGINE:
            # vLLM compiles the ranks of log-probs, one sum, with inductor: 5 s of a start, 20 s without a cache.
            environment["TORCH_COMPILE_DISABLE"] = "1"
            # oneDNN keeps a kernel for each shape of a product, by default for 1,024: an engine grew by 700 MB.
            environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "64"
    if role == ENGINE and sockets:
        environment["VLLM_RPC_BASE_PATH"] = sockets
    if getattr(config.cluster, "placement", "") == "colocated":
        # vLLM's processes then receive pickled handles of GPU memory, which vLLM refuses by default.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    elif role != ENGINE and config.cluster.device == "cuda" and not os.environ.keys() & ALLOCATOR:
        # Microbatches differ in length, and this splits no memory. CUDA IPC, for shared GPUs, does not go with it.
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if config.run.deterministic and role == ENGINE:
        environment |= EQUAL_ROWS if config.cluster.device == "cpu" else {"VLLM_BATCH_INVARIANT": "1"}
    elif config.run.deterministic:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch asks for it when its algorithms are deterministic
    return environment
