"""A reward model in a separate process: conversations in, normalized scores out, batched by tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlhf.algo.packing import pack, pack_microbatches
from rlhf.config.grpo import GRPOConfig
from rlhf.config.reward_model import reward_model_record
from rlhf.config.sections import ModelConfig
from rlhf.learner.policy_model import DeviceTokens, check_packed
from rlhf.learner.value_model import RewardModel, load_scalar_transformer
from rlhf.types import World

Conversation = list[dict[str, str]]


class RewardScorer:
    """One copy of a reward model with its own tokenizer; hosted by a Ray actor.

    `token_ids`: (conversation, tokenizer) -> [L] int32, as in the model's training.
    """

    def __init__(self, run: GRPOConfig, world: World, token_ids: Callable[[Conversation, Any], np.ndarray]) -> None:
        from transformers import AutoTokenizer

        config, device = run.reward_model, run.cluster.device
        assert config is not None
        assert config.path is not None
        if device == "cpu":
            torch.set_num_threads(world.threads)
        self.device = torch.device(device)
        self.token_ids = token_ids
        self.tokenizer = AutoTokenizer.from_pretrained(config.path)
        model = ModelConfig(path=config.path, dtype=config.dtype)
        transformer = load_scalar_transformer(config.path, model, key="reward_model.path", new_head=None)
        self.longest = min(config.max_tokens_per_batch, int(transformer.config.max_position_embeddings))
        self.max_tokens = config.max_tokens_per_batch
        self.model = RewardModel(transformer).eval().requires_grad_(False).to(self.device)
        check_packed(self.model, self.device, dtype=config.dtype, key="reward_model.path", path=config.path)
        recorded = recorded_normalization(config.path)
        self.mean = recorded[0] if config.mean is None else config.mean
        self.std = recorded[1] if config.std is None else config.std

    def close(self) -> None:
        """Nothing to close: all resources end with the process."""

    @torch.no_grad()
    def score(self, conversations: list[Conversation]) -> list[float | None]:
        """(raw - mean) / std at the last token of each conversation; None for one that the model cannot hold."""
        ids = [self.token_ids(messages, self.tokenizer) for messages in conversations]
        fitting = [i for i, sequence in enumerate(ids) if len(sequence) <= self.longest]
        scores: list[float | None] = [None] * len(ids)
        lengths = np.array([len(ids[i]) for i in fitting], np.int64)
        (batches,) = pack_microbatches(lengths, max_tokens=self.max_tokens, shards=1)
        for batch in batches:
            if members := [fitting[i] for i in batch]:
                raw = self.model(DeviceTokens.of(pack([ids[i] for i in members]), self.device))
                for i, score in zip(members, raw.tolist(), strict=True):
                    scores[i] = (score - self.mean) / self.std
        return scores


def recorded_normalization(path: str) -> tuple[float, float]:
    """Mean and std recorded with the model; 0 and 1 if there are none."""
    record = reward_model_record(path)
    return float(record.get("mean", 0.0)), float(record.get("std", 1.0))
