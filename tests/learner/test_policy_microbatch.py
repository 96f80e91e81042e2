"""Every key of `algo` that the policy's loss reads, by hand: two responses of one and three tokens in a packed row.

    response  ratio to old       advantage   log pi - log pi_ref   pi_old / pi_rollout   entropy
    1         1.5                 1          0.2                   3                     0.5
    2         0.6   2.0   1.0    -1          -0.1   0.4   0.0      0.25   1.5   1.0      1.0   2.0   0.5

With PPO's clip of 0.2 the losses of the tokens are -1.2, and 0.8, 2, 1.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documented import check_documented
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM
from worlds import make_config, make_groups, plan_first_epoch

from rlhf.algo.packing import pack
from rlhf.config.grpo import GRPOConfig
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, PolicyOutput
from rlhf.learner.routing import Routing
from rlhf.learner.update import _binned_ratios, on_host, policy_microbatch, turn_numbers
from rlhf.log.reductions import Mean, StepMetrics, merge_metrics, to_values
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import Denominators, PolicyTargets

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
NOWHERE = Path("nowhere/model")


class Fixed(nn.Module):
    """A policy that says what it is told; masked positions hold NaN."""

    def __init__(self, logprobs: Tensor, entropy: Tensor, routing: Routing | None = None) -> None:
        super().__init__()
        self.routing = routing
        self.logprobs = nn.Parameter(logprobs)
        self.entropy = entropy

    def forward(self, tokens: DeviceTokens, *, for_update: bool) -> PolicyOutput:
        return PolicyOutput(torch.where(tokens.response_mask, self.logprobs, 0.0), self.entropy, self.routing)


def spread(values: np.ndarray, elsewhere: float) -> Tensor:
    row = np.full(len(MASK), elsewhere, np.float32)
    row[MASK] = values
    return torch.from_numpy(row)


def microbatch(algo: dict[str, Any], *, old: bool = True) -> tuple[float, StepMetrics, Tensor]:
    """Loss, metrics and gradient under these choices; without `old` the current policy is the old one."""
    config = make_config(NOWHERE, algo={"importance_correction": "none", **algo})
    rollout = spread(OLD - np.log(IMPORTANCE), math.nan).numpy()
    packed = pack([np.zeros(2), np.zeros(4)], np.split(MASK, [2]), np.split(rollout, [2]))
    targets = PolicyTargets(
        advantages=spread(np.array([1.0, -1, -1, -1]), math.nan).numpy(),
        old_logprobs=spread(np.full(4, OLD), math.nan).numpy() if old else None,
        ref_logprobs=spread(NEW - D, math.nan).numpy() if config.needs_reference else None,
    )
    model = Fixed(spread(NEW, math.nan), spread(ENTROPY, 0.0))
    tokens = DeviceTokens.of(packed, torch.device("cpu"))
    denominators = Denominators(tokens=4, rollouts=2, sequences=2)
    loss, metrics = policy_microbatch(model, tokens, targets, denominators, config)
    loss.backward()
    assert model.logprobs.grad is not None
    return loss.item(), metrics, model.logprobs.grad


GEOMETRIC_MEAN = (0.6 * 2.0 * 1.0) ** (1 / 3)
CHOICES: dict[str, tuple[dict[str, Any], float]] = {
    "no correction": ({}, LOSSES.mean()),
    "clip_high": ({"clip_high": 0.5}, (-1.5 + 0.8 + 2 + 1) / 4),
    "clip_low": ({"clip_low": 0.5}, (-1.2 + 0.6 + 2 + 1) / 4),
    "dual_clip": ({"dual_clip": 1.5}, (-1.2 + 0.8 + 1.5 + 1) / 4),
    "gspo": ({"policy_loss": "gspo"}, (-1.2 + 3 * GEOMETRIC_MEAN) / 4),
    "cispo": (
        {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.2},
        -(1.2 * NEW[0] - 0.6 * NEW[1] - 1.2 * NEW[2] - NEW[3]) / 4,
    ),
    "sapo": (
        {"policy_loss": "sapo", "sapo_tau_positive": 2.0, "sapo_tau_negative": 4.0},
        (-2 / (1 + math.exp(-1.0)) + 1 / (1 + math.exp(1.6)) + 1 / (1 + math.exp(-4.0)) + 1 / 2) / 4,
    ),
    # probabilities 0.55, and 0.22, 0.74, 0.37, of old 0.37
    "dppo_tv": ({"policy_loss": "dppo_tv", "clip_low": 0.1, "clip_high": 0.2}, (-1.5 + 0 + 2 + 1) / 4),
    "sequence_mean": ({"loss_aggregation": "sequence_mean"}, (-1.2 + 3.8 / 3) / 2),
    "constant": ({"loss_aggregation": "constant"}, 2.6 / (2 * LONGEST)),
    "constant_length": ({"loss_aggregation": "constant", "constant_length": 1}, 2.6 / 2),
    "k1": ({"kl_coef": 0.1, "kl_estimator": "k1"}, (LOSSES + 0.1 * D).mean()),
    "k2": ({"kl_coef": 0.1, "kl_estimator": "k2"}, (LOSSES + 0.1 * K2).mean()),
    "k3": ({"kl_coef": 0.1, "kl_estimator": "k3", "kl_ratio_weighted": False}, (LOSSES + 0.1 * K3).mean()),
    "k3 by default": ({"kl_coef": 0.1, "kl_estimator": "k3"}, (LOSSES + 0.1 * RATIO * K3).mean()),
    "k4": ({"kl_coef": 0.1, "kl_estimator": "k4"}, (LOSSES + 0.1 * RATIO * D).mean()),
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
    "importance_floor masked": (
        {"importance_correction": "masked", "importance_floor": 0.2, "importance_cap": 4.0},
        (-1.2 * 3 + 0.8 * 0.25 + 2 * 1.5 + 1) / 4,
    ),
    "importance_floor truncated": (
        {"importance_correction": "truncated", "importance_floor": 0.5},
        (-1.2 * 2 + 0.8 * 0.5 + 2 * 1.5 + 1) / 4,
    ),
    "geometric_mask": ({"geometric_mask": (0.5, 2.0)}, 3.8 / 4),  # of the sequences 3 and 0.375^(1/3) = 0.72
    "geometric_mask and weights": (
        {"geometric_mask": (0.9, 4.0), "importance_correction": "truncated", "kl_coef": 0.1, "kl_estimator": "k2"},
        -1.2 * 2 / 4 + 0.1 * K2.mean(),
    ),
    # ratios to the engine: 4.5, and 0.15, 3, 1
    "old_policy": ({"old_policy": "engine"}, (-1.2 + 0.8 + 3 + 1) / 4),
    "old_policy and a KL": (
        {"old_policy": "engine", "kl_coef": 0.1, "kl_estimator": "k4"},
        (-1.2 + 0.8 + 3 + 1) / 4 + 0.1 * (RATIO * IMPORTANCE * D).mean(),
    ),
    # mean log(engine / policy) of the second sequence: -log(0.15 * 3 * 1) / 3 = 0.27
    "off_policy_mask": ({"off_policy_mask": 0.2}, -1.2 / 4),
    "off_policy_mask above": ({"off_policy_mask": 0.3}, LOSSES.mean()),
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
    assert values["policy/ratio_variance"] == pytest.approx(RATIO.var())
    assert values["policy/clip_fraction"] == pytest.approx(2 / 4)  # 1.5 with A > 0, and 0.6 with A < 0
    # The engine's distribution against the learner's at its own samples: k3 of log(pi_rollout / pi_old).
    assert values["policy/engine_kl"] == pytest.approx((IMPORTANCE - 1 - np.log(IMPORTANCE)).mean(), rel=1e-5)
    assert values["policy/engine_kl/from_0"] == values["policy/engine_kl"]  # all places are below 64
    assert math.isnan(values["policy/engine_kl/from_64"])
    assert values["policy/engine_logprob_difference"] == pytest.approx(np.abs(np.log(IMPORTANCE)).mean(), rel=1e-5)
    square = IMPORTANCE.sum() ** 2 / (4 * (IMPORTANCE**2).sum())
    assert values["policy/effective_sample_fraction"] == pytest.approx(square, rel=1e-5)
    assert "policy/kl_k1" not in values  # no reference is loaded


def test_the_distance_to_the_engine_is_told_apart_by_place_in_the_sequence() -> None:
    lengths, prompt = [70, 5000], 10
    place = np.concatenate([np.arange(length) for length in lengths])
    mask = place >= prompt
    engine = np.where(place >= 4096, -2.0, np.where(place >= 64, -1.5, -1.0)).astype(np.float32)
    packed = pack([np.zeros(length) for length in lengths], np.split(mask, lengths[:1]), np.split(engine, lengths[:1]))
    column = np.full(len(place), -1.0, np.float32)
    model = Fixed(torch.from_numpy(column), torch.zeros(len(place)))
    tokens, config = DeviceTokens.of(packed, torch.device("cpu")), make_config(NOWHERE)
    _, metrics = policy_microbatch(
        model, tokens, PolicyTargets(column, column, None), Denominators(int(mask.sum()), 2, 2), config
    )
    half, one = math.exp(0.5) - 1.5, math.exp(1.0) - 2.0  # k3 where the engine's log-probability is lower by so much
    expected = {0: (54 * 2, 0.0), 64: (6 + 960, half), 1024: (3072, half), 4096: (904, one)}
    for start, (count, kl) in expected.items():
        mean = metrics[f"policy/engine_kl/from_{start}"]
        assert isinstance(mean, Mean)
        assert (mean.weight, mean.value()) == (count, pytest.approx(kl))


def test_every_estimator_of_the_old_policys_kl_is_logged_and_garbage_outside_of_the_mask_leaves_no_trace() -> None:
    _, metrics, _ = microbatch({"log_kl": True})
    d = D - np.log(RATIO)  # old policy against reference
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "k4": d}
    for name, values in expected.items():
        assert metrics[f"policy/kl_{name}"].value() == pytest.approx(values.mean(), rel=1e-5), name


def test_without_old_logprobs_every_ratio_is_1_and_the_gradient_that_of_the_policy_gradient() -> None:
    loss, metrics, gradient = microbatch({}, old=False)
    assert loss == pytest.approx((-1 + 1 + 1 + 1) / 4)
    assert gradient[torch.from_numpy(MASK)].tolist() == pytest.approx([-0.25, 0.25, 0.25, 0.25])
    assert metrics["policy/ratio_max"].value() == 1.0
    assert metrics["policy/kl_old"].value() == 0.0


def test_with_the_engines_policy_as_the_old_one_nothing_is_lost_without_a_pass() -> None:
    options = {"old_policy": "engine", "dual_clip": 2.0}
    (loss, metrics, gradient), (other_loss, others, other_gradient) = (
        microbatch(options, old=given) for given in (True, False)
    )
    assert loss == other_loss
    assert torch.equal(gradient, other_gradient)
    assert metrics["policy/ratio_max"].value() == others["policy/ratio_max"].value() == pytest.approx(4.5)
    # The engine is compared with the learner, not with the old policy of the ratio.
    assert metrics["policy/engine_logprob_difference"].value() == pytest.approx(np.abs(np.log(IMPORTANCE)).mean())
    moved = np.log(RATIO * IMPORTANCE)
    assert others["policy/engine_logprob_difference"].value() == pytest.approx(np.abs(moved).mean())
    assert others["policy/kl_old"].value() == pytest.approx((np.exp(moved) - 1 - moved).mean(), rel=1e-5)


def test_the_corrections_report_their_weights_and_what_was_outside() -> None:
    _, metrics, _ = microbatch({"importance_correction": "masked"})
    assert metrics["policy/importance_weight"].value() == pytest.approx((1.5 + 1) / 4)
    assert metrics["policy/importance_outside_fraction"].value() == pytest.approx(2 / 4)
    _, metrics, _ = microbatch({"geometric_mask": (0.5, 2.0)})
    assert metrics["policy/geometric_mask_fraction"].value() == pytest.approx(1 / 4)
    _, metrics, _ = microbatch({"geometric_mask": (0.5, 2.0), "off_policy_mask": 0.2})
    assert metrics["policy/off_policy_mask_fraction"].value() == pytest.approx(3 / 4)
    masks = {name: metric for name, metric in metrics.items() if "_mask_" in name}
    check_documented([masks], logged={"algo.geometric_mask", "algo.off_policy_mask"})
    _, metrics, _ = microbatch({"dual_clip": 1.5})
    assert metrics["policy/dual_clip_fraction"].value() == pytest.approx(1 / 4)  # ratio 2 with A < 0
    assert "policy/dual_clip_fraction" not in microbatch({})[1]


# --- KL metrics are expectations: each of four tokens stands in the row as often as the old policy samples it ---

OLD_POLICY = np.log(np.array([4, 2, 1, 1]) / 8)
SAMPLED = np.array([0, 0, 0, 0, 1, 1, 2, 3])


def shifted(by: float) -> np.ndarray:
    """[4] log-probs of the old policy after its logits of the first and the last token moved apart."""
    logits = OLD_POLICY + by * np.array([-0.5, 0.0, 0.0, 0.5])
    return logits - np.log(np.exp(logits).sum())


def exact_kl(log_p: np.ndarray, log_q: np.ndarray) -> float:
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def logged_of_a_step(policies: list[np.ndarray], ref: np.ndarray) -> dict[str, float]:
    """Metrics of one training step, with an update at each of these policies on the old policy's samples."""
    config = make_config(NOWHERE, algo={"log_kl": True}, learner={"epochs_per_step": len(policies)})
    old, ref = (x[SAMPLED].astype(np.float32) for x in (OLD_POLICY, ref))
    packed = pack([SAMPLED], [np.ones(8, bool)], [old])
    # With one update per step the old log-probs are not computed before it.
    targets = PolicyTargets(np.ones(8, np.float32), old if config.needs_old_logprobs_pass else None, ref)
    updates = []
    for policy in policies:
        model = Fixed(torch.from_numpy(policy[SAMPLED].astype(np.float32)), torch.zeros(8))
        tokens = DeviceTokens.of(packed, torch.device("cpu"))
        updates.append(policy_microbatch(model, tokens, targets, Denominators(8, 1, 1), config))
    return {name: metric.value() for name, metric in merge_metrics([metrics for _, metrics in updates]).items()}


