"""Adam in its two published forms (rlhf/algo/adam.py)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf.algo.adam import set_step

BETAS = (0.9, 0.99)


def gradients(steps: int, size: int = 50) -> list[np.ndarray]:
    """Of very different magnitudes, some far below the epsilon used here."""
    rng = np.random.default_rng(3)
    return [rng.normal(size=size) * 10.0 ** rng.uniform(-8, 1, size=size) for _ in range(steps)]


def epsilon_hat_adam(theta: np.ndarray, steps: list[np.ndarray], *, lr: float, eps: float, weight_decay: float):
    """The formulation before section 2.1 of Kingma & Ba, in float64, with decoupled weight decay."""
    m = np.zeros_like(theta)
    v = np.zeros_like(theta)
    for t, g in enumerate(steps, start=1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        alpha = lr * math.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t)
        theta = theta - lr * weight_decay * theta - alpha * m / (np.sqrt(v) + eps)
    return theta


def train(parameter: torch.nn.Parameter, steps: list[np.ndarray], *, variant: str, lr: float, eps: float, wd: float):
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=BETAS, eps=eps, weight_decay=wd, fused=True)
    for t, gradient in enumerate(steps, start=1):
        set_step(optimizer, lr=lr, adam_step=t, variant=variant, eps=eps, betas=BETAS)
        parameter.grad = torch.from_numpy(gradient).to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_tensorflow_variant_is_epsilon_hat_adam_over_150_steps(weight_decay):
    start, steps = np.linspace(-1, 1, 50), gradients(150)
    expected = epsilon_hat_adam(start, steps, lr=1e-2, eps=1e-5, weight_decay=weight_decay)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        parameter = torch.nn.Parameter(torch.tensor(start, dtype=dtype))
        ours = train(parameter, steps, variant="tensorflow", lr=1e-2, eps=1e-5, wd=weight_decay)
        assert np.abs(ours.numpy() - expected).max() < tolerance


def test_torch_variant_is_torch_adamw_and_not_the_other():
    start, steps = torch.linspace(-1, 1, 50, dtype=torch.float64), gradients(120)
    reference = torch.nn.Parameter(start.clone())
    plain = torch.optim.AdamW([reference], lr=1e-2, betas=BETAS, eps=1e-5, weight_decay=0.1, foreach=False)
    for gradient in steps:
        reference.grad = torch.from_numpy(gradient)
        plain.step()
    ours = train(torch.nn.Parameter(start.clone()), steps, variant="torch", lr=1e-2, eps=1e-5, wd=0.1)
    assert (ours - reference).abs().max() < 1e-12
    other = train(torch.nn.Parameter(start.clone()), steps, variant="tensorflow", lr=1e-2, eps=1e-5, wd=0.1)
    assert (other - reference).abs().max() > 1e-3


def test_the_first_step_shrinks_small_gradients_only_in_the_tensorflow_variant():
    # g = eps: torch moves lr g / (g + eps) = lr / 2; epsilon-hat is eps / sqrt(1 - 0.99) = 10 eps, so lr / 11.
    moved = {}
    for variant in ("torch", "tensorflow"):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        moved[variant] = -float(train(parameter, [np.array([1e-5])], variant=variant, lr=1.0, eps=1e-5, wd=0.0))
    assert moved["torch"] == pytest.approx(1 / 2)
    assert moved["tensorflow"] == pytest.approx(1 / 11)


def test_the_effective_epsilon_decays_to_the_published_one():
    optimizer, at = SimpleNamespace(param_groups=[{}]), []
    for t in (1, 10, 1000, 100_000):
        set_step(optimizer, lr=1.0, adam_step=t, variant="tensorflow", eps=1e-5, betas=(0.9, 0.999))
        at.append(optimizer.param_groups[0]["eps"])
    assert at[0] == pytest.approx(1e-5 / math.sqrt(0.001))
    assert at == sorted(at, reverse=True)
    assert at[-1] == pytest.approx(1e-5)


def test_set_step_writes_every_group_of_anything_that_has_groups():
    wrapper = SimpleNamespace(param_groups=[{"lr": 1.0, "eps": 1.0}, {"lr": 2.0, "eps": 1.0, "name": "embedding"}])
    set_step(wrapper, lr=3e-4, adam_step=1, variant="tensorflow", eps=1e-5, betas=(0.9, 0.75))
    assert [group["lr"] for group in wrapper.param_groups] == [3e-4, 3e-4]
    assert [group["eps"] for group in wrapper.param_groups] == [2e-5, 2e-5]
