"""The gradient of each KL estimator as a loss, over small softmax policies, in float64.

*Of one token*: bias and variance, each computed twice: by enumeration of all tokens, and from the gradients at sampled
tokens, with its standard error. `python -m benchmarks.studies.kl` writes both into its table and its picture. The
policy is far from its reference, with log-ratios d of about 1.4, or near to it, with d of about 0.1. The tokens come
from the policy itself (on-policy) or from another one, as after an update (off-policy).

*Of a minibatch of whole responses that end*: the expected gradient by aggregation, by enumeration of all minibatches.
The same command writes its table.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.studies import report
from rlhf.algo.kl import KL_ESTIMATORS, kl_per_token
from rlhf.algo.losses import aggregate

NAMES = (*KL_ESTIMATORS, "k3 weighted")
VOCABULARY = 5
SAMPLES = 10_000
NEAR = 0.1  # of the difference between two independent draws of logits

AGGREGATIONS = ("constant", "token_mean", "sequence_mean")
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
ROUNDING = 1e-12  # of a gradient in float64
RESPONSE_SEEDS = range(10)
SPREAD, REF_DISTANCE, OLD_DISTANCE = 0.7, 0.5, 0.2  # std of logits, and of their differences to those of the policy


def all_gradients(seeds: Sequence[int], samples: int = SAMPLES) -> list[report.Row]:
    """One row per policy, distance to the reference, policy that sampled, and estimator."""
    return [
        {"seed": seed, "distance": "far" if far else "near", "tokens": tokens, "estimator": name}
        | gradient_row(name, theta, ref, theta if tokens == "on-policy" else old, samples=samples, seed=seed)
        for seed in seeds
        for far in (True, False)
        for theta, ref, old in [policies(seed, scale=1.0 if far else NEAR)]
        for tokens in ("on-policy", "off-policy")
        for name in NAMES
    ]


def policies(seed: int, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [V] of the policy, of its reference, and of the policy that sampled off-policy."""
    theta, ref, old = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return theta, theta + scale * (ref - theta), theta + scale * (old - theta)


def gradient_row(name: str, theta: Tensor, ref: Tensor, old: Tensor, *, samples: int, seed: int) -> report.Row:
    """Bias and variance of one token's gradient g, enumerated and sampled, relative to G, that of KL(pi, ref).

    The bias is |E[g] - G| / |G|: 1 is as wrong as no gradient. The variance is E|g - E[g]|^2 / |G|^2. The standard
    error of a sampled bias is the root mean square length of the error of the sampled mean: an unbiased estimator has a
    sampled bias of about one of them.
    """
    log_pi, log_ref, log_old = (logits.log_softmax(-1) for logits in (theta, ref, old))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(log_old.exp(), samples, replacement=True, generator=generator)
    by_token, values = token_gradients(name, theta, log_ref, log_old, torch.arange(VOCABULARY))
    by_sample, _ = token_gradients(name, theta, log_ref, log_old, drawn)
    reverse = kl_gradient(theta, lambda log_pi: (log_pi.exp() * (log_pi - log_ref)).sum())
    forward = kl_gradient(theta, lambda log_pi: (log_ref.exp() * (log_ref - log_pi)).sum())
    length = float(reverse.norm())
    mean, variance, _ = moments(by_token, log_old.exp())
    sampled, sampled_variance, deviation = moments(by_sample, torch.full_like(by_sample[:, 0], 1 / samples))
    kl = log_pi.exp() @ (log_pi - log_ref)
    return {
        "relative bias of the value": float((log_old.exp() @ values - kl) / kl),
        "bias": float((mean - reverse).norm()) / length,
        "sampled bias": float((sampled - reverse).norm()) / length,
        "error of sampled bias": (sampled_variance / samples) ** 0.5 / length,
        "variance": variance / length**2,
        "sampled variance": sampled_variance / length**2,
        "error of sampled variance": deviation / samples**0.5 / length**2,
        "distance to the gradient of KL(ref, pi)": float((mean - forward).norm()) / length,
    }