@pytest.mark.parametrize("shift", [2.0, -2.0, 0.1])
def test_kl_old_is_the_kl_of_the_old_policy_to_the_new_one(shift: float) -> None:
    new = shifted(shift)
    logged = logged_of_a_step([OLD_POLICY, new], OLD_POLICY)
    assert logged["policy/kl_old"] == pytest.approx((0 + exact_kl(OLD_POLICY, new)) / 2, rel=1e-4)


@pytest.mark.parametrize("policies", [[OLD_POLICY], [OLD_POLICY, shifted(2.0), shifted(-2.0), shifted(3.0)]])
@pytest.mark.parametrize("ref", [OLD_POLICY, shifted(1.0)], ids=["at the reference", "away from it"])
def test_kl_k1_to_k4_are_of_the_old_policy_to_the_reference_however_far_the_updates_go(
    policies: list[np.ndarray], ref: np.ndarray
) -> None:
    logged = logged_of_a_step(policies, ref)
    kl = exact_kl(OLD_POLICY, ref)
    for name in ("policy/kl_k1", "policy/kl_k3", "policy/kl_k4"):
        assert logged[name] == pytest.approx(kl, rel=1e-5, abs=0.0), name
    k2 = float((np.exp(OLD_POLICY) * (OLD_POLICY - ref) ** 2 / 2).sum())
    assert logged["policy/kl_k2"] == pytest.approx(k2, rel=1e-5, abs=0.0)
    assert logged["policy/kl_k4"] == logged["policy/kl_k1"]


