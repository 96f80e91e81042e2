"""Ray: places engines and learners, starts them in parallel, connects them, and ends them.

Learners form one DeepSpeed world whose ranks on a node are neighbours. Engines are independent. `separate` gives each
its own GPUs; `colocated` puts engine i on the GPUs of learners i x tensor_parallel and on, and they take turns: the
engine sleeps while the learners work, and wakes for the new weights.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf import transfer
from rlhf.actors import (
    ActorGroup,
    ClusterError,
    HostedActor,
    HostedAsyncActor,
    Location,
    RemoteCall,
    wait_for,
)
from rlhf.config.ppo import PPOConfig
from rlhf.config.run import GRPOConfig
from rlhf.learner.messages import Place
from rlhf.plan import GPU, check_resources
from rlhf.ray_session import RaySession
from rlhf.rollout.sampling import EngineSettings, SamplingSettings
from rlhf.types import Prompt, Rollout

CPU_MEMORY_SHARE = 0.05  # of RAM; on CPU the KV cache has a key of its own, rollout.kv_cache_gib

HEALTH_PERIOD_S = 5.0
HEALTH_DEADLINE_S = 120.0
DEATH_NOTICE_S = 5  # how long after a failed transfer an engine may still be found dead

CRITIC_FOLDER = "critic"  # in a checkpoint


class Cluster:
    """Everything that runs outside the driver, from `ray.init` to the last process gone.

    Args:
        first_step: training steps done before this start; engines of a resumed run sample with other noise.
        trains: False starts engines alone, for an evaluation.
        compare_nodes: False lets nodes with other versions take part.
    """

    def __init__(
        self, config: GRPOConfig, *, first_step: int = 0, trains: bool = True, compare_nodes: bool = True
    ) -> None:
        self.config = config
        self.first_step = first_step
        self.trains = trains
        self.compare_nodes = compare_nodes
        self.learners: ActorGroup
        self.critics: ActorGroup  # of PPO
        self.reward_models: ActorGroup  # where the config names one by its path
        self.engines: ActorGroup
        self._placed: list[PlacementGroup] = []
        self._bundles: list[int] = []  # of the learners' placement group, by rank
        self._has_critics = trains and isinstance(config, PPOConfig)
        self._session = RaySession()
        self._asleep = False

    async def __aenter__(self) -> Cluster:
        try:
            await self._start()
        except BaseException as error:
            self._session.keep_logs(error, Path(self.config.run.dir))
            await self._stop()
            raise
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._session.keep_logs(error, Path(self.config.run.dir))
        await self._stop()

    # --- start ---

    async def _start(self) -> None:
        self._session.start(self.config.cluster.ray_address)
        if self.compare_nodes:
            await self._session.compare_nodes(deadline_s=self.config.cluster.start_deadline_s)
        check_resources(self.config, ray.cluster_resources(), trains=self.trains)
        starts = []
        locations: list[Location] = []
        if self.trains:
            self.learners = await self._create_ranks("learner", "rlhf.learner.worker:Learner")
            locations, self._bundles = await self._put_neighbours_together(self.learners)
            starts.append(self._build_ranks(self.learners, locations))
        if self._has_critics:
            self.critics = await self._create_ranks("critic", "rlhf.learner.critic:Critic")
            homes, _ = await self._put_neighbours_together(self.critics)
            starts.append(self._build_ranks(self.critics, homes))
        if self._has_reward_models:
            self.reward_models = await self._create_reward_models()
            starts.append(self._build_reward_models())
        self.engines = await self._create_engines()
        if self._shares_gpus:
            # An engine measures the memory that is free when it starts: first what stays there beside it.
            await asyncio.gather(*starts)
            await self._empty_caches()
            await self._build_engines(locations)
        else:
            # All kinds load in parallel: an engine takes longer than a learner, and neither needs the other for it.
            await asyncio.gather(*starts, self._build_engines(locations))
        if self.trains:
            await self._connect(locations[0])

    async def _create_ranks(self, name: str, kind: str) -> ActorGroup:
        """The actors of one DeepSpeed world."""
        config = self.config.cluster
        gpus = 1 if config.device == "cuda" else 0
        # On shared GPUs an engine has no bundle of its own: its CPUs are part of its first learner's.
        shared = config.cpus_per_engine if config.placement == "colocated" else 0.0
        bundle = {"CPU": config.cpus_per_learner + shared} | ({GPU: gpus} if gpus else {})
        placed = await self._place([bundle] * config.learners, f"{name}s")
        actors = [
            _remote(HostedActor, placed, rank, cpus=config.cpus_per_learner, gpus=gpus, kind=kind)
            for rank in range(config.learners)
        ]
        return ActorGroup(name, actors, deadline_s=config.step_deadline_s)

    async def _put_neighbours_together(self, group: ActorGroup) -> tuple[list[Location], list[int]]:
        """Reorder the ranks so that those of a node are neighbours; nodes keep the order of their first actor.

        Returns:
            Where the ranks are, and the bundle of each.
        """
        locations = await group.locate(deadline_s=self.config.cluster.start_deadline_s)
        nodes = list(dict.fromkeys(location.node for location in locations))
        bundles = sorted(range(len(locations)), key=lambda i: (nodes.index(locations[i].node), i))
        group.reorder(bundles, locations)
        return [locations[i] for i in bundles], bundles

    @property
    def _shares_gpus(self) -> bool:
        return self.trains and self.config.cluster.placement == "colocated"

    async def _empty_caches(self) -> None:
        """Memory that torch keeps for later goes back to the GPUs, which engines are about to use."""
        await self.learners.call("empty_cache")
        if self._has_critics:
            await self.critics.call("empty_cache")

    @property
    def _has_reward_models(self) -> bool:
        return self.trains and self.config.reward_model is not None and self.config.reward_model.path is not None

    async def _create_reward_models(self) -> ActorGroup:
        assert self.config.reward_model is not None
        config, copies = self.config.cluster, self.config.reward_model.replicas
        gpus = 1 if config.device == "cuda" else 0
        bundle = {"CPU": config.cpus_per_learner} | ({GPU: gpus} if gpus else {})
        placed = await self._place([bundle] * copies, "reward models")
        kind = "rlhf.learner.reward_scorer:RewardScorer"
        actors = [
            _remote(HostedActor, placed, copy, cpus=config.cpus_per_learner, gpus=gpus, kind=kind)
            for copy in range(copies)
        ]
        return ActorGroup("reward model", actors, deadline_s=config.step_deadline_s)

    async def _build_reward_models(self) -> None:
        config, copies = self.config.cluster, len(self.reward_models.actors)
        await self.reward_models.locate(deadline_s=config.start_deadline_s)
        arguments = (self.config.reward_model, config.device, config.threads_per_learner or 1)
        await self.reward_models.build(
            [self._environment()] * copies, [arguments] * copies, deadline_s=config.start_deadline_s
        )

    async def _create_engines(self) -> ActorGroup:
        config = self.config.cluster
        gpus = config.tensor_parallel if config.device == "cuda" and not self._shares_gpus else 0
        if self._shares_gpus:
            placed, bundles = self._placed[0], self._bundles[:: config.tensor_parallel]
        else:
            bundles = list(range(config.engines))
            bundle = {"CPU": config.cpus_per_engine} | ({GPU: gpus} if gpus else {})
            placed = await self._place([bundle] * config.engines, "engines")
        kind = "rlhf.rollout.engine:RolloutEngine"
        actors = [
            _remote(HostedAsyncActor, placed, index, cpus=config.cpus_per_engine, gpus=gpus, kind=kind)
            for index in bundles
        ]
        return ActorGroup("engine", actors, deadline_s=config.step_deadline_s)

    async def _place(self, bundles: list[dict[str, float]], what: str) -> PlacementGroup:
        placed = placement_group(bundles, strategy="PACK")
        self._placed.append(placed)
        available = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", GPU)}
        await wait_for(
            placed.ready(),
            what=f"resources for {len(bundles)} {what} of {bundles[0]} each, the whole cluster having {available}",
            deadline_s=self.config.cluster.start_deadline_s,
        )
        return placed

    async def _build_ranks(self, group: ActorGroup, locations: list[Location]) -> None:
        config = self.config.cluster
        ranks = config.learners * self.config.trained_worlds  # policy and critic compute at the same time
        threads = config.threads_per_learner or max(1, (os.cpu_count() or 1) // ranks)
        places = []
        for rank, location in enumerate(locations):
            before = sum(other.node == location.node for other in locations[:rank])
            # Ray shows a learner its own GPU alone, as device 0; on CPU ranks of a node are told apart by number.
            local_rank = 0 if location.gpu_ids else before
            places.append(Place(rank, len(locations), local_rank, locations[0].host, locations[0].port, threads))
        environments = [self._environment()] * len(places)
        await group.build(environments, [(self.config, place) for place in places], deadline_s=config.start_deadline_s)

    async def _build_engines(self, locations: list[Location]) -> None:
        config = self.config.cluster
        environments, settings = [], []
        for i in range(config.engines):
            environment = self._environment()
            if self._shares_gpus:
                environment["CUDA_VISIBLE_DEVICES"] = _shared_gpus(locations, i, config.tensor_parallel)
            environments.append(environment)
            settings.append((self._engine_settings(i),))
        await self.engines.build(environments, settings, deadline_s=config.start_deadline_s)

    def _engine_settings(self, i: int) -> EngineSettings:
        config = self.config
        on_cpu = config.cluster.device == "cpu"
        return EngineSettings(
            model=config.model.path,
            dtype=config.model.dtype,
            seed=_engine_seed(config.run.seed, engine=i, first_step=self.first_step),
            max_model_len=config.max_sequence_tokens,
            max_concurrent_sequences=config.rollout.max_concurrent_sequences,
            tensor_parallel=config.cluster.tensor_parallel,
            gpu_memory_utilization=CPU_MEMORY_SHARE if on_cpu else config.rollout.gpu_memory_utilization,
            enforce_eager=config.rollout.enforce_eager or on_cpu,
            transfer_backend=self.transfer_backend,
            keep_kv=config.rollout.on_weight_update == "keep_kv",
            sleep_mode=config.cluster.placement == "colocated",
            trust_remote_code=config.model.trust_remote_code,
        )

    def _environment(self) -> dict[str, str]:
        level = self.config.logging.level.upper()
        environment = {
            "VLLM_LOGGING_LEVEL": level,
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        if self.config.cluster.device == "cpu":
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self.config.rollout.kv_cache_gib),
                "DS_ACCELERATOR": "cpu",
                # Threads that spin at a barrier hold the core that another process needs: on a busy machine an update
                # took ten times as long.
                "OMP_WAIT_POLICY": "PASSIVE",
                "CUDA_VISIBLE_DEVICES": "",
            }
        if self._session.temp:
            environment["VLLM_RPC_BASE_PATH"] = self._session.temp  # its sockets go away with this folder
        if self.transfer_backend == "ipc":
            # Handles of GPU memory reach vLLM's processes pickled, which it does not take otherwise.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return environment

    # --- to and from disk ---

    async def save(self, folder: Path) -> None:
        """Weights and optimizer state of every trained module."""
        await self.learners.call("save", str(folder.resolve()))
        if self._has_critics:
            (folder / CRITIC_FOLDER).mkdir()
            await self.critics.call("save", str((folder / CRITIC_FOLDER).resolve()))

    async def load(self, folder: Path, step: int) -> None:
        """Put back what `save` wrote after `step` training steps."""
        await self.learners.call("load", str(folder.resolve()), self.config.updates_before(step))
        if isinstance(self.config, PPOConfig):
            updates = step * self.config.critic_updates_per_step
            await self.critics.call("load", str((folder / CRITIC_FOLDER).resolve()), updates)

    # --- weights and samples ---

    @property
    def transfer_backend(self) -> str:
        if self.config.cluster.device == "cpu":
            return transfer.BACKEND
        return "ipc" if self.config.cluster.placement == "colocated" else "nccl"

    async def _connect(self, sender: Location) -> None:
        config = self.config.cluster
        port = (await self.learners.locate(deadline_s=config.start_deadline_s))[0].port
        engine_nodes = {place.node for place in await self.engines.locate(deadline_s=config.start_deadline_s)}
        rendezvous = transfer.Rendezvous(
            host=sender.host,
            port=port,
            tag="weights",
            world_size=1 + config.engines * config.tensor_parallel,
            timeout_s=config.start_deadline_s,
            one_node=engine_nodes == {sender.node},
        )
        client = transfer.EngineClient(
            RemoteCall(self.engines.actors), engines=config.engines, workers_per_engine=config.tensor_parallel
        )
        await self.learners.call(
            "connect", self.transfer_backend, client, rendezvous, deadline_s=config.start_deadline_s
        )

    async def send_weights(self, version: int) -> None:
        """Learners -> engines, in flight: running requests are frozen, the weights change, the requests go on."""
        if self._asleep:
            await self._empty_caches()
            await self.engines.call("wake_up", ["weights"])
        await self.engines.call("pause")
        await self._while_engines_live(self.learners.call("send_weights", version))
        if self._asleep:
            await self.engines.call("wake_up", ["kv_cache"])
            self._asleep = False
        await self.engines.call("resume")

    async def _while_engines_live(self, sending: Awaitable[Any]) -> None:
        """Wait for a transfer, and end the wait as soon as an engine is dead: the other end would wait for it.

        A transfer that fails because an engine died is that engine's failure, whatever the learner saw of it.
        """
        task = asyncio.ensure_future(sending)
        while not task.done():
            await asyncio.wait({task}, timeout=HEALTH_PERIOD_S)
            if not task.done():
                await self._check_engines()
        if task.exception() is not None:
            for _ in range(DEATH_NOTICE_S):  # the learner may hear of a death before the engine itself does
                await self._check_engines()
                await asyncio.sleep(1)
        await task

    async def _check_engines(self) -> None:
        await self.engines.call("check_health", deadline_s=HEALTH_DEADLINE_S)

    async def yield_gpus(self) -> None:
        """Before the learners work: engines on the same GPUs give their memory back until the next weights come."""
        if self.config.cluster.placement == "colocated" and not self._asleep:
            await self.engines.call("sleep")
            self._asleep = True

    async def sample_group(
        self, engine: int, prompt: Prompt, samples: int, settings: SamplingSettings
    ) -> list[Rollout]:
        ref = self.engines.actors[engine].call.remote("sample_group", prompt, samples, settings)
        found: list[Rollout] = await wait_for(
            ref,
            what=f"engine {engine}, sampling {prompt.id}",
            deadline_s=self.engines.deadline_s,
            homes=self.engines.homes,
        )
        return found

    async def score_conversations(self, copy: int, conversations: list[list[dict[str, str]]]) -> list[float | None]:
        """Scores of one copy of the reward model."""
        ref = self.reward_models.actors[copy].call.remote("score", conversations)
        found: list[float | None] = await wait_for(
            ref,
            what=f"reward model {copy}, {len(conversations)} responses",
            deadline_s=self.reward_models.deadline_s,
            homes=self.reward_models.homes,
        )
        return found

    # --- end ---

    async def _stop(self) -> None:
        if ray.is_initialized():
            ends = {"engines": "shutdown", "learners": "close", "critics": "close"}
            groups = {name: vars(self)[name] for name in ends if name in vars(self)}
            await asyncio.gather(*(group.end(ends[name]) for name, group in groups.items()))
            for placed in self._placed:
                remove_placement_group(placed)
        self._session.stop()


def _remote(cls: type, placed: PlacementGroup, bundle: int, *, cpus: float, gpus: float, kind: str) -> Any:
    module, name = kind.split(":")
    options: dict[str, Any] = {"max_concurrency": 10_000} if cls is HostedAsyncActor else {}
    actor: Any = ray.remote(cls).options(
        num_cpus=cpus,
        num_gpus=gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=bundle),
        **options,
    )
    return actor.remote(module, name)


def _shared_gpus(locations: list[Location], engine: int, tensor_parallel: int) -> str:
    """The GPUs of the learners that an engine shares; they must be of one node."""
    learners = locations[engine * tensor_parallel : (engine + 1) * tensor_parallel]
    if len({location.node for location in learners}) > 1:
        raise ClusterError(
            f"cluster.placement=colocated: the {tensor_parallel} GPUs of engine {engine} are on several nodes "
            f"({', '.join(sorted({location.host for location in learners}))}). Choose cluster.tensor_parallel so that "
            "it divides the GPUs of a node."
        )
    return ",".join(gpu for location in learners for gpu in location.gpu_ids)


def _engine_seed(seed: int, *, engine: int, first_step: int) -> int:
    """Engines sample differently from each other, and a resumed run does not repeat the noise of its first part."""
    return int(np.random.SeedSequence([seed, engine, first_step]).generate_state(1)[0]) & 0x7FFFFFFF
