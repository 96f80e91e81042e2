"""The KL penalty to the reference policy: four per-token estimators and two controllers of its coefficient.

With d = log pi - log pi_ref at a sampled token and r = pi / pi_old:

    k1 = d    k2 = d^2 / 2    k3 = exp(-d) - 1 + d    k4 = r d          (k1 to k3: J. Schulman, "Approximating KL
                                                                         divergence", joschu.net/blog/kl-approx.html)

The value of an estimator and its gradient are different questions. As a *loss*, differentiated at tokens sampled from
pi itself, and given each token's prefix, the expected gradient is

    k1  zero: E[grad log pi] = 0. It adds variance and controls nothing
    k2  the gradient of KL(pi || pi_ref)
    k3  the gradient of KL(pi_ref || pi), the other direction; weighted by r, that of KL(pi || pi_ref)
    k4  the gradient of KL(pi || pi_ref)

*Off-policy*, at tokens sampled from pi_old: k4 and ratio-weighted k3 stay exact, because r d and r k3 differentiate to
r d grad log pi (+ r grad log pi, which averages to 0 for k4). k1, k2 and plain k3 do not: each becomes the same sum
under pi_old instead of pi, which for k1 is no longer zero.

None of the four sees the effect of a token on later prefixes. A KL in the *reward* does: there k1, summed over the
response, is exact, while k2 and k3 are biased (and k3 is unbounded where pi is far below pi_ref).

The gradient flows through `logprobs` only; nothing here detaches it.
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
        logprobs: [T] of the policy, with gradient where the KL is part of a loss.
        ref_logprobs: [T] of the reference.
        estimator: one of KL_ESTIMATORS.
        old_logprobs: [T] of the policy that sampled the tokens; k4 and `ratio_weighted` need it.
        ratio_weighted: multiply k3 by pi / pi_old, gradient included.
        response_mask: [T] bool; where it is False the result and its gradient are 0 for any input.

    Returns:
        [T] float32 (float64 stays). Exponents are exact up to MAX_LOG_RATIO and continue along the tangent.

    Raises:
        ValueError: an unknown estimator, missing `old_logprobs`, or a weight on another estimator than k3.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"algo.kl_estimator={estimator!r}: unknown. Use one of {', '.join(KL_ESTIMATORS)}.")
    if ratio_weighted and estimator != "k3":
        raise ValueError(f"algo.kl_estimator={estimator}: only k3 can be weighted by the ratio; weighted k1 is k4.")
    if response_mask is None:
        response_mask = torch.ones_like(logprobs, dtype=torch.bool)
    logprobs = masked(logprobs, response_mask)
    difference = logprobs - masked(ref_logprobs, response_mask)
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3" if not ratio_weighted:
            return bounded_exp(-difference) - 1 + difference
    if old_logprobs is None:
        raise ValueError(f"algo.kl_estimator={estimator}: a ratio-weighted estimate needs old_logprobs.")
    ratio = bounded_exp(logprobs - masked(old_logprobs, response_mask))
    return ratio * (difference if estimator == "k4" else bounded_exp(-difference) - 1 + difference)


class FixedKLController:
    """A coefficient that always has the value of the config, also after a resume."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, rollouts: int) -> None:
        """The measured KL changes nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The checkpoint is ignored: the config decides."""


class AdaptiveKLController:
    """A proportional controller in log space that steers the KL to a target (arXiv:1909.08593, sec. 2.2).

        error = clip(kl / target - 1, -0.2, 0.2)        coef *= 1 + error * rollouts / horizon

    Args:
        init: the first coefficient, above 0: the update is multiplicative.
        target: nats per response (the sum over its tokens).
        horizon: rollouts after which a constant error of 0.2 (the bound) has changed the coefficient by about a fifth.

    Raises:
        ValueError: an argument that is not positive.
    """

    MAX_ERROR = 0.2  # sec. 2.2 of the paper

    def __init__(self, *, init: float, target: float, horizon: int) -> None:
        for name, value in (("init", init), ("target", target), ("horizon", horizon)):
            if not value > 0:
                raise ValueError(f"adaptive KL controller: {name}={value} must be above 0.")
        self.coef = init
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, rollouts: int) -> None:
        """Take in the mean KL of one step's rollouts, in nats per response.

        Raises:
            ValueError: a KL that is not finite, which would spoil the coefficient for the rest of the run.
        """
        if not math.isfinite(kl):
            raise ValueError(f"adaptive KL controller: the measured KL is {kl}; the coefficient stays {self.coef}.")
        error = min(max(kl / self.target - 1, -self.MAX_ERROR), self.MAX_ERROR)
        self.coef *= 1 + error * rollouts / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