def test_the_ratio_to_the_engine_has_the_expected_gradient_of_the_learners_own_policy() -> None:
    """By enumeration: tokens stand in the row as often as the engine samples them, and the learner has moved away."""
    advantages = np.array([1.0, -0.5, 2.0, -3.0])
    theta = torch.tensor(shifted(0.7), dtype=torch.float32).requires_grad_()
    log_pi = theta.log_softmax(0)
    engine = OLD_POLICY[SAMPLED].astype(np.float32)
    algo = {"old_policy": "engine", "importance_correction": "none", "clip_low": 0.9, "clip_high": 9.0}
    config = make_config(NOWHERE, algo=algo, learner={"epochs_per_step": 2})
    assert not config.needs_old_logprobs_pass
    model = Fixed(log_pi.detach()[torch.from_numpy(SAMPLED)], torch.zeros(8))
    tokens = DeviceTokens.of(pack([SAMPLED], [np.ones(8, bool)], [engine]), torch.device("cpu"))
    targets = PolicyTargets(advantages[SAMPLED].astype(np.float32), None, None)
    policy_microbatch(model, tokens, targets, Denominators(8, 1, 1), config)[0].backward()
    (ours,) = torch.autograd.grad(log_pi[torch.from_numpy(SAMPLED)], theta, model.logprobs.grad, retain_graph=True)
    (exact,) = torch.autograd.grad(-(log_pi.exp() * torch.from_numpy(advantages)).sum(), theta)
    assert torch.allclose(ours, exact, atol=1e-6)
    assert exact.abs().max() > 0.1


