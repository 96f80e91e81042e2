"""The gradient of each KL estimator as a loss at one token, over small softmax policies, in float64.

Bias and variance are each computed twice: by enumeration of all tokens, and from the gradients at sampled tokens, with
its standard error. `python -m benchmarks.studies.kl` writes both into its table and its picture. The policy is far from
its reference, with log-ratios d of about 1.4, or near to it, with d of about 0.1. The tokens come from the policy
itself (on-policy) or from another one, as after an update (off-policy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.studies import report
from rlhf.algo.kl import KL_ESTIMATORS, kl_per_token

NAMES = (*KL_ESTIMATORS, "k3 weighted")
VOCABULARY = 5
SAMPLES = 10_000
NEAR = 0.1  # of the difference between two independent draws of logits


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
        "root mean square of d": float((log_pi.exp() @ (log_pi - log_ref).square()).sqrt()),
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
