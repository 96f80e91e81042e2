"""The tokens of one rollout in one context: sampled turns, and the answers of an environment between them.

    prompt | sampled | said | sampled | said | sampled          one sequence; the mask is True at `sampled`

Ids are only appended. Sampled tokens are neither rendered nor tokenized again.
"""

from __future__ import annotations

import numpy as np

from rlhf.sampling.requests import Completion
from rlhf.types import Support, TokenSequence, VersionSpan


class TokenLog:
    """The log of a rollout; it starts with the prompt [P]."""

    def __init__(self, prompt_ids: np.ndarray) -> None:
        self._ids = [np.asarray(prompt_ids, np.int32)]
        self._logprobs = [np.zeros(len(prompt_ids), np.float32)]
        self._mask = [np.zeros(len(prompt_ids), bool)]
        self._supports: list[tuple[Support | None, int]] = [(None, len(prompt_ids))]
        self._experts: list[np.ndarray] = []
        self._spans: list[VersionSpan] = []
        self._prompt_length = self._length = len(prompt_ids)

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> np.ndarray:
        """[L] int32, all tokens, which the engine continues."""
        self._ids = [np.concatenate(self._ids)]
        return self._ids[0]

    @property
    def last_id(self) -> int:
        """The last token; after a turn that stopped by itself, its end-of-sequence id."""
        return int(next(ids[-1] for ids in reversed(self._ids) if len(ids)))

    def room(self, limit: int) -> int:
        """The number of tokens that may still be added if at most `limit` may follow the prompt."""
        return max(0, limit - (self._length - self._prompt_length))

    @property
    def recorded(self) -> int:
        """The number of first tokens whose experts are known; an engine need not return them again."""
        return sum(map(len, self._experts))

    def add_sampled(self, completion: Completion) -> None:
        """Append a turn of the policy, with its log-probs, versions, support and experts.

        If two turns have experts for a token, those of the earlier turn count: it sampled with them.
        """
        spans = (VersionSpan(s + self._length, e + self._length, v) for s, e, v in completion.version_spans)
        self._spans += spans
        self._append(completion.token_ids, completion.logprobs, sampled=True, support=completion.support)
        if completion.experts is not None:
            new = len(self) - 1 - self.recorded
            assert len(completion.experts) >= new, "some tokens would get the experts of other tokens"
            self._experts.append(completion.experts[len(completion.experts) - new :])

    def add_said(self, token_ids: np.ndarray) -> None:
        """Append tokens [N] that the policy did not sample; their log-prob is 0, and they are never trained."""
        self._append(token_ids, np.zeros(len(token_ids)), sampled=False)

    def sequence(self) -> TokenSequence:
        """Everything so far."""
        logprobs, mask = np.concatenate(self._logprobs), np.concatenate(self._mask)
        support, experts = Support.concatenated(self._supports), None
        if self._experts:
            self._experts = [np.concatenate(self._experts)]
            experts = self._experts[0][np.minimum(np.arange(len(self)), self.recorded - 1)]
        return TokenSequence(self.token_ids, mask, logprobs, tuple(self._spans), support, experts)

    def _append(
        self, token_ids: np.ndarray, logprobs: np.ndarray, *, sampled: bool, support: Support | None = None
    ) -> None:
        self._ids.append(np.asarray(token_ids, np.int32))
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._mask.append(np.full(len(token_ids), sampled))
        self._supports.append((support, len(token_ids)))
        self._length += len(token_ids)