def test_nothing_between_forward_and_backward_waits_for_the_device() -> None:
    """Tensors of the meta device hold no numbers: to read one, as a device would be waited for, raises."""
    everything = {"kl_coef": 0.1, "entropy_coef": 0.1, "importance_correction": "truncated", "dual_clip": 2.0}
    config = make_config(NOWHERE, algo=everything)
    zeros = np.zeros(6, np.float32)
    packed = pack([np.zeros(2), np.zeros(4)], np.split(MASK, [2]))
    meta = torch.device("meta")
    model = Fixed(torch.zeros(6, device=meta), torch.zeros(6, device=meta))
    loss, metrics = policy_microbatch(
        model, DeviceTokens.of(packed, meta), PolicyTargets(zeros, zeros, zeros), Denominators(4, 2, 2), config
    )
    loss.backward()
    assert model.logprobs.grad is not None
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        on_host(metrics)


# What torch refuses on a GPU under use_deterministic_algorithms (torch's page of that function), as far as an update
# could come to call it. cumsum is refused for floating point alone.
REFUSED_ON_GPUS = {"histc", "kthvalue", "median", "nanmedian", "put", "put_", "cumsum", "bincount", "scatter_reduce"}


class Called(TorchDispatchMode):
    """Records the operations that run, forward and backward: those that take floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_what_an_update_runs_on_cpu_too_has_a_deterministic_form_on_a_gpu() -> None:
    with Called() as called:
        microbatch({"kl_coef": 0.1, "log_kl": True, "entropy_coef": 0.1, "importance_correction": "truncated"})
        microbatches(make_config(NOWHERE), old_is_given=True)
    assert "mm" in called.names
    assert called.names & REFUSED_ON_GPUS == set()


def test_ratios_are_counted_in_their_bins_with_those_far_above_in_the_last() -> None:
    bins = _binned_ratios(torch.tensor([0.62, math.nan, 7.0, 1.02, 0.01, 1.53, 1.04]), torch.arange(7) != 1)
    assert {bin: count for bin, count in enumerate(bins.counts.tolist()) if count} == {0: 1, 12: 1, 20: 2, 30: 1, 39: 1}


# --- the pass for old log-probs ---


def microbatches(config: GRPOConfig, *, old_is_given: bool) -> list[tuple[Tensor, list[Tensor], dict[str, float]]]:
    """Loss, gradients and metrics of a small transformer by microbatch, with or without a pass before the update."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    transformer = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    transformer.set_attn_implementation(PACKED)
    model = PolicyModel(transformer, temperature=1.0)
    batch, (minibatch,), advantages = plan_first_epoch(
        config, make_groups(groups=4, samples=4, vocabulary=61, longest=30, seed=2)
    )
    targets = PolicyTargets(broadcast_to_tokens(batch, advantages), None, None)
    results = []
    for rows in minibatch.microbatches[0]:
        packed, own = batch.tokens.take(rows), targets.take(batch.tokens.token_indices(rows))
        near = packed.rollout_logprobs * 0.01 - np.float32(np.log(61))  # to the nearly uniform policy: ratios around 1
        tokens = DeviceTokens.of(dataclasses.replace(packed, rollout_logprobs=near), torch.device("cpu"))
        if old_is_given:
            with torch.no_grad():
                own = dataclasses.replace(own, old_logprobs=model(tokens).logprobs.numpy())
        model.zero_grad(set_to_none=True)
        loss, metrics = policy_microbatch(model, tokens, own, minibatch.denominators, config)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((loss.detach(), gradients, to_values(metrics)))
    return results


