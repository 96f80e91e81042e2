"""A loss and an advantage as users write them, `algo.policy_loss: benchmarks/studies/own_loss.py:reinforce`."""

from typing import Any

import torch

from rlhf.algo.advantages import advantages_by_name


def reinforce(
    logprobs: torch.Tensor, *, advantages: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> torch.Tensor:
    """The loss of each token [T]: REINFORCE, without a ratio and without clipping."""
    return -torch.where(response_mask, logprobs, 0.0) * advantages


def by_prompt(rewards: torch.Tensor, groups: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """GRPO's advantages [R], weighted so that `token_mean` is the mean over prompts of the means over their tokens.

    This is the aggregation of ScaleRL (arXiv:2510.13786): with N tokens and P prompts in a step and N_g tokens in the
    responses to prompt g, 1/N times N / (P N_g) is 1 / (P N_g). A minibatch has nearly 1/minibatches of the N tokens.
    """
    group = groups.unique(return_inverse=True)[1]  # from 0 on, as `advantages_by_name` wants it
    tokens = torch.zeros(int(group.max()) + 1, dtype=rewards.dtype).index_add_(0, group, lengths.to(rewards.dtype))
    return advantages_by_name("grpo", rewards, group) * (tokens.mean() / tokens)[group]
