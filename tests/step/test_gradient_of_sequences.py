"""The expected gradient of rollouts with three sequences, over everything that could have been sampled.

A rollout samples a after the prompt; b after a context that was rewritten from a; c after a branch that goes on from a.
With `constant` and no division by the std it is the gradient of the expected reward, and nothing else. A group of two
with its mean as baseline has half of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from worlds import group_of, joined, make_config, rollout_of

from rlhf.learner.policy_model import DeviceTokens, PolicyOutput
from rlhf.learner.update import policy_microbatch
from rlhf.step.advantages import step_advantages
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import PolicyTargets, Rollout

VOCABULARY, ACTIONS, LONGEST = 6, (1, 2), 5
PROMPT, SUMMARY, ASIDE = 0, 3, 4  # tokens that nobody samples
Sampled = tuple[int, int, int]


class TinyPolicy(nn.Module):
    """Next-token logits from the last token and the mean of all before it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.last, self.mean = (
            nn.Parameter(torch.randn(VOCABULARY, len(ACTIONS), generator=generator, dtype=torch.float64))
            for _ in range(2)
        )

    def next_logprobs(self, ids: Tensor) -> Tensor:
        """[L, 2] log-probs of the actions after each token."""
        count = torch.arange(1, len(ids) + 1, dtype=torch.float64)
        return torch.log_softmax(self.last[ids] + self.mean[ids].cumsum(0) / count[:, None], -1)

    def forward(self, tokens: DeviceTokens, **_: Any) -> PolicyOutput:
        parts = []
        for ids in tokens.token_ids.long().split(tokens.cu_seqlens.diff().tolist()):
            actions = (ids[1:] - ACTIONS[0]).clamp(0, len(ACTIONS) - 1)
            ahead = self.next_logprobs(ids)[:-1].gather(-1, actions[:, None])[:, 0]
            parts.append(torch.cat([ahead.new_zeros(1), ahead]))
        logprobs = torch.where(tokens.response_mask, torch.cat(parts), 0.0)
        return PolicyOutput(logprobs, torch.zeros_like(logprobs), None)


def contexts(sampled: Sampled) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Ids of each sequence, where its own samples stand, and where those stand that another sequence has sampled."""
    a, b, c = sampled
    yield [PROMPT, a], [1], []
    yield [SUMMARY, a, b], [2], []
    yield [PROMPT, a, ASIDE, c], [3], [1]


def rollout(sampled: Sampled, *, twice: bool = False) -> Rollout:
    """`twice`: the branch trains the token again that it begins with."""
    sequences = []
    for ids, own, others in contexts(sampled):
        mask = np.isin(np.arange(len(ids)), [*own, *(others if twice else ())])
        sequences.append(rollout_of(ids, mask))
    return joined(*sequences)


def logprob_of(policy: TinyPolicy, sampled: Sampled) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for ids, own, _ in contexts(sampled):
        ahead = policy.next_logprobs(torch.tensor(ids))
        total = total + sum(ahead[at - 1, ids[at] - ACTIONS[0]] for at in own)
    return total


def gradient_of(total: Tensor, policy: TinyPolicy) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(total, list(policy.parameters()))])


def config() -> Any:
    return make_config(
        Path("nowhere/model"),
        data={"train": "train.jsonl", "max_prompt_tokens": 4},
        rollout={"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": LONGEST},
        algo={"advantage": "dr_grpo", "loss_aggregation": "constant", "importance_correction": "none"},
        learner={"max_tokens_per_microbatch": 64},
        cluster={"device": "cpu"},
    )


def expected_gradient(policy: TinyPolicy, reward: dict[Sampled, float], *, twice: bool) -> Tensor:
    """Of the loss of a group of two, over all pairs, as the learner computes it."""
    chance = {sampled: logprob_of(policy, sampled).exp().item() for sampled in reward}
    total = torch.zeros(2 * VOCABULARY * len(ACTIONS), dtype=torch.float64)
    for pair in itertools.product(reward, repeat=2):
        group = group_of([rollout(sampled, twice=twice) for sampled in pair], [reward[sampled] for sampled in pair])
        batch = make_batch([group], mask_truncated=False)
        advantages = step_advantages(batch, batch.rewards, "dr_grpo")
        targets = PolicyTargets(broadcast_to_tokens(batch, advantages), None, None)
        ((minibatch,),) = plan_epochs(batch, config(), step=0)
        ((rows,),) = minibatch.microbatches
        tokens = DeviceTokens.of(batch.tokens.take(rows), torch.device("cpu"))
        columns = targets.take(batch.tokens.token_indices(rows))
        loss, _ = policy_microbatch(policy, tokens, columns, minibatch.denominators, config())
        total += chance[pair[0]] * chance[pair[1]] * gradient_of(loss, policy)
    return total


@pytest.mark.parametrize("twice", [False, True])
def test_a_rollout_of_three_sequences_has_the_gradient_of_its_reward_if_each_sampled_token_is_trained_once(
    twice: bool,
) -> None:
    policy, draw = TinyPolicy(), np.random.default_rng(0)
    reward = {sampled: float(draw.normal()) for sampled in itertools.product(ACTIONS, repeat=3)}
    value = sum(logprob_of(policy, sampled).exp() * worth for sampled, worth in reward.items())
    exact = -gradient_of(torch.as_tensor(value), policy) / LONGEST / 2
    computed = expected_gradient(policy, reward, twice=twice)
    error = float((computed - exact).norm() / exact.norm())
    assert error < 1e-6 if not twice else error > 0.1
