"""Values of tokens in the rollouts, by hand."""

from __future__ import annotations

import numpy as np
from worlds import group_of, joined, make_groups, rollout_of

from rlhf.run.rollout_log import token_values
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.types import PolicyTargets


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + n) for n in ids)


def test_each_response_token_has_its_text_its_advantage_and_the_difference_of_learner_and_engine() -> None:
    (group,) = make_groups(groups=1, samples=2, vocabulary=9, longest=20, seed=0)
    batch = make_batch([group], mask_truncated=False)
    advantages = broadcast_to_tokens(batch, np.array([0.5, -0.25]))
    old = np.where(batch.tokens.response_mask, batch.tokens.rollout_logprobs + 0.125, 7.0).astype(np.float32)
    old[batch.tokens.cu_seqlens[1] :] = 0.0  # the second was not computed
    first, second = token_values(batch, PolicyTargets(advantages, old, None), Letters())
    rollout = group.samples[0].rollout
    assert "".join(first["tokens"]) == Letters().decode(rollout.response_ids.tolist())
    assert first["token_advantages"] == [0.5] * rollout.response_length
    assert first["token_differences"] == [0.125] * rollout.response_length
    assert "token_differences" not in second
    (one, _) = token_values(batch, PolicyTargets(advantages, None, None), Letters())
    assert "token_differences" not in one


def test_a_rollout_of_several_sequences_has_the_tokens_of_all_of_them() -> None:
    rollouts = [joined(rollout_of([9, 1, 2], [0, 1, 1]), rollout_of([9, 8, 3], [0, 0, 1])), rollout_of([9, 4], [0, 1])]
    batch = make_batch([group_of(rollouts)], mask_truncated=False)
    targets = PolicyTargets(broadcast_to_tokens(batch, np.array([0.5, -0.25])), None, None)
    both, one = token_values(batch, targets, Letters())
    assert both == {"tokens": ["b", "c", "d"], "token_advantages": [0.5] * 3}
    assert one == {"tokens": ["e"], "token_advantages": [-0.25]}


def test_what_the_environment_said_has_a_text_and_no_value() -> None:
    rollout = rollout_of([9, 1, 7, 8, 2], [0, 1, 0, 0, 1], np.array([0, -0.5, 0, 0, -0.5]))
    batch = make_batch([group_of([rollout])], mask_truncated=False)
    targets = PolicyTargets(broadcast_to_tokens(batch, np.array([0.5])), np.full(5, -0.25, np.float32), None)
    (row,) = token_values(batch, targets, Letters())
    assert row["tokens"] == ["b", "h", "i", "c"]
    assert row["token_advantages"] == [0.5, None, None, 0.5]
    assert row["token_differences"] == [0.25, None, None, 0.25]
