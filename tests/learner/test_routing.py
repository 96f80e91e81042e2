"""Mixtures of experts: the load of the experts is counted, and the balancing loss is that of each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documented import check_documented
from model_families import make_family
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from worlds import make_config, run_world

from rlhf.algo.packing import filler, pack
from rlhf.config.sections import ModelConfig
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, load_policy
from rlhf.learner.routing import Routing
from rlhf.learner.update import on_host, policy_microbatch
from rlhf.log.reductions import ExpertLoad, merge_metrics, to_values
from rlhf.types import Denominators, PackedTokens, PolicyTargets, World

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BALANCED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "granitemoe", "granitemoehybrid",
    "gpt_oss", "jamba", "phimoe", "minimax",
)  # fmt: skip
BIASED = ("deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "lfm2_moe", "nemotron_h", "kimi_linear", "dots1")
OTHERS = ("deepseek_v2", "gemma4_text")  # transformers has no balancing loss for them
CHANGES = {"gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}}
SEQUENCES = [np.array(ids, np.int32) for ids in ([3, 4, 5, 6, 7, 9], [3, 4, 5, 8, 9], [7, 6, 5], [1, 9, 2, 3, 4, 4, 4])]
COEF = 0.3


def load(model_type: str, path: Path, **changes: Any) -> PolicyModel:
    make_family(model_type, **changes).save_pretrained(path)
    return load_policy(ModelConfig(path=str(path), dtype="float32", gradient_checkpointing=True), temperature=1.0)


def routing_of(policy: PolicyModel, sequences: list[np.ndarray]) -> Routing:
    routing: Routing | None = policy(DeviceTokens.of(pack(sequences), CPU), for_update=True).routing
    assert routing is not None
    return routing


def loss_of_transformers(model: Any, sequence: np.ndarray, k: int) -> Tensor:
    """Its loss is k for an even load; of each layer by itself, since it would pool all layers."""
    ids = torch.from_numpy(sequence).long()[None]
    logits = model.base_model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    losses = [load_balancing_loss_func((layer,), layer.shape[-1], k) for layer in logits]
    return torch.stack(losses).mean() / k


@pytest.mark.parametrize("model_type", BALANCED)
def test_the_balancing_loss_is_that_of_transformers_for_each_sequence(model_type: str, tmp_path: Path) -> None:
    policy = load(model_type, tmp_path)
    alone = make_family(model_type).eval()
    routing = routing_of(policy, SEQUENCES)
    layers, experts = routing.load.shape
    computed = 18  # of 21 tokens: three begin alike
    assert (routing.load.sum(1) == 2 * computed).all()
    assert routing.balance is not None
    expected = torch.stack([loss_of_transformers(alone, sequence, 2) for sequence in SEQUENCES])
    torch.testing.assert_close(routing.balance, expected, rtol=1e-5, atol=0)
    (routing.balance * torch.arange(4)).sum().backward()
    (expected * torch.arange(4)).sum().backward()
    routers = 0
    for (name, param), own in zip(policy.transformer.named_parameters(), alone.parameters(), strict=True):
        if own.grad is not None and own.grad.any():
            torch.testing.assert_close(param.grad, own.grad, rtol=1e-3, atol=1e-6, msg=name)
            routers += own.shape[0] == experts
    assert routers >= layers


@pytest.mark.parametrize("model_type", BIASED + OTHERS)
def test_routers_without_a_balancing_loss_have_their_load_counted(model_type: str, tmp_path: Path) -> None:
    policy = load(model_type, tmp_path, **CHANGES.get(model_type, {}))
    routing = routing_of(policy, SEQUENCES)
    assert routing.balance is None
    assert not policy.has_balancing_loss
    assert (routing.load.sum(1) == 2 * 18).all()


def share_of_loss(policy: PolicyModel, tokens: PackedTokens, sequences: int = 3) -> tuple[Tensor, Any]:
    config = make_config(Path("nowhere"), learner={"router_balance_coef": COEF})
    zeros = np.zeros(len(tokens.token_ids), np.float32)  # without an advantage, all the loss that is left balances
    targets = PolicyTargets(advantages=zeros, old_logprobs=None, ref_logprobs=None)
    sizes = Denominators(tokens=14, rollouts=sequences, sequences=sequences)
    loss, metrics = policy_microbatch(policy, DeviceTokens.of(tokens, CPU), targets, sizes, config)
    return loss, on_host(metrics)


def test_the_loss_and_the_metrics_do_not_depend_on_the_microbatches(tmp_path: Path) -> None:
    policy = load("qwen3_moe", tmp_path)
    masks = [np.arange(len(x)) > 1 for x in SEQUENCES]
    masks[2][:] = False  # not trained
    results = []
    for rows in ([[0, 3, 2, 1]], [[0], [1, 3], [2], []]):
        policy.zero_grad()
        parts = []
        for row in rows:
            packed = pack([SEQUENCES[i] for i in row], [masks[i] for i in row]) if row else filler()
            loss, metrics = share_of_loss(policy, packed)
            loss.backward()
            parts.append(metrics)
        values = to_values(merge_metrics(parts))
        check_documented([values], logged={"experts"})
        grads = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        results.append((values, grads))
    (whole, grads), (split, grads_of_parts) = results
    balance = routing_of(policy, SEQUENCES).balance
    assert balance is not None
    assert whole["policy/loss"] == pytest.approx(COEF * balance[[0, 1, 3]].mean().item(), rel=1e-5)
    assert whole["router/balance_loss"] == pytest.approx(balance[[0, 1, 3]].mean().item(), rel=1e-5)
    for name in ("policy/loss", "router/balance_loss", "router/load_entropy"):
        assert split[name] == pytest.approx(whole[name], rel=0.2 if "load" in name else 1e-5)
    assert (grads - grads_of_parts).norm() < 1e-5 * grads.norm()


def test_a_minibatch_in_which_every_response_is_masked_has_no_balancing_loss(tmp_path: Path) -> None:
    masks = [np.zeros(len(x), bool) for x in SEQUENCES]
    loss, _ = share_of_loss(load("qwen3_moe", tmp_path), pack(SEQUENCES, masks), sequences=0)
    assert loss.item() == 0.0


def test_the_load_of_two_layers_is_merged_before_it_is_reduced() -> None:
    parts = [np.array([[4, 0], [1, 3]]), np.array([[0, 4], [2, 2]])]
    one, two = (ExpertLoad(part, "max") for part in parts)
    assert one.value() == 2.0
    assert one.merge(two).value() == 1.25
    assert ExpertLoad(parts[0], "entropy").value() == pytest.approx((0 + 0.8112781) / 2)
    assert ExpertLoad(parts[0] + parts[1][::-1], "entropy").value() == pytest.approx((0.8112781 + 0.5435644) / 2)
    assert ExpertLoad(np.array([[7]]), "entropy").value() == ExpertLoad(np.array([[7]]), "max").value() == 1.0
    assert np.isnan(ExpertLoad(np.zeros((2, 2)), "max").value())


def load_with_a_coefficient(world: World, model: Path) -> str:
    from rlhf.learner.policy import Learner

    with pytest.raises(ValueError, match=r"learner\.router_balance_coef") as error:
        Learner(make_config(model, learner={"router_balance_coef": COEF}, cluster={"device": "cpu"}), world)
    return str(error.value)


@pytest.mark.stack
def test_a_balancing_loss_for_a_dense_model_is_refused(tmp_path: Path) -> None:
    make_family("qwen3").save_pretrained(tmp_path)
    (message,) = run_world(load_with_a_coefficient, 1, tmp_path)
    assert message.startswith("learner.router_balance_coef=0.3: the routers of ")
    assert message.endswith("have no balancing loss (it is dense, or a bias balances them). Set it to 0.")
