"""Scores responses with a reward model. Responses that arrive while all copies are busy form the next batch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
from collections.abc import Awaitable, Callable, Sequence

from rlhf.config.reward import FLOAT32_MAX, MODEL_PART
from rlhf.config.reward_model import RewardModelConfig
from rlhf.processes.returned import read_scores
from rlhf.rewards.grade import NOT_JUDGED, OK
from rlhf.rewards.http_client import HttpClient
from rlhf.types import Prompt, RolloutGroup, ScoredRollout

Conversation = list[dict[str, str]]
Score = Callable[[list[Conversation]], Awaitable[list[float | None]]]


def conversation(prompt: Prompt, response: str, opening: Sequence[dict[str, str]] | None = None) -> Conversation:
    """The messages that a reward model scores: the prompt (or `opening` in its place) and the response."""
    return [*(prompt.messages if opening is None else opening), {"role": "assistant", "content": response}]


class RewardModelClient:
    """Adds the score of a reward model to graded groups.

    Args:
        scorers: one per copy of the model: conversations -> scores. None, or a score beyond float32, means unscorable.
        weight: factor of the score in the reward.
        by_group: send each group alone, so that the rounding of a score does not depend on the other groups.
    """

    def __init__(self, scorers: Sequence[Score], *, weight: float, by_group: bool = False) -> None:
        self._weight = weight
        self.mean, self.std = 0.0, 1.0  # of the raw scores; `normalize_on` measures them
        self._by_group = by_group
        self._waiting: list[list[tuple[Conversation, asyncio.Future[float | None]]]] = []  # by group
        self._free = list(scorers)
        self._tasks: set[asyncio.Task[None]] = set()

    async def add_to(self, group: RolloutGroup) -> RolloutGroup:
        """Add the weighted score to each reward. A response without a score becomes unscorable."""
        scores = await self._scores(
            [conversation(group.prompt, sample.text, sample.rollout.opening) for sample in group.samples]
        )
        samples = tuple(self._add(sample, score) for sample, score in zip(group.samples, scores, strict=True))
        return RolloutGroup(group.prompt, samples)

    async def normalize_on(self, conversations: list[Conversation]) -> None:
        """Give all later scores mean 0 and variance 1 over these conversations (arXiv:1909.08593, sec. 2.1).

        Raises RuntimeError if fewer than two of them have a score, or all have the same score.
        """
        scores = [score for score in await self._scores(conversations) if score is not None]
        if not scores or min(scores) == max(scores):
            raise RuntimeError(
                f"reward_model.reference_samples={len(conversations)}: {len(scores)} responses of the start policy "
                "have a score, and all the same one, so there is no variance to divide by. Sample more, or set "
                "reward_model.mean and reward_model.std."
            )
        self.mean, self.std = statistics.fmean(scores), statistics.pstdev(scores)

    async def _scores(self, conversations: list[Conversation]) -> list[float | None]:
        """The raw score of each conversation; None if it has none."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[float | None]] = [loop.create_future() for _ in conversations]
        self._waiting.append(list(zip(conversations, futures, strict=True)))
        self._start()
        # one NaN in the mean would make every advantage of the step NaN
        return [s if s is not None and abs(s) <= FLOAT32_MAX else None for s in await asyncio.gather(*futures)]

    def _add(self, sample: ScoredRollout, score: float | None) -> ScoredRollout:
        score = None if score is None else (score - self.mean) / self.std
        parts = {**sample.reward_parts, MODEL_PART: score}
        if sample.status == NOT_JUDGED and score is not None:  # only the reward model judges this response
            return dataclasses.replace(sample, reward=self._weight * score, reward_parts=parts, status=OK)
        reward = None if sample.reward is None or score is None else sample.reward + self._weight * score
        return dataclasses.replace(sample, reward=reward, reward_parts=parts)

    def _start(self) -> None:
        while self._free and self._waiting:
            groups = 1 if self._by_group else len(self._waiting)
            batch = [pair for group in self._waiting[:groups] for pair in group]
            self._waiting = self._waiting[groups:]
            task = asyncio.ensure_future(self._run(self._free.pop(), batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, scorer: Score, batch: list[tuple[Conversation, asyncio.Future[float | None]]]) -> None:
        try:
            scores = await scorer([conversation for conversation, _ in batch])
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)
        except Exception as error:  # raised in the caller that waits for the scores
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        self._free.append(scorer)
        self._start()


def endpoint_scorer(config: RewardModelConfig) -> Score:
    """A scorer that asks the endpoint of the config over HTTP."""
    assert config.endpoint is not None
    client = HttpClient(
        "reward_model.", "endpoint", config.endpoint,
        timeout_s=config.timeout_s, retries=config.retries, at_once=config.replicas,
    )  # fmt: skip
    mean, std = config.mean or 0.0, config.std or 1.0

    async def score(conversations: list[Conversation]) -> list[float | None]:
        def read(reply: bytes) -> list[float | None]:
            values = json.loads(reply)["scores"]
            scores = read_scores(values, len(conversations), finite=False, booleans=False)
            usable = (s if s is not None and abs(s) <= FLOAT32_MAX else None for s in scores)
            return [None if score is None else (score - mean) / std for score in usable]

        return await client.ask(json.dumps({"conversations": conversations}).encode(), read)

    return score
