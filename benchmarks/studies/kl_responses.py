"""The gradient of each KL estimator in the loss of whole responses, by aggregation, enumerated in float64.

A minibatch is two responses to one prompt. All minibatches go through the trainer's own `aggregate`.
`python -m benchmarks.studies.kl` writes the table `responses`; `tests/algo/test_kl.py` proves what it shows.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.studies import report
from benchmarks.studies.enumeration import (
    LENGTHS,
    LONGEST,
    PREFIX_OF_TOKEN,
    PREFIXES,
    RESPONSES,
    SPREAD,
    TOKEN,
    WORDS,
    gradient_of,
    per_response,
    probabilities,
    token_logprobs,
)
from benchmarks.studies.kl_gradients import NAMES
from rlhf.algo.kl import kl_per_token
from rlhf.algo.losses import aggregate

POLICIES = 10
AGGREGATIONS = ("constant", "token_mean", "sequence_mean")
ROUNDING = 1e-12  # of a gradient in float64
REF_DISTANCE, OLD_DISTANCE = 0.5, 0.2  # std of the differences of logits to those of the policy


class Policies(NamedTuple):
    """Logits [prefixes, words] of the policy, of its reference, and of the policy that samples off-policy."""

    policy: Tensor
    ref: Tensor
    old: Tensor


def response_policies(seed: int) -> Policies:
    theta, to_ref, to_old = torch.randn(
        3, len(PREFIXES), WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    theta = SPREAD * theta
    return Policies(theta, theta + REF_DISTANCE * to_ref, theta + OLD_DISTANCE * to_old)


@functools.cache
def minibatches(size: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Number of tokens -> all minibatches of that many: responses [M, size], and where their tokens are in [T]."""
    by_tokens: dict[int, list[tuple[int, ...]]] = {}
    for chosen in itertools.product(range(len(RESPONSES)), repeat=size):
        by_tokens.setdefault(int(LENGTHS[list(chosen)].sum()), []).append(chosen)
    places = torch.arange(len(TOKEN)).split(LENGTHS.tolist())
    return {
        tokens: (torch.tensor(chosen), torch.cat([places[each] for minibatch in chosen for each in minibatch]))
        for tokens, chosen in by_tokens.items()
    }


def minibatch_gradient(
    name: str, policies: Policies, sampler: Tensor, aggregation: str, *, responses: int = 2
) -> Tensor:
    """Expected gradient of the KL loss of a minibatch of responses to one prompt, sampled with the logits `sampler`.

    The losses of all minibatches, by the trainer's own `aggregate`, are added with their probabilities.
    """
    estimator, _, weighted = name.partition(" ")
    log_old, log_ref = token_logprobs(sampler), token_logprobs(policies.ref)
    probability = per_response(log_old).exp()

    def expected_loss(theta: Tensor) -> Tensor:
        kl = kl_per_token(
            token_logprobs(theta), log_ref, estimator=estimator, old_logprobs=log_old, ratio_weighted=bool(weighted)
        )
        total = torch.zeros((), dtype=torch.float64)
        for tokens, (chosen, places) in minibatches(responses).items():
            lengths = LENGTHS[chosen.flatten()]
            of_token = probability[chosen].prod(-1).repeat_interleave(tokens)
            total = total + aggregate(
                of_token * kl[places], torch.ones(len(places), dtype=torch.bool),
                torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), lengths,
                aggregation=aggregation, tokens=tokens, rollouts=responses, constant_length=LONGEST,
            )  # fmt: skip
        return total

    return gradient_of(expected_loss, policies.policy)


def prefix_kl_gradient(policies: Policies, sampler: Tensor, *, reverse: bool = True) -> Tensor:
    """Gradient of KL(pi, ref) at each token given its prefix, summed; prefixes are as `sampler` reaches them.

    reverse: False for KL(ref, pi).
    """
    probability = probabilities(sampler).repeat_interleave(LENGTHS)
    log_ref = policies.ref.log_softmax(-1)

    def expected_kl(theta: Tensor) -> Tensor:
        log_pi = theta.log_softmax(-1)
        of_prefix = log_pi.exp() * (log_pi - log_ref) if reverse else log_ref.exp() * (log_ref - log_pi)
        return (probability * of_prefix.sum(-1)[PREFIX_OF_TOKEN]).sum()

    return gradient_of(expected_kl, policies.policy)


def length_gradient(logits: Tensor) -> Tensor:
    """Of the expected number of tokens of a response."""
    return gradient_of(lambda theta: probabilities(theta) @ LENGTHS.double(), logits)


def sampler_kl_gradient(policies: Policies, sampler: Tensor) -> Tensor:
    """Of KL(pi_old, pi) of whole responses, pi_old being the policy that sampled."""
    probability = probabilities(sampler)
    return gradient_of(lambda theta: -probability @ per_response(token_logprobs(theta)), policies.policy)


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two gradients; NaN where one of them is 0 but for rounding."""
    return float((a * b).sum() / (a.norm() * b.norm())) if min(a.norm(), b.norm()) > ROUNDING else float("nan")


def gradient_rows(policies: int = POLICIES) -> list[report.Row]:
    """One row per policy, policy that sampled, estimator and aggregation.

    size: length of the expected gradient relative to that of KL(pi, ref) at each token given its prefix; both are
        per token, so the sum over a response is divided by LONGEST (`constant`) or by the expected length.
    cosine: KL: with that gradient. The other two are of the optimizer's direction with the gradients of the expected
        length and of KL(pi_old, pi). NaN where a gradient is 0.
    """
    rows = []
    for tokens, name, aggregation, seed in itertools.product(
        ("on-policy", "off-policy"), NAMES, AGGREGATIONS, range(policies)
    ):
        of_seed = response_policies(seed)
        sampler = of_seed.policy if tokens == "on-policy" else of_seed.old
        ours, exact = minibatch_gradient(name, of_seed, sampler, aggregation), prefix_kl_gradient(of_seed, sampler)
        length = LONGEST if aggregation == "constant" else float(probabilities(sampler) @ LENGTHS.double())
        values = {
            "size": float(ours.norm() / exact.norm()) * length,
            "cosine: KL": cosine(ours, exact),
            "longer responses": cosine(-ours, length_gradient(of_seed.policy)),
            "away from the sampler": cosine(-ours, sampler_kl_gradient(of_seed, sampler)),
        }
        rows.append({"seed": seed, "tokens": tokens, "estimator": name, "aggregation": aggregation} | values)
    return rows
