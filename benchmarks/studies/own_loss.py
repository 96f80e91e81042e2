"""A loss as a user writes one (`algo.policy_loss: benchmarks/studies/own_loss.py:reinforce`)."""

from typing import Any

import torch


def reinforce(
    logprobs: torch.Tensor, *, advantages: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> torch.Tensor:
    """The loss of each token [T]: REINFORCE, without a ratio and without clipping."""
    return -torch.where(response_mask, logprobs, 0.0) * advantages
