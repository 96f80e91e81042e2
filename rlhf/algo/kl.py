"""The KL penalty to the reference policy: four per-token estimators and the controller of its coefficient.

With d = log pi - log pi_ref at a sampled token and r = pi / pi_old:

    k1 = d    k2 = d^2 / 2    k3 = exp(-d) - 1 + d    k4 = r d          (k1 to k3: J. Schulman, "Approximating KL
                                                                         divergence", joschu.net/blog/kl-approx.html)

As a *loss* that is summed over tokens (aggregation `constant`), at tokens sampled from pi itself and given each token's
prefix, the expected gradient is

    k1      zero: E[grad log pi] = 0. It adds variance and controls nothing
    k2, k4  the gradient of KL(pi || pi_ref)
    k3      the gradient of KL(pi_ref || pi), the other direction; weighted by r, that of KL(pi || pi_ref)

*Off-policy*, at tokens sampled from pi_old, k4 and ratio-weighted k3 stay exact (at prefixes as pi_old reaches them).
The others become the same sum under pi_old instead of pi. For k1 that is the gradient of -KL(pi_old || pi): it pushes
away from the policy that sampled, and the reference is not in it. With a policy lag an older policy sampled, not
pi_old. At r = 1 weighted k3 then has the gradient of k2, and k4 the sum of those of k1 and k2.

`sequence_mean` and `token_mean` divide by a length N that was sampled. The term 1 x grad log pi, which k1 and k4 have,
then no longer averages to 0: it is the gradient of E[1/N]. For k1 it is all there is, so a larger coefficient makes
responses longer and pulls nothing towards the reference.

None of the four sees the effect of a token on later prefixes. A KL in the *reward* does: there k1, summed over the
response, is exact. k3 has the gradient of KL(pi || pi_ref) less that of KL(pi_ref || pi), which like that of k2 is of
second order near the reference, where it holds nothing (and k3 is unbounded where pi is far below pi_ref).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf.algo.numerics import bounded_exp, masked

KL_ESTIMATORS = ("k1", "k2", "k3", "k4")


def kl_per_token(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: str,
    old_logprobs: Tensor | None = None,
    ratio_weighted: bool = False,
    response_mask: Tensor | None = None,
) -> Tensor:
    """One estimate of the KL divergence per token (module docstring; weighted k3: arXiv:2512.02556, sec. 3.1).

    Args:
        logprobs: [T] of the policy, with gradient where the KL is part of a loss. ref_logprobs: [T] of the reference.
        estimator: one of KL_ESTIMATORS.
        old_logprobs: [T] of the policy that sampled the tokens; k4 and `ratio_weighted` need it.
        ratio_weighted: multiply k3 by pi / pi_old, gradient included.
        response_mask: [T] bool; where it is False the result and its gradient are 0 for any input.

    Returns:
        [T] float32 (float64 stays). Exponentials are exact up to MAX_LOG_RATIO and follow the tangent above it.
    """
    assert estimator in KL_ESTIMATORS, estimator
    assert not ratio_weighted or estimator == "k3", "weighted k1 is k4"
    if response_mask is None:
        response_mask = torch.ones_like(logprobs, dtype=torch.bool)
    logprobs = masked(logprobs, response_mask)
    difference = logprobs - masked(ref_logprobs, response_mask)
    match estimator:
        case "k2":
            estimate = difference.square() / 2
        case "k3":
            estimate = bounded_exp(-difference) - 1 + difference
        case _:
            estimate = difference
    if not ratio_weighted and estimator != "k4":
        return estimate
    assert old_logprobs is not None, "a ratio-weighted estimate needs the policy that sampled"
    return bounded_exp(logprobs - masked(old_logprobs, response_mask)) * estimate


class KLController:
    """The coefficient of the KL in the reward: fixed, or steered so that the KL reaches a target.

    With a target it is a proportional controller in log space (arXiv:1909.08593, sec. 2.2):

        error = clip(kl / target - 1, -0.2, 0.2)        coef *= 1 + error * rollouts / horizon

    Args:
        coef: the first coefficient, above 0 if there is a target: the update is multiplicative.
        target: nats per response (the sum over its tokens); None: the coefficient is fixed.
        horizon: rollouts after which a constant error of 0.2 (the bound) has changed the coefficient by about a fifth.
    """

    MAX_ERROR = 0.2  # sec. 2.2 of the paper

    def __init__(self, coef: float, *, target: float | None = None, horizon: int = 1) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, rollouts: int) -> None:
        """Take in the mean KL of one step's rollouts, in nats per response.

        Raises:
            ValueError: a KL that is not finite, which would spoil the coefficient for the rest of the run.
        """
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise ValueError(f"adaptive KL controller: the measured KL is {kl}; the coefficient stays {self.coef}.")
        error = min(max(kl / self.target - 1, -self.MAX_ERROR), self.MAX_ERROR)
        self.coef *= 1 + error * rollouts / self.horizon