def token_gradients(
    name: str, theta: Tensor, log_ref: Tensor, log_old: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient [n, V] of the KL loss at each of the tokens [n] alone, and its value there [n]."""
    estimator, _, weighted = name.partition(" ")
    logits = theta.repeat(len(tokens), 1).requires_grad_()
    log_pi = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    values = kl_per_token(
        log_pi, log_ref[tokens], estimator=estimator, old_logprobs=log_old[tokens], ratio_weighted=bool(weighted)
    )
    (gradients,) = torch.autograd.grad(values.sum(), logits)
    return gradients, values.detach()


def kl_gradient(theta: Tensor, kl: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient [V] of an exact divergence, a function of the policy's log-probabilities."""
    logits = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kl(logits.log_softmax(-1)), logits)
    return gradient


def moments(gradients: Tensor, probabilities: Tensor) -> tuple[Tensor, float, float]:
    """Mean [V]; mean squared distance to it; standard deviation of that squared distance."""
    mean = probabilities @ gradients
    squares = (gradients - mean).square().sum(-1)
    variance = probabilities @ squares
    return mean, float(variance), float((probabilities @ (squares - variance).square()).sqrt())


# --- a minibatch of whole responses ---


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


def token_logprobs(logits: Tensor) -> Tensor:
    """[T] of all tokens of all responses, one response after another."""
    return logits.log_softmax(-1)[PREFIX_OF_TOKEN, TOKEN]


def per_response(x: Tensor) -> Tensor:
    """[responses] sums of [T]."""
    return torch.stack([part.sum() for part in x.split(LENGTHS.tolist())])


def gradient_of(value: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    theta = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(theta), theta)
    return gradient


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
    probability = per_response(token_logprobs(sampler)).exp().repeat_interleave(LENGTHS)
    log_ref = policies.ref.log_softmax(-1)

    def expected_kl(theta: Tensor) -> Tensor:
        log_pi = theta.log_softmax(-1)
        of_prefix = log_pi.exp() * (log_pi - log_ref) if reverse else log_ref.exp() * (log_ref - log_pi)
        return (probability * of_prefix.sum(-1)[PREFIX_OF_TOKEN]).sum()

    return gradient_of(expected_kl, policies.policy)


def length_gradient(logits: Tensor) -> Tensor:
    """Of the expected number of tokens of a response."""
    return gradient_of(lambda theta: per_response(token_logprobs(theta)).exp() @ LENGTHS.double(), logits)


def sampler_kl_gradient(policies: Policies, sampler: Tensor) -> Tensor:
    """Of KL(pi_old, pi) of whole responses, pi_old being the policy that sampled."""
    probability = per_response(token_logprobs(sampler)).exp()
    return gradient_of(lambda theta: -probability @ per_response(token_logprobs(theta)), policies.policy)


def response_rows(seeds: Sequence[int]) -> list[report.Row]:
    """One row per seed, policy that sampled, estimator and aggregation, for minibatches of two responses.

    size: length of the expected gradient, relative to that of `prefix_kl_gradient`, both per token.
    kl: its cosine with `prefix_kl_gradient`; 1 is the KL penalty that was asked for.
    longer: cosine of the opposite direction, which the optimizer takes, with the gradient of the expected length.
    away: the same with the gradient of KL(pi_old, pi), the distance to the policy that sampled; NaN on-policy.
    """
    rows = []
    for seed in seeds:
        policies = response_policies(seed)
        length = length_gradient(policies.policy)
        for tokens, sampler in (("on-policy", policies.policy), ("off-policy", policies.old)):
            exact, away = prefix_kl_gradient(policies, sampler), sampler_kl_gradient(policies, sampler)
            mean_length = float(per_response(token_logprobs(sampler)).exp() @ LENGTHS.double())
            for name, aggregation in itertools.product(NAMES, AGGREGATIONS):
                gradient = minibatch_gradient(name, policies, sampler, aggregation)
                per_token = LONGEST if aggregation == "constant" else mean_length
                rows.append(
                    {"seed": seed, "tokens": tokens, "estimator": name, "aggregation": aggregation}
                    | {
                        "size": float(gradient.norm() / exact.norm()) * per_token,
                        "kl": cosine(gradient, exact),
                        "longer": cosine(-gradient, length),
                        "away": cosine(-gradient, away),
                    }
                )
    return rows


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two gradients; NaN where one of them is 0 but for rounding."""
    return float((a * b).sum() / (a.norm() * b.norm())) if min(a.norm(), b.norm()) > ROUNDING else float("nan")
