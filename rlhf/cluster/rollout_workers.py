"""The rollout workers of a run as the driver uses them: one in its own process, or actors on the nodes with engines.

    states of a worker that is an actor (`_keep`)
        served    gets groups (`dispatch`)
        lost      it died, or was silent: its groups go to other workers
        started   a new actor takes its place (`worker_actors`); if that fails, the run goes on with the others

If no worker is left, or one was lost too often between two transfers, the run ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from rlhf.check.resources import quantity
from rlhf.cluster.dispatch import Dispatcher, FailedRequest, Printed
from rlhf.cluster.engines import Engines
from rlhf.cluster.reward_model import reward_model_client
from rlhf.cluster.worker_actors import WORKER, WorkerActors
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import REWARD_MODEL
from rlhf.environments.start import StartedEnvironments
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.purpose import Purpose
from rlhf.rollout.worker import RolloutWorker
from rlhf.types import Prompt, RolloutGroup


class RolloutWorkers:
    """Turns prompts into graded groups. An async context.

    Args:
        scorer, environments: started in this process, for the checks before a run. Worker actors start their own; both
            are then closed here.
        say: gets lines that environments and graders print, and warnings.
        check: gets each graded group; what it raises, `rollout_group` raises.

    Attributes:
        local: the worker of this process; None if they are actors.
        reward_model: the client of this process, which measures the scale of the scores.
    """

    def __init__(
        self,
        engines: Engines,
        config: GRPOConfig,
        tokenizer: Any,
        scorer: Scorer,
        environments: StartedEnvironments | None,
        *,
        say: Callable[[str], None],
        check: Callable[[RolloutGroup], None],
    ) -> None:
        self._engines, self._cluster, self._config, self._tokenizer = engines, engines.cluster, config, tokenizer
        self._scorer, self._environments, self._say, self._check = scorer, environments, say, check
        # an evaluation alone starts no reward model
        model = config.reward_model if self._cluster.trains else None
        self._reward_models = self._cluster.group(REWARD_MODEL) if model is not None and model.path else None
        self.reward_model = None if model is None else reward_model_client(config, model, self._reward_models)
        self.local: RolloutWorker | None = None
        self._actors: WorkerActors | None = None
        self._dispatcher = Dispatcher(self._hear)
        self._warned = {*scorer.warnings, *(environments.warnings if environments else ())}
        self._lost, self._version = Counter[int](), 0  # losses of each worker since the weights of this version
        self._given_up = set[int]()
        self._tasks: list[asyncio.Task[None]] = []

    async def rollout_group(self, prompt: Prompt, purpose: Purpose) -> RolloutGroup:
        """Sample and grade the group of a prompt. Raises what its worker raises; the loss of a worker costs time."""
        group = await (self.local or self._dispatcher).rollout_group(prompt, purpose)
        self._check(group)
        return group

    def set_scale(self, mean: float, std: float) -> None:
        """Set mean and std of the reward model's scores, for all workers."""
        assert self.reward_model is not None
        self.reward_model.mean, self.reward_model.std = mean, std
        if self._actors is not None:
            self._actors.set_scale(mean, std)

    async def __aenter__(self) -> Self:
        nodes, choice = self._cluster.rollout_worker_nodes(), self._engines.choice
        if not nodes:
            self.local = RolloutWorker(
                self._config, self._tokenizer, choice.generate, self._scorer, self._environments, self.reward_model
            )
            return self
        sources = {"reward": self._scorer.sources}
        if self._environments is not None:
            sources["environment"] = self._environments.hosts.sources
            await asyncio.to_thread(self._environments.close)
        await asyncio.to_thread(self._scorer.close)
        self._actors = WorkerActors(self._engines, self._config, sources, self._reward_models)
        if self.reward_model is not None:
            self._actors.set_scale(self.reward_model.mean, self.reward_model.std)
        with self._cluster.watch_stage(quantity(len(nodes), WORKER)):
            await self._actors.start(nodes)
        self._tasks = [self._cluster.background(self._keep(self._actors, rank)) for rank in range(len(nodes))]
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        await self.stop_replacing()
        if self._actors is not None and error is None:  # else they end with the cluster, which keeps their logs
            await self._actors.end()

    async def stop_replacing(self) -> None:
        """Stop serving and replacing worker actors, since nothing more is sampled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, actors: WorkerActors, rank: int) -> None:
        """Serve a worker, and start it again whenever it is lost."""
        while True:
            lost = await self._dispatcher.serve(
                actors.node(rank), partial(actors.exchange, rank), partial(actors.send, rank)
            )
            if not self._may_restart(rank):
                self._cluster.end_with(lost.error)
                return
            error = " ".join(str(lost.error).split()).rstrip(".")
            groups = quantity(lost.groups, "open group")
            self._say(f"warning: {error}. Its {groups} began anew; the worker is started again.")
            try:
                await actors.start_again(rank)
            except Exception as error:
                self._given_up.add(rank)
                if len(self._given_up) == len(self._tasks):
                    self._cluster.end_with(error)
                else:
                    self._say(f"warning: the run goes on without {WORKER} {rank}: {error}")
                return
            self._say(f"{WORKER} {rank} runs again on node {actors.node(rank)}")

    def _may_restart(self, rank: int) -> bool:
        """Count the loss of a worker; each starts again at most `run.max_restarts` times between two transfers."""
        if self._version != self._engines.version:
            self._lost, self._version = Counter(), self._engines.version
        self._lost[rank] += 1
        return self._lost[rank] <= self._config.run.max_restarts

    def _hear(self, node: str, news: Printed | FailedRequest) -> None:
        match news:
            case FailedRequest():
                self._engines.recovery.report(*news)
            case Printed(line) if line.startswith("warning: "):
                self._warn(node, line.removeprefix("warning: "))
            case Printed(line):
                self._say(self._of(node) + line)

    def _warn(self, node: str, warning: str) -> None:
        """Print a warning of a worker; each text once, whichever worker has it."""
        if warning not in self._warned:
            self._warned.add(warning)
            self._say(f"warning: {self._of(node)}{warning}")

    def _of(self, node: str) -> str:
        return f"node {node}: " if self._actors is not None and self._actors.several_nodes else ""