@pytest.mark.parametrize("correction", ["truncated", "masked"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lag", [0, 1])
def test_with_one_update_a_step_the_correction_needs_no_pass_and_differs_by_no_bit(
    correction: str, level: str, lag: int
) -> None:
    config = make_config(
        NOWHERE,
        rollout={"max_policy_lag": lag},
        algo={"importance_correction": correction, "importance_level": level},
        learner={"max_tokens_per_microbatch": 128},
    )
    assert not config.needs_old_logprobs_pass
    with_pass, without = (microbatches(config, old_is_given=given) for given in (True, False))
    assert len(without) > 1
    for (loss, gradients, metrics), (other_loss, other_gradients, other_metrics) in zip(
        with_pass, without, strict=True
    ):
        assert metrics == other_metrics
        assert metrics["policy/importance_weight"] != 1.0
        assert torch.equal(loss, other_loss)
        assert any(bool(g.abs().max() > 0) for g in gradients)
        assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))


def test_the_kl_to_the_engine_is_told_by_turn_where_rollouts_have_an_environment() -> None:
    masks = [[0, 1, 1, 0, 1, 0, 0, 1], [0, 0, 1]]
    turns = [0, 1, 1, 0, 2, 0, 0, 3, 0, 0, 1]
    packed = pack([np.zeros(8), np.zeros(3)], [np.array(mask, bool) for mask in masks])
    tokens = DeviceTokens.of(packed, torch.device("cpu"))
    mask = tokens.response_mask
    assert (turn_numbers(mask, tokens.cu_seqlens) * mask).tolist() == turns
    # at the tokens of turn n the learner is n / 10 above the engine, whose log-probs are 0
    above = torch.tensor(turns) / 10
    targets = PolicyTargets(np.ones(11, np.float32), above.numpy(), None)
    model, denominators = Fixed(above, torch.zeros(11)), Denominators(tokens=5, rollouts=2, sequences=2)
    values = {}
    for tools in ((), ("calculator",)):
        config = make_config(NOWHERE).model_copy(update={"tools": tools})
        values[tools] = to_values(policy_microbatch(model, tokens, targets, denominators, config)[1])
    kl = {f"policy/engine_kl/turn_{n}": math.exp(n / 10) - 1 - n / 10 for n in (1, 2, 3)}
    by_turn = {name: value for name, value in values["calculator",].items() if "/turn_" in name}
    assert by_turn == pytest.approx(kl, rel=1e-4)
    assert not any("/turn_" in name for name in values[()])
    check_documented([by_turn], logged={"turns"})
