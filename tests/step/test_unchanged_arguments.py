"""No function of algo/ or step/ changes what it is given: numpy and torch arrays share memory, and `.double()` of a
float64 tensor is the same tensor."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from worlds import group_of, make_config, make_ppo_config, rollout_of

from rlhf.algo import (
    advantages,
    distillation,
    kl,
    layer_names,
    logprobs,
    lora,
    losses,
    numerics,
    own_functions,
    packing,
    schedules,
)
from rlhf.config.teacher import TeacherConfig
from rlhf.step import advantages as step_advantages
from rlhf.step import batch as step_batch
from rlhf.step import minibatches
from rlhf.types import StepBatch, Support

PACKAGE = Path(__file__).parent.parent.parent / "rlhf"
WRITE = {  # their purpose is to write into an argument
    "algo.adam.set_step": "the groups of the optimizer",
    "algo.lora.adapt": "the layers of the model",
    "algo.kernels.launch": "outputs of a kernel (Triton, on GPUs alone)",
    "algo.kernels.tile_softmax": "its three outputs",
    "algo.kernels.tile_gradient": "the gradient of the tile",
}
ON_GPU = {f"algo.kernels.{name}" for name in ("rms_norm", "rotary", "gated_silu")}  # tests/algo/test_kernels.py
NAN = math.nan

# Two segments of 3 and 4 tokens, of which 2 and 3 were sampled.
BOUNDS = torch.tensor([0, 3, 7])
MASK = torch.tensor([False, True, True, False, True, True, True])


def writes_into_all(logprobs: Tensor, **given: Any) -> Tensor:
    """A policy loss of the user that computes in place wherever it can."""
    loss = -logprobs * given["advantages"].clone()
    for column in given.values():
        column.zero_()
    return loss


def centred_in_place(rewards: Tensor, groups: Tensor) -> Tensor:
    """An advantage of the user."""
    groups.zero_()
    return rewards.sub_(rewards.mean())


def batch_of(*rewards: float | None) -> StepBatch:
    """Two groups of three rollouts, each of a prompt of two tokens and one more sampled one than the one before."""
    ids = [np.arange(3 + i, dtype=np.int32) for i in range(6)]
    masks = [np.arange(len(x)) > 1 for x in ids]
    rollouts = [rollout_of(x, mask, -0.1 * x) for x, mask in zip(ids, masks, strict=True)]
    groups = [group_of(rollouts[:3], rewards[:3]), group_of(rollouts[3:], rewards[3:])]
    return step_batch.make_batch(groups, mask_truncated=True)


def calls(dtype: torch.dtype) -> dict[str, list[partial[Any]]]:
    """Calls of each public function, with floating-point arguments of this type."""
    torch.manual_seed(0)
    real = np.float64 if dtype == torch.float64 else np.float32

    def t(*values: float) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def column(*, gradient: bool = False) -> Tensor:
        return torch.randn(7, dtype=dtype).sub_(2).requires_grad_(gradient)

    rewards, groups, lengths = t(1, 0, NAN, 2, 2, 5), torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([3, 1, 2, 4, 2, 2])
    kinds = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline")
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    policy_losses: list[Any] = ["ppo", "gspo", "cispo", "sapo", "dppo_tv", writes_into_all]
    hidden, weight = torch.randn(7, 4, dtype=dtype, requires_grad=True), torch.randn(9, 4, dtype=dtype)
    head = distillation.HeadInput(hidden.detach(), weight.requires_grad_(), t(*range(9)).requires_grad_(), 1.5, 3.0)
    teacher = distillation.HeadInput(torch.randn(5, 4, dtype=dtype), torch.randn(8, 4, dtype=dtype), None, 1.0, None)
    support = logprobs.TokenSupport(torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0, 0, 3, 3, 3, 3, 3, 3]))
    ids, masks = [np.arange(3), np.arange(4)], [np.arange(3) > 0, np.arange(4) > 1]
    experts = [np.zeros((3, 1, 2), np.uint8), np.ones((4, 1, 2), np.uint8)]
    supports = [None, Support.of(np.arange(2), np.array([0, 0, 2, 0]))]
    packed = packing.pack(ids, masks, [np.zeros(3, real), np.zeros(4, real)], supports, experts)
    counts, starts = np.array([3, 4, 5]), np.array([2, 2, 2])

    folder = Path("nowhere")
    grpo = make_config(folder, algo={"kl_coef": 0.1, "kl_place": "reward", "kl_estimator": "k1"})
    ppo = make_ppo_config(
        folder, algo={"reward_clip": 1.0, "whiten_rewards": "shift", "kl_coef": 0.1, "kl_place": "reward"}
    )
    batch = batch_of(1.0, 0.0, None, 2.0, 2.0, 0.1 + 0.2)
    rows = np.ones(6, bool)
    old, ref, other = (-np.random.default_rng(0).random((3, len(batch.tokens.token_ids)))).astype(real)
    per_rollout = np.array([1, 0, 0, 2, 2, 0.5], real)
    teach = TeacherConfig.model_construct(coef=0.5, reward="add")
    linears = SimpleNamespace(named_modules=lambda: [("q_proj", nn.Linear(2, 2))], get_output_embeddings=lambda: None)

    adapted = lora.AdaptedLinear(nn.Linear(2, 2), rank=1, scale=1.0, seed=0)

    def with_adapters_off(model: nn.Module) -> None:
        with lora.adapters_off(model):
            pass

    return {
        "algo.advantages.advantages_of_kind": [
            partial(advantages.advantages_of_kind, kind, rewards, groups, rewards_before_kl=before, lengths=tokens)
            for kind in kinds
            for before in (None, t(1, 0, 3, 2, 2, 5), t(1, 1, 1, 2, 2, 5))
            for tokens in (None, lengths)
        ],
        "algo.advantages.group_advantages": [partial(advantages.group_advantages, rewards, normalize_std=True)],
        "algo.advantages.rloo_advantages": [partial(advantages.rloo_advantages, rewards)],
        "algo.advantages.maximum_likelihood_advantages": [partial(advantages.maximum_likelihood_advantages, rewards)],
        "algo.advantages.reinforce_plus_plus_advantages": [
            partial(advantages.reinforce_plus_plus_advantages, rewards, ids, lengths=tokens, normalize_std=std)
            for ids in (None, groups)
            for tokens in (None, lengths)
            for std in (True, False)
        ],
        "algo.advantages.distillation_advantages": [
            partial(advantages.distillation_advantages, column(), column(), coef=0.5)
        ],
        "algo.advantages.token_rewards": [partial(advantages.token_rewards, t(1, 2), column(), MASK, BOUNDS)],
        "algo.advantages.gae": [partial(advantages.gae, column(), column(), MASK, BOUNDS, gamma=0.9, lam=0.9)],
        "algo.advantages.whiten": [partial(advantages.whiten, column(), MASK, shift_mean=b) for b in (True, False)],
        "algo.advantages.explained_variance": [partial(advantages.explained_variance, column(), column(), MASK)],
        "algo.distillation.teacher_kl": [
            partial(distillation.teacher_kl, hidden, head, teacher, MASK, BOUNDS, expand=expand)
            for expand in (None, torch.arange(7))
        ],
        "algo.kl.kl_per_token": [
            partial(kl.kl_per_token, column(gradient=True), column(), estimator=name, old_logprobs=column(), **options)
            for name in kl.KL_ESTIMATORS
            for options in ({}, {"response_mask": MASK, "ratio_weighted": name == "k3"})
        ],
        "algo.layer_names.is_named": [partial(layer_names.is_named, "a.b", "b")],
        "algo.layer_names.is_adapted": [partial(layer_names.is_adapted, "a.b", targets=["b"], exclude=["c"])],
        "algo.layer_names.last_parts": [partial(layer_names.last_parts, ["a.b", "c.a"])],
        "algo.logprobs.token_logprobs": [
            partial(
                logprobs.token_logprobs, hidden, weight, torch.arange(7), MASK, BOUNDS, expand=expand, head_bias=bias,
                logit_cap=cap, temperature=0.9, with_entropy=entropy, support=among, tiles=(2, 4),
            )
            for expand in (None, torch.arange(7))
            for bias in (None, head.bias)
            for cap in (None, 2.0)
            for entropy in (True, False)
            for among in (None, support)
        ],
        "algo.logprobs.response_states": [partial(logprobs.response_states, MASK, BOUNDS)],
        "algo.lora.linear_names": [partial(lora.linear_names, linears, targets=["q_proj"], exclude=[])],
        "algo.lora.has_adapters": [partial(lora.has_adapters, nn.Linear(2, 2))],
        "algo.lora.adapters_off": [partial(with_adapters_off, adapted)],
        "algo.losses.policy_loss": [
            partial(
                losses.policy_loss, column(gradient=True), old_logprobs=column(), advantages=column(),
                response_mask=MASK.clone(), kind=kind, cu_seqlens=BOUNDS.clone(), rollout_logprobs=column(),
                dual_clip=3.0 if kind in ("ppo", "gspo") else None, **bounds,
            )
            for kind in policy_losses
        ],
        "algo.losses.value_loss": [
            partial(losses.value_loss, column(gradient=True), column(), column(), MASK, clip=clip)
            for clip in (None, 0.2)
        ],
        "algo.losses.importance_weights": [
            partial(losses.importance_weights, column(), column(), MASK, BOUNDS, mode=mode, level=level)
            for mode in ("none", "truncated", "masked")
            for level in ("token", "sequence")
        ],
        "algo.losses.geometric_outside": [
            partial(losses.geometric_outside, column(), column(), MASK, BOUNDS, low=0.9, high=1.1)
        ],
        "algo.losses.off_policy_outside": [
            partial(losses.off_policy_outside, column(), column(), column(), MASK, BOUNDS, threshold=0.1)
        ],
        "algo.losses.aggregate": [
            partial(
                losses.aggregate, column(gradient=True), MASK, BOUNDS, torch.tensor([2, 3]), aggregation=aggregation,
                tokens=5, rollouts=2, constant_length=4,
            )
            for aggregation in ("token_mean", "sequence_mean", "constant")
        ],
        "algo.numerics.bounded_exp": [partial(numerics.bounded_exp, column(gradient=True))],
        "algo.numerics.full_precision": [partial(numerics.full_precision, column())],
        "algo.numerics.has_kernels": [partial(numerics.has_kernels, column())],
        "algo.numerics.add_rows": [partial(numerics.add_rows, weight.detach(), torch.arange(9) % 4, 4)],
        "algo.numerics.masked": [partial(numerics.masked, column(gradient=True), MASK)],
        "algo.numerics.segment_ids": [partial(numerics.segment_ids, BOUNDS, 7)],
        "algo.numerics.segment_counts": [partial(numerics.segment_counts, MASK, BOUNDS)],
        "algo.numerics.segment_sums": [partial(numerics.segment_sums, column(gradient=True), BOUNDS)],
        "algo.numerics.segment_means": [partial(numerics.segment_means, column(gradient=True), MASK, BOUNDS)],
        "algo.own_functions.check_policy_loss": [
            partial(own_functions.check_policy_loss, lambda logprobs, *, response_mask, **_: -logprobs)
        ],
        "algo.own_functions.check_advantage": [partial(own_functions.check_advantage, centred_in_place)],
        "algo.own_functions.own_advantages": [
            partial(own_functions.own_advantages, centred_in_place, t(1, 0, 2), torch.tensor([0, 0, 1]))
        ],
        "algo.packing.draw_minibatches": [partial(packing.draw_minibatches, 5, minibatches=2, seed=0, step=0, epoch=0)],
        "algo.packing.bundle_samples": [partial(packing.bundle_samples, counts, "aab", starts, max_tokens=9, ranks=1)],
        "algo.packing.bundle_sizes": [partial(packing.bundle_sizes, [[0, 1], [2]], counts, starts)],
        "algo.packing.pack_microbatches": [
            partial(packing.pack_microbatches, counts, max_tokens=9, ranks=2, costs=costs)
            for costs in (None, np.array([3, 2, 1], real))
        ],
        "algo.packing.sequence_cost": [partial(packing.sequence_cost, np.array([3, 2, 1], real))],
        "algo.packing.pack": [
            partial(packing.pack, *arrays)
            for columns in ((ids, masks, [np.zeros(3, real), np.zeros(4, real)], supports, experts),)
            for arrays in (columns, [column[:1] for column in columns])
        ],
        "algo.packing.filler": [partial(packing.filler)],
        "algo.packing.shared_beginnings": [partial(packing.shared_beginnings, packed)],
        "algo.schedules.learning_rate": [partial(schedules.learning_rate, 3, total_updates=5, lr=0.1, name="cosine")],
        "step.advantages.penalize_kl": [partial(step_advantages.penalize_kl, batch, rows, old, ref, grpo.algo)],
        "step.advantages.step_advantages": [
            partial(step_advantages.step_advantages, batch, rewards, kind, over)
            for kind in (*kinds, f"{__file__}:centred_in_place")
            for over in ("responses", "tokens")
            for rewards in (batch.rewards, batch.rewards + 0.1)
        ],
        "step.advantages.teach": [
            partial(step_advantages.teach, batch, other, old, ref, rows, teacher)
            for teacher in (teach, TeacherConfig.model_construct(coef=0.5, reward="replace"))
        ],
        "step.advantages.make_controller": [partial(step_advantages.make_controller, ppo.algo, 0.1)],
        "step.advantages.response_kl": [partial(step_advantages.response_kl, batch, old, ref)],
        "step.advantages.mean_over_responses": [partial(step_advantages.mean_over_responses, batch, old)],
        "step.advantages.assign_credit": [
            partial(step_advantages.assign_credit, batch, other, old, ref, kl_coef=coef, algo=ppo.algo)
            for coef in (0.0, 0.1)
        ],
        "step.batch.make_batch": [
            partial(step_batch.make_batch, [group_of([rollout_of(range(3)), rollout_of(range(4))], [1.0, None])],
                    mask_truncated=masks)
            for masks in (True, False)
        ],
        "step.batch.sum_over_responses": [partial(step_batch.sum_over_responses, batch, old)],
        "step.batch.broadcast_to_tokens": [partial(step_batch.broadcast_to_tokens, batch, per_rollout)],
        "step.batch.non_finite_rollouts": [partial(step_batch.non_finite_rollouts, batch, rows, old=old, ref=None)],
        "step.minibatches.rows_with_gradient": [
            partial(minibatches.rows_with_gradient, batch, per_rollout, make_config(folder))
        ],
        "step.minibatches.plan_epochs": [
            partial(minibatches.plan_epochs, batch, grpo, step=0, rows_to_compute=some) for some in (None, rows)
        ],
    }  # fmt: skip


def contents(value: Any) -> Any:
    """Everything that a call could change of a value, as one that compares."""
    if isinstance(value, Tensor):
        return contents(value.detach().numpy())
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, nn.Module):
        return contents([*value.state_dict().items(), {k: v for k, v in vars(value).items() if k[0] != "_"}])
    if isinstance(value, dict):
        return [(key, contents(x)) for key, x in value.items()]
    if isinstance(value, list | tuple):
        return [contents(x) for x in value]
    if dataclasses.is_dataclass(value) or isinstance(value, Support):
        return contents(vars(value))
    return repr(value)


def tensors_with_gradient(result: Any) -> list[Tensor]:
    values: Iterable[Any] = result if isinstance(result, list | tuple) else [result]
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def public_functions() -> set[str]:
    return {
        f"{path.parent.name}.{path.stem}.{node.name}"
        for folder in ("algo", "step")
        for path in (PACKAGE / folder).glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_"
    }


def test_the_table_has_every_public_function() -> None:
    assert calls(torch.float32).keys() | WRITE | ON_GPU == public_functions()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_function_changes_what_it_is_given(dtype: torch.dtype) -> None:
    changed = set()
    for name, of_function in calls(dtype).items():
        for call in of_function:
            before = contents([call.args, call.keywords])
            result = call()
            for tensor in tensors_with_gradient(result):
                tensor.sum().backward(retain_graph=True)
            if contents([call.args, call.keywords]) != before:
                changed.add(name)
    assert changed == set()
