"""A rollout worker in a Ray actor: what it is built from on its node, and the messages that it exchanges.

It imports no vLLM, and the driver does not import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Awaitable
from typing import Any

from rlhf.cluster.actors import wait_for
from rlhf.cluster.dispatch import Answer, FailedRequest, News, Order, Printed
from rlhf.cluster.engine_choice import EngineChoice, ListedEngines
from rlhf.cluster.reward_model import reward_model_client
from rlhf.cluster.worker_actors import WorkerParts
from rlhf.config.grpo import GRPOConfig
from rlhf.data.model_files import load_tokenizer
from rlhf.environments.start import StartedEnvironments
from rlhf.processes.code import Sources, changed_sources
from rlhf.rewards.grade import Grade
from rlhf.rewards.pool import shared_out
from rlhf.rewards.rubric import asked_rubrics
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.purpose import Purpose
from rlhf.rollout.worker import RolloutWorker
from rlhf.types import Prompt, RolloutGroup

NEWS_S = 5.0  # that an exchange waits for news before it says that there is none
MAX_CANCELLED = 1000  # tickets that are kept


class HostedWorker:
    """The worker, and what it starts on its node; `close` ends it.

    `config`: of the run, with this worker's share of `environment.processes` and the address of its endpoint.

    Raises ValueError if an environment or a grader cannot start, or its code is not that of the driver's node.
    """

    def __init__(self, config: GRPOConfig, parts: WorkerParts) -> None:
        self._news, self._has_news = deque[News](), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # open groups, by ticket
        self._cancelled = deque[int](maxlen=MAX_CANCELLED)  # tickets whose group had not begun, or has ended
        self._judge = parts.judge
        if os.path.isdir(parts.folder):
            os.chdir(parts.folder)
        _import_without_torch()
        tokenizer = load_tokenizer(config.model)
        with contextlib.ExitStack() as opened:
            rubrics = asked_rubrics(config.reward, self._ask_judge)
            reward = shared_out(config.reward, parts.workers_on_node)
            scorer = opened.enter_context(Scorer(reward, say=self._say, rubrics=rubrics))
            sources: dict[str, Sources] = {"reward": scorer.sources}
            warnings, self._environments = scorer.warnings, None
            if config.uses_environment_or_tools:
                self._environments = opened.enter_context(
                    StartedEnvironments(config, tokenizer, say=self._say, alone=parts.workers == 1)
                )
                sources["environment"] = self._environments.hosts.sources
                warnings += self._environments.warnings
            changed = [
                line for noun in sources for line in changed_sources(parts.sources[noun], sources[noun], noun=noun)
            ]
            if changed:
                raise ValueError(
                    f"{'; '.join(changed)} has changed since the run began, or differs from the copy on the node of "
                    "the driver. Put the code of the start of the run on all nodes."
                )
            self._end_processes = opened.pop_all().close
        for warning in warnings:
            self._say(f"warning: {warning}")
        deadline_s = config.request_deadline_s
        self._choice = EngineChoice(parts.number, deadline_s, lambda *report: self._put(FailedRequest(*report)))
        self._choice.update(*parts.engines)
        client = None
        if parts.scale is not None and config.reward_model is not None:
            client = reward_model_client(config, config.reward_model, parts.reward_models)
            client.mean, client.std = parts.scale
        self._worker = RolloutWorker(config, tokenizer, self._choice.generate, scorer, self._environments, client)

    # --- calls of the driver ---

    async def exchange(self, orders: bytes) -> bytes:
        """Take orders; return the news since the last exchange, as soon as there are some.

        Raises RuntimeError if the processes of environments cannot go on.
        """
        self._loop = asyncio.get_running_loop()
        await self.take(orders)
        if self._environments is not None:
            self._environments.hosts.call_soon(lambda: None)  # raises it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._news else NEWS_S):
                await self._has_news.wait()
        self._has_news.clear()
        return pickle.dumps([self._news.popleft() for _ in range(len(self._news))])

    async def take(self, orders: bytes) -> None:
        """Begin groups and cancel others; a cancellation may arrive first."""
        order: Order
        for order in pickle.loads(orders):
            if isinstance(order, int):
                if task := self._tasks.pop(order, None):
                    task.cancel()
                else:
                    self._cancelled.append(order)
            elif order[0] not in self._cancelled:
                self._tasks[order[0]] = asyncio.ensure_future(self._play(*order))

    async def update_engines(self, number: int, engines: ListedEngines, failure: str | None) -> None:
        self._choice.update(number, engines, failure)

    async def set_scale(self, mean: float, std: float) -> None:
        """Set mean and std of the reward model's scores."""
        if (client := self._worker.reward_model) is not None:
            client.mean, client.std = mean, std

    async def close(self) -> None:
        """Cancel open groups, which aborts their requests, and end every process."""
        tasks, self._tasks = [*self._tasks.values()], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._end_processes)

    # --- here ---

    async def _play(self, ticket: int, prompt: Prompt, purpose: Purpose) -> None:
        result: RolloutGroup | Exception
        try:
            result = await self._worker.rollout_group(prompt, purpose)
        except Exception as error:
            traceback.print_exc()  # into the log of this actor
            result = as_sent(error)
        except asyncio.CancelledError:
            if ticket not in self._tasks:  # the order of the driver, or the end
                raise
            result = RuntimeError(f"the sampling of prompt {prompt.id} was cancelled.")
        self._tasks.pop(ticket, None)
        self._put(Answer(ticket, result))

    def _say(self, line: str) -> None:
        self._put(Printed(line))

    def _put(self, news: News) -> None:
        """Keep news for the next exchange; from any thread."""
        self._news.append(news)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._has_news.set)

    def _ask_judge(self, options: str, job: dict[str, Any]) -> Awaitable[Grade | str]:
        """Grade by a rubric. The judge has its own limits of time."""
        return wait_for(self._judge.call.remote("grade", options, job), what="a rubric", deadline_s=math.inf)


def _import_without_torch() -> None:
    """Import transformers as if there were no torch: tokenizers need none, and it takes 350 MB and several seconds."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        importlib.import_module("transformers")
    finally:
        if sys.modules["torch"] is None:
            del sys.modules["torch"]


def as_sent(error: Exception) -> Exception:
    """The error, if pickling keeps its type and text; else a RuntimeError that has both as text."""
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
