"""Values of every token of a rollout, for the report's browser: its text, its advantage, the engine's error."""

from __future__ import annotations

import itertools
from typing import Any

from rlhf.types import PolicyTargets, StepBatch

DIGITS = 4


def token_values(batch: StepBatch, targets: PolicyTargets, tokenizer: Any) -> list[dict[str, list[Any]]]:
    """For each rollout of the step: its sampled tokens as text, their advantages, learner minus engine log-probs.

    The difference is left out of rollouts whose old log-probs were not computed.
    """
    tokens, rows = batch.tokens, []
    for start, end in itertools.pairwise(tokens.cu_seqlens[batch.row_bounds]):
        mask = tokens.response_mask[start:end]
        texts = [tokenizer.decode([token]) for token in tokens.token_ids[start:end][mask].tolist()]
        row = {"tokens": texts, "token_advantages": targets.advantages[start:end][mask].round(DIGITS).tolist()}
        if targets.old_logprobs is not None and (old := targets.old_logprobs[start:end][mask]).any():
            row["token_differences"] = (old - tokens.rollout_logprobs[start:end][mask]).round(DIGITS).tolist()
        rows.append(row)
    return rows
