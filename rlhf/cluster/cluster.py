"""The roles of a run on Ray: starts all of them, connects learners and engines, moves weights and samples, ends all.

`separate` gives each role its own GPUs. `colocated` puts engine i on the GPUs of learners i x tensor_parallel to
(i + 1) x tensor_parallel - 1, and critic i on that of learner i. They take turns:

    sample   engines awake; of learners and critics only the weights
    train    engines asleep; policy and critic one after the other, each brings back its state when it updates
    send     states leave, engines wake without their cache, the weights are sent, buffers are freed, the cache wakes
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from ray.util.placement_group import remove_placement_group

from rlhf.cluster.actors import ActorGroup, Location, start_call
from rlhf.cluster.heartbeat import Heartbeat
from rlhf.cluster.placement import Placed, create, shared_gpus
from rlhf.cluster.rank_group import RankGroup
from rlhf.cluster.session import RaySession
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import CRITIC, ENGINE, LEARNER, REWARD_MODEL, Role
from rlhf.learner.rank_place import Place
from rlhf.plan import check_resources
from rlhf.plan.shared_gpus import check_shared_gpus
from rlhf.rollout.requests import SamplingSettings
from rlhf.types import Prompt, Rollout, WrittenFile
from rlhf.weights import transfer

HEALTH_PERIOD_S = 5.0
HEALTH_DEADLINE_S = 120.0
FIRST_POLL_S, LAST_POLL_S = 0.05, 2.0  # between questions whether a checkpoint is written
ENGINE_DEATH_NOTICE_S = 30  # after a failed transfer; vLLM hears of a dead worker within 5 s, later on busy cores


class Cluster:
    """Everything that runs outside the driver, from `ray.init` until the last process is gone.

    Args:
        first_step: training steps done before this start; a resumed run samples with new noise.
        trains: False starts only the engines, for an evaluation.
        compare_nodes: False lets nodes with other versions take part.
    """

    def __init__(
        self, config: GRPOConfig, *, first_step: int = 0, trains: bool = True, compare_nodes: bool = True
    ) -> None:
        self.config = config
        self._compare_nodes = compare_nodes
        self.first_step = first_step
        self.trains = trains
        self.roles = config.roles(trains=trains)
        self._placed: dict[str, Placed] = {}  # by role
        self._session = RaySession()
        self._shares_gpus = trains and config.cluster.placement == "colocated"
        self._asleep = False
        self._heartbeat: asyncio.Task[None] | None = None
        self._saving = Path()

    def group(self, role: str) -> ActorGroup:
        """The actors of a role."""
        return self._placed[role].group

    @property
    def learners(self) -> RankGroup:
        return cast(RankGroup, self.group(LEARNER))

    @property
    def critics(self) -> RankGroup:
        return cast(RankGroup, self.group(CRITIC))

    @property
    def engines(self) -> ActorGroup:
        return self.group(ENGINE)

    def trained(self) -> Mapping[str, RankGroup]:
        """The ranks of each trained role, by its name."""
        return {role.name: cast(RankGroup, self.group(role.name)) for role in self.roles if role.training is not None}

    async def __aenter__(self) -> Cluster:
        try:
            await self._start()
            groups = [placed.group for placed in self._placed.values()]
            self._heartbeat = asyncio.ensure_future(Heartbeat(groups).watch())
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
        config = self.config.cluster
        self._session.start(config.ray_address)
        if self._compare_nodes:
            await self._session.compare_nodes(deadline_s=config.start_deadline_s)
        check_resources(self.config, ray.cluster_resources(), trains=self.trains)
        roles = {role.name: role for role in self.roles}
        guests = [roles.pop(name) for name in (CRITIC, ENGINE) if name in roles] if self._shares_gpus else []
        # Every creation ends before the first failure is raised: none may go on while the rest is stopped.
        starts = (self._create(role, guests if role.name == LEARNER else ()) for role in roles.values())
        created = await asyncio.gather(*starts, return_exceptions=True)
        for failure in created:
            if failure is not None:
                raise failure
        for guest in guests:
            self._placed[guest.name] = await create(guest, config, learners=self._placed[LEARNER])
        if self._shares_gpus:
            await self._build_one_after_another()
        else:
            # All roles load in parallel: none needs another to load, and an engine takes the longest.
            await asyncio.gather(*(self._build(role.name) for role in self.roles))
        if self.trains:
            await self._connect()

    async def _create(self, role: Role, guests: Sequence[Role]) -> None:
        self._placed[role.name] = await create(role, self.config.cluster, guests=guests)

    async def _build_one_after_another(self) -> None:
        """Load the roles that share GPUs. An engine takes the memory that is free when it starts, so it comes last."""
        for role in self.roles:
            if role.name == ENGINE:
                measured = {name: await ranks.call("gpu_memory") for name, ranks in self.trained().items()}
                for warning in check_shared_gpus(self.config, measured):
                    print(warning, file=sys.stderr, flush=True)
            await self._build(role.name)
            if role.training is not None:
                await self._leave_gpus(role.name)

    async def _build(self, role: str) -> None:
        """Construct the hosted objects of a role."""
        placed, config = self._placed[role], self.config.cluster
        environments = [self._environment() for _ in placed.locations]
        arguments: list[tuple[Any, ...]]
        if placed.role.training is not None:
            arguments = [(self.config, place) for place in self._places(placed.locations)]
        elif role == REWARD_MODEL:
            arguments = [(self.config.reward_model, config.device, config.threads_per_learner or 1)] * placed.role.count
        else:
            seeds = [_engine_seed(self.config.run.seed, i, self.first_step) for i in range(placed.role.count)]
            arguments = [(self.config, seed, self.transfer_backend) for seed in seeds]
        if role in (CRITIC, ENGINE) and self._shares_gpus:
            for i, environment in enumerate(environments):
                gpus = shared_gpus(self._placed[LEARNER].locations, placed.role, i)
                environment["CUDA_VISIBLE_DEVICES"] = gpus
        await placed.group.build(environments, arguments, deadline_s=config.start_deadline_s)

    def _places(self, locations: list[Location]) -> list[Place]:
        """The place of each rank of one world; ranks of a node are neighbours."""
        config, worlds = self.config.cluster, len(self.trained())
        # policy and critic compute at the same time
        threads = config.threads_per_learner or max(1, (os.cpu_count() or 1) // (config.learners * worlds))
        places = []
        for rank, location in enumerate(locations):
            before = sum(other.node == location.node for other in locations[:rank])
            # A learner sees only its own GPU, as device 0; on CPU the ranks of a node are numbered.
            local_rank = 0 if config.device == "cuda" else before
            on_node = sum(other.node == location.node for other in locations)
            meeting = locations[0]
            places.append(Place(rank, len(locations), local_rank, meeting.host, meeting.port, threads, on_node))
        return places

    async def _leave_gpus(self, *roles: str) -> None:
        """Make room on shared GPUs: these roles, or all that are trained, keep only their weights there."""
        for role in roles or self.trained():
            await self.group(role).call("leave_gpu", self.config.cluster.offload_while_sampling)

    async def together(self, calls: Mapping[str, Coroutine[Any, Any, Any]]) -> list[Any]:
        """Calls on trained roles, by role: at the same time, or on shared GPUs one after another."""
        if not self._shares_gpus:
            return list(await asyncio.gather(*calls.values()))
        results = []
        for role, call in calls.items():
            results.append(await call)
            await self._leave_gpus(role)
        return results

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
                # Threads that spin at a barrier take the core that another process needs: on a busy machine an update
                # took ten times as long.
                "OMP_WAIT_POLICY": "PASSIVE",
                "CUDA_VISIBLE_DEVICES": "",
            }
        if self._session.temp:
            environment["VLLM_RPC_BASE_PATH"] = self._session.temp  # its sockets are deleted with this folder
        if self.transfer_backend == "ipc":
            # vLLM's processes get handles of GPU memory pickled, which vLLM refuses by default.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return environment

    # --- to and from disk ---

    async def checkpoint_bytes(self) -> int:
        """What `save` will write, over all ranks."""
        return sum([sum(await ranks.call("checkpoint_bytes")) for ranks in self.trained().values()])

    async def save(self, folder: Path) -> None:
        """Begin to write weights and optimizer state of every trained role; `saved` waits for the end."""
        self._saving = folder
        for name, ranks in self.trained().items():
            await ranks.call("save", str(_folder_of(name, folder, make=True)))

    async def saved(self) -> dict[str, WrittenFile]:
        """Wait until every rank has written what `save` began.

        Returns:
            The files by path in the folder.

        Raises:
            OSError: what the disk refused, of the first rank; no rank is writing any more.
        """
        files: dict[str, WrittenFile] = {}
        errors, wait_s = [], FIRST_POLL_S
        for role in self.roles:
            if role.training is None:
                continue
            ranks = self.group(role.name)
            deadline_s = ranks.deadline_s * (1 + role.training.epochs_per_step)  # a rank answers after its update
            while None in (reports := await ranks.call("saved", deadline_s=deadline_s)):
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_POLL_S)
            below = _folder_of(role.name, self._saving).relative_to(self._saving.resolve())
            for report in reports:
                files |= {(below / file).as_posix(): written for file, written in report.files.items()}
                errors += [report.error] if report.error else []
        if errors:
            raise OSError(errors[0])
        return files

    async def load(self, folder: Path) -> None:
        """Put back what `save` wrote; colocated engines sleep afterwards."""
        await self.sleep_colocated_engines()
        for name, ranks in self.trained().items():
            await ranks.call("load", str(_folder_of(name, folder)))

    # --- weights and samples ---

    @property
    def transfer_backend(self) -> str:
        if self.config.cluster.device == "cpu":
            return transfer.BACKEND
        return "ipc" if self.config.cluster.placement == "colocated" else "nccl"

    async def _connect(self) -> None:
        config = self.config.cluster
        # Located again, for a port that is free now.
        sender, *_ = await self.learners.locate(deadline_s=config.start_deadline_s)
        engine_nodes = {location.node for location in self._placed[ENGINE].locations}
        rendezvous = transfer.Rendezvous(
            host=sender.host,
            port=sender.port,
            world_size=1 + config.engines * config.tensor_parallel,
            timeout_s=config.start_deadline_s,
            one_node=engine_nodes == {sender.node},
        )
        call = partial(start_call, self.engines.actors)
        client = transfer.EngineClient(call, engines=config.engines, workers_per_engine=config.tensor_parallel)
        await self.learners.call(
            "connect", self.transfer_backend, client, rendezvous, deadline_s=config.start_deadline_s
        )

    async def send_weights(self, version: int) -> None:
        """Learners -> engines, in flight: running requests pause, the weights change, the requests continue.

        Colocated engines have none; they sleep until the weights come, so that the KV cache leaves room for buffers.
        """
        await self.sleep_colocated_engines()
        if self._asleep:
            await self._leave_gpus()
            await self.engines.call("wake_up", ["weights"])
        await self.engines.call("pause")
        await self._while_engines_live(self.learners.call("send_weights", version))
        if self._asleep:
            await self._leave_gpus()  # without the buffers of the transfer
            await self.engines.call("wake_up", ["kv_cache"])
            self._asleep = False
        await self.engines.call("resume")

    async def _while_engines_live(self, sending: Awaitable[Any]) -> None:
        """Wait for a transfer, and stop waiting when an engine is dead: the sender alone would wait for its deadline.

        If the transfer fails, the engines are checked first: a dead engine is the cause, not the learner's error.
        """
        task = asyncio.ensure_future(sending)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=HEALTH_PERIOD_S)
                if not task.done():
                    await self._check_engines()
            if task.exception() is not None:
                for _ in range(ENGINE_DEATH_NOTICE_S):  # the learner may notice a death before the engine does
                    await self._check_engines()
                    await asyncio.sleep(1)
            await task
        finally:
            task.cancel()

    async def _check_engines(self) -> None:
        await self.engines.call("check_health", deadline_s=HEALTH_DEADLINE_S)

    async def sleep_colocated_engines(self) -> None:
        """Before the learners work: engines on the same GPUs free their memory until the next weights arrive."""
        if self.config.cluster.placement == "colocated" and not self._asleep:
            await self.engines.call("sleep")
            self._asleep = True

    async def sample_group(
        self, engine: int, prompt: Prompt, samples: int, settings: SamplingSettings
    ) -> list[Rollout]:
        rollouts: list[Rollout] = await self.engines.call_one(
            engine, "sample_group", prompt, samples, settings, what=f"sampling {prompt.id}"
        )
        return rollouts

    async def score_conversations(self, copy: int, conversations: list[list[dict[str, str]]]) -> list[float | None]:
        """Scores from one copy of the reward model."""
        scores: list[float | None] = await self.group(REWARD_MODEL).call_one(
            copy, "score", conversations, what=f"{len(conversations)} responses"
        )
        return scores

    # --- end ---

    async def _stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if ray.is_initialized():
            await asyncio.gather(*(placed.group.end() for placed in self._placed.values()))
            for placed in self._placed.values():
                if placed.bundles is not None:
                    remove_placement_group(placed.bundles)
        self._session.stop()


def _folder_of(role: str, checkpoint: Path, *, make: bool = False) -> Path:
    """The policy's files are in the checkpoint itself, those of another role in a folder of its name."""
    folder = checkpoint.resolve() if role == LEARNER else checkpoint.resolve() / role
    if make:
        folder.mkdir(exist_ok=True)
    return folder


def _engine_seed(seed: int, engine: int, first_step: int) -> int:
    """Engines sample differently from each other, and a resumed run does not repeat the noise of its first part."""
    return int(np.random.SeedSequence([seed, engine, first_step]).generate_state(1)[0]) & 0x7FFFFFFF
