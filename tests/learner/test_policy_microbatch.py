"""Every key of `algo` that the policy's loss reads, by hand: two responses of one and three tokens in a packed row.

    response  ratio to old       advantage   log pi - log pi_ref   pi_old / pi_rollout   entropy
    1         1.5                 1          0.2                   3                     0.5
    2         0.6   2.0   1.0    -1          -0.1   0.4   0.0      0.25   1.5   1.0      1.0   2.0   0.5

With PPO's clip of 0.2 the losses of the tokens are -1.2, and 0.8, 2, 1.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from worlds import make_config

from rlhf.algo.logprobs import TokenLogprobs
from rlhf.learner.model import DeviceTokens
from rlhf.learner.update import PolicyObjective, policy_microbatch
from rlhf.log.metrics import StepMetrics
from rlhf.types import Denominators, PackedTokens, PolicyTargets

RATIO = np.array([1.5, 0.6, 2.0, 1.0])
LOSSES = np.array([-1.2, 0.8, 2.0, 1.0])
D = np.array([0.2, -0.1, 0.4, 0.0])
IMPORTANCE = np.array([3.0, 0.25, 1.5, 1.0])
ENTROPY = np.array([0.5, 1.0, 2.0, 0.5])
OLD = -1.0
NEW = OLD + np.log(RATIO)
K2, K3 = D**2 / 2, np.exp(-D) - 1 + D
MASK = np.array([False, True, False, True, True, True])
LONGEST = 64  # rollout.max_response_tokens


class Fixed(nn.Module):
    """A policy that says what it is told; masked positions hold NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs = nn.Parameter(spread(NEW, math.nan))

    def forward(self, tokens: DeviceTokens, *, with_entropy: bool) -> TokenLogprobs:
        return TokenLogprobs(torch.where(tokens.response_mask, self.logprobs, 0.0), spread(ENTROPY, 0.0))


def spread(values: np.ndarray, elsewhere: float) -> Tensor:
    row = np.full(len(MASK), elsewhere, np.float32)
    row[MASK] = values
    return torch.from_numpy(row)


def microbatch(algo: dict[str, Any], *, old: bool = True) -> tuple[float, StepMetrics, Tensor]:
    """Loss, metrics and gradient under these choices; without `old` the current policy is the old one."""
    config = make_config(Path("nowhere/model"), algo=algo)
    rollout = spread(OLD - np.log(IMPORTANCE), math.nan).numpy()
    packed = PackedTokens(
        token_ids=np.zeros(6, np.int32), response_mask=MASK, rollout_logprobs=rollout, cu_seqlens=np.array([0, 2, 6])
    )
    targets = PolicyTargets(
        advantages=spread(np.array([1.0, -1, -1, -1]), math.nan).numpy(),
        old_logprobs=spread(np.full(4, OLD), math.nan).numpy() if old else None,
        ref_logprobs=spread(NEW - D, math.nan).numpy() if config.needs_reference else None,
    )
    model = Fixed()
    tokens = DeviceTokens.of(packed, torch.device("cpu"))
    denominators = Denominators(tokens=4, sequences=2)
    loss, metrics = policy_microbatch(model, tokens, targets, denominators, PolicyObjective.of(config))
    loss.backward()
    assert model.logprobs.grad is not None
    return loss.item(), metrics, model.logprobs.grad


