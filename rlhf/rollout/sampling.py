"""How responses are sampled and cut, and what an engine's completion becomes; without vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhf.types import Prompt, Rollout, VersionSpan


@dataclass(frozen=True)
class Completion:
    """One sampled response: ids [R], their log-probabilities [R], and version spans over 0..R."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    version_spans: tuple[VersionSpan, ...]


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled.

    Attributes:
        stop: strings that end a response, besides the eos ids of the generation config.
        truncate_token: id of the token at which `truncate` cuts; None: responses are not cut.
    """

    temperature: float
    max_tokens: int
    stop: tuple[str, ...] = ()
    truncate_token: int | None = None
    truncate_after: int = 0


def truncate(completion: Completion, *, token: int, after: int) -> Completion:
    """Cut a completion after its first `token` at position `after` or later (as the code of arXiv:1909.08593 does).

    All remaining tokens were sampled from the policy, so they are trained on, and the finish reason becomes `stop`.
    A completion without such a token is returned unchanged.
    """
    positions = np.flatnonzero(completion.token_ids[after:] == token)
    if not len(positions):
        return completion
    end = after + int(positions[0]) + 1
    spans = (VersionSpan(s, min(e, end), version) for s, e, version in completion.version_spans if s < end)
    return Completion(completion.token_ids[:end], completion.logprobs[:end], "stop", tuple(spans))


def to_rollout(prompt: Prompt, sample: int, completion: Completion) -> Rollout:
    """Prompt and response as one row, id for id; nothing is tokenized again."""
    shift = len(prompt.token_ids)
    response = len(completion.token_ids)
    return Rollout(
        prompt_id=prompt.id,
        epoch=prompt.epoch,
        sample=sample,
        token_ids=np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int32),
        response_mask=np.concatenate([np.zeros(shift, bool), np.ones(response, bool)]),
        rollout_logprobs=np.concatenate([np.zeros(shift, np.float32), completion.logprobs.astype(np.float32)]),
        version_spans=tuple(VersionSpan(s + shift, e + shift, v) for s, e, v in completion.version_spans),
        finish_reason=completion.finish_reason,
    )
