"""Responses that are enumerated: a softmax policy over three tokens, one of which ends the response, in float64.

A policy is its logits [prefixes, words]. What a sum over sampled responses estimates is computed as a sum over all of
them, weighed by their probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

END, WORDS, LONGEST = 0, 3, 3  # a response ends with the token END or has LONGEST tokens
RESPONSES = [
    ids
    for length in range(1, LONGEST + 1)
    for ids in itertools.product(range(WORDS), repeat=length)
    if END not in ids[:-1] and (ids[-1] == END or length == LONGEST)
]
LENGTHS = torch.tensor([len(ids) for ids in RESPONSES])
PREFIXES = sorted({ids[:at] for ids in RESPONSES for at in range(len(ids))})
# Of all tokens of all responses, one response after another: the number of the prefix, and the token.
PREFIX_OF_TOKEN = torch.tensor([PREFIXES.index(ids[:at]) for ids in RESPONSES for at in range(len(ids))])
TOKEN = torch.tensor([token for ids in RESPONSES for token in ids])
SPREAD = 0.7  # std of the logits of a policy


def token_logprobs(logits: Tensor) -> Tensor:
    """[T] of all tokens of all responses, one response after another."""
    return logits.log_softmax(-1)[PREFIX_OF_TOKEN, TOKEN]


def per_response(x: Tensor) -> Tensor:
    """[responses] sums of [T]."""
    return torch.stack([part.sum() for part in x.split(LENGTHS.tolist())])


def probabilities(logits: Tensor) -> Tensor:
    """[responses] of a policy."""
    return per_response(token_logprobs(logits)).exp()


def gradient_of(value: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    theta = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(theta), theta)
    return gradient