GEOMETRIC_MEAN = (0.6 * 2.0 * 1.0) ** (1 / 3)
CHOICES: dict[str, tuple[dict[str, Any], float]] = {
    "the default": ({}, LOSSES.mean()),
    "clip_high": ({"clip_high": 0.5}, (-1.5 + 0.8 + 2 + 1) / 4),
    "clip_low": ({"clip_low": 0.5}, (-1.2 + 0.6 + 2 + 1) / 4),
    "dual_clip": ({"dual_clip": 1.5}, (-1.2 + 0.8 + 1.5 + 1) / 4),
    "gspo": ({"policy_loss": "gspo"}, (-1.2 + 3 * GEOMETRIC_MEAN) / 4),
    "cispo": (
        {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.2},
        -(1.2 * NEW[0] - 0.6 * NEW[1] - 1.2 * NEW[2] - NEW[3]) / 4,
    ),
    "sequence_mean": ({"loss_aggregation": "sequence_mean"}, (-1.2 + 3.8 / 3) / 2),
    "constant": ({"loss_aggregation": "constant"}, 2.6 / (2 * LONGEST)),
    "constant_length": ({"loss_aggregation": "constant", "constant_length": 1}, 2.6 / 2),
    "k1": ({"kl_coef": 0.1, "kl_estimator": "k1"}, (LOSSES + 0.1 * D).mean()),
    "k2": ({"kl_coef": 0.1, "kl_estimator": "k2"}, (LOSSES + 0.1 * K2).mean()),
    "k3": ({"kl_coef": 0.1, "kl_estimator": "k3"}, (LOSSES + 0.1 * K3).mean()),
    "k4": ({"kl_coef": 0.1, "kl_estimator": "k4"}, (LOSSES + 0.1 * RATIO * D).mean()),
    "kl_ratio_weighted": (
        {"kl_coef": 0.1, "kl_estimator": "k3", "kl_ratio_weighted": True},
        (LOSSES + 0.1 * RATIO * K3).mean(),
    ),
    "kl_place reward": ({"kl_coef": 0.1, "kl_estimator": "k1", "kl_place": "reward"}, LOSSES.mean()),
    "entropy_coef": ({"entropy_coef": 0.1}, (LOSSES - 0.1 * ENTROPY).mean()),
    "truncated": (
        {"importance_correction": "truncated"},
        (-1.2 * 2 + 0.8 * 0.25 + 2 * 1.5 + 1) / 4,
    ),
    "masked": ({"importance_correction": "masked"}, (0 + 0 + 2 * 1.5 + 1) / 4),
    "importance_cap": (
        {"importance_correction": "truncated", "importance_cap": 1.2},
        (-1.2 * 1.2 + 0.8 * 0.25 + 2 * 1.2 + 1) / 4,
    ),
    "importance_level": (
        {"importance_correction": "truncated", "importance_level": "sequence"},
        (-1.2 * 2 + 3.8 * 0.25 * 1.5) / 4,
    ),
    "a KL is not weighted by the correction": (
        {"importance_correction": "masked", "kl_coef": 0.1, "kl_estimator": "k2"},
        (2 * 1.5 + 1) / 4 + 0.1 * K2.mean(),
    ),
}


@pytest.mark.parametrize(("algo", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_the_loss_is_what_the_key_says(algo: dict[str, Any], expected: float) -> None:
    loss, metrics, gradient = microbatch(algo)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert metrics["policy/loss"].value() == pytest.approx(expected, abs=1e-6)
    assert gradient.isfinite().all()
    assert (gradient[torch.from_numpy(~MASK)] == 0).all()


def test_entropy_ratio_clipping_and_the_distance_to_the_engine_are_logged_whatever_is_optimized() -> None:
    _, metrics, _ = microbatch({})
    values = {name: metric.value() for name, metric in metrics.items()}
    assert values["policy/entropy"] == pytest.approx(1.0)
    assert values["policy/ratio"] == pytest.approx(5.1 / 4)
    assert values["policy/ratio_max"] == pytest.approx(2.0)
    assert values["policy/clip_fraction"] == pytest.approx(2 / 4)  # 1.5 with A > 0, and 0.6 with A < 0
    # The engine's distribution against the learner's at its own samples: k3 of log(pi_rollout / pi_old).
    assert values["policy/engine_kl"] == pytest.approx((IMPORTANCE - 1 - np.log(IMPORTANCE)).mean(), rel=1e-5)
    assert values["policy/engine_logprob_difference"] == pytest.approx(np.abs(np.log(IMPORTANCE)).mean(), rel=1e-5)
    square = IMPORTANCE.sum() ** 2 / (4 * (IMPORTANCE**2).sum())
    assert values["policy/effective_sample_fraction"] == pytest.approx(square, rel=1e-5)
    assert "policy/kl_k1" not in values  # no reference is loaded


def test_without_old_logprobs_every_ratio_is_1_and_the_gradient_that_of_the_policy_gradient() -> None:
    loss, metrics, gradient = microbatch({}, old=False)
    assert loss == pytest.approx((-1 + 1 + 1 + 1) / 4)
    assert gradient[torch.from_numpy(MASK)].tolist() == pytest.approx([-0.25, 0.25, 0.25, 0.25])
    assert metrics["policy/ratio_max"].value() == 1.0
    assert metrics["policy/kl_old"].value() == 0.0


def test_with_a_reference_all_four_estimators_are_logged() -> None:
    _, metrics, _ = microbatch({"log_kl": True})
    expected = {"k1": D, "k2": K2, "k3": K3, "k4": RATIO * D}
    for name, values in expected.items():
        assert metrics[f"policy/kl_{name}"].value() == pytest.approx(values.mean(), abs=1e-6)


def test_the_corrections_report_their_weights_and_what_was_outside() -> None:
    _, metrics, _ = microbatch({"importance_correction": "masked"})
    assert metrics["policy/importance_weight"].value() == pytest.approx((1.5 + 1) / 4)
    assert metrics["policy/importance_outside_fraction"].value() == pytest.approx(2 / 4)
