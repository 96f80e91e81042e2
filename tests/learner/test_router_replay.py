"""Recorded experts: they compute in old policy, update and reference, with the weights of the learner's own router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import make_family
from torch import Tensor, nn
from torch.nn import functional as F
from worlds import column_of_shard, make_config, make_groups, plan_first_epoch, run_world, share_of_loss

from rlhf.algo.packing import filler, pack
from rlhf.config.sections import Checkpointing, ModelConfig
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, load_policy, transformer_outputs
from rlhf.learner.replay import RecordShape, check_replay, replay_recorded
from rlhf.learner.routing import choices_of_row, experts_of
from rlhf.log.reductions import merge_metrics
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PackedTokens, PolicyTargets, World

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
REPLAYED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "granitemoe", "granitemoehybrid",
    "gpt_oss", "jamba", "minimax", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "lfm2_moe",
    "nemotron_h", "kimi_linear", "dots1", "gemma4_text",
)  # fmt: skip
REFUSED = {
    "phimoe": "its routers choose experts in a way that recorded ones cannot replace",
    "llama4_text": "its routers choose experts in a way that recorded ones cannot replace",
    "qwen3": "the model has no experts",
}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "deepseek_v2": {**GROUPED, "num_experts": 8},
}
SEQUENCES = [np.array(x, np.int32) for x in ([1, 2, 3, 4, 9], [1, 2, 3, 7, 8, 2], [5, 6, 7], [5, 6, 3, 3])]
MASKS = [np.arange(len(x)) > 1 for x in SEQUENCES]
TEMPERATURE = 0.8


def load(model_type: str, path: Path, checkpointing: Checkpointing = True) -> PolicyModel:
    make_family(model_type, **CHANGES.get(model_type, {})).save_pretrained(path)
    model = ModelConfig(path=str(path), dtype="float32", gradient_checkpointing=checkpointing)
    policy = load_policy(model, temperature=TEMPERATURE)
    replay_recorded(policy.transformer)
    return policy


def shape_of(policy: PolicyModel) -> RecordShape:
    return check_replay(policy, policy.transformer, CPU, path="x")


def recorded(shape: RecordShape) -> list[np.ndarray]:
    """Random experts for each sequence, as the engine numbers layers; the same where sequences begin alike."""
    by_beginning: dict[bytes, np.ndarray] = {}
    rng, rows = np.random.default_rng(0), []
    for ids in SEQUENCES:
        row = []
        for end in range(1, len(ids) + 1):
            drawn = rng.permuted(np.tile(np.arange(shape.experts), (shape.layers, 1)), axis=1)[:, : shape.chosen]
            row.append(by_beginning.setdefault(ids[:end].tobytes(), drawn.astype(np.uint8)))
        rows.append(np.stack(row))
    return rows


def packed(rows: list[int], shape: RecordShape) -> PackedTokens:
    if not rows:
        return filler()
    experts = recorded(shape)
    return pack([SEQUENCES[i] for i in rows], [MASKS[i] for i in rows], experts=[experts[i] for i in rows])


def gradients(policy: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in policy.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("model_type", REPLAYED)
def test_the_recorded_experts_compute_and_the_router_weighs_them(model_type: str, tmp_path: Path) -> None:
    policy = load(model_type, tmp_path)
    shape = shape_of(policy)
    weights: list[Tensor] = []
    for experts in experts_of(policy.transformer).values():
        experts.register_forward_pre_hook(lambda _, args: weights.append(args[2]))
    rows = [0, 1, 2, 3]
    tokens = DeviceTokens.of(packed(rows, shape), CPU)
    assert tokens.segments.expand is not None
    with choices_of_row(policy.transformer) as choices:
        policy(tokens)
    assert tokens.segments.experts is not None
    for layer, number in zip(choices, shape.sparse, strict=True):
        assert torch.equal(layer.chosen, tokens.segments.experts[:, number].long())
    assert all((layer > 0).all() for layer in weights)
    # what the router would choose by itself, recorded, changes nothing
    plain = pack([SEQUENCES[0]])
    with choices_of_row(policy.transformer) as choices:
        live = policy(DeviceTokens.of(plain, CPU)).logprobs
    own = np.zeros((len(SEQUENCES[0]), shape.layers, shape.chosen), np.uint16)
    for layer, number in zip(choices, shape.sparse, strict=True):
        own[:, number] = layer.chosen.numpy()
    assert torch.equal(policy(DeviceTokens.of(pack([SEQUENCES[0]], experts=[own]), CPU)).logprobs, live)


@pytest.mark.parametrize(("model_type", "why"), REFUSED.items())
def test_other_models_are_refused_by_name(model_type: str, why: str, tmp_path: Path) -> None:
    policy = load(model_type, tmp_path)
    with pytest.raises(ValueError, match=r"^learner\.router_replay=rollout") as error:
        check_replay(policy, policy.transformer, CPU, path="the/model")
    assert str(error.value) == f"learner.router_replay=rollout with model.path=the/model: {why}. Set it to none."


def normalized(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


# Weights [U, E] from router logits s and the mask I of the recorded experts.
WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mixtral": lambda s, mask: normalized(mask * s.exp()),  # the formula of the paper
    "qwen3_moe": lambda s, mask: mask * s.softmax(-1),
    "gpt_oss": lambda s, mask: normalized(mask * s.exp()),
    "deepseek_v2": lambda s, mask: mask * s.softmax(-1),
    "deepseek_v3": lambda s, mask: 2.5 * normalized(mask * s.sigmoid()),
}


class Dense(nn.Module):
    """A layer of experts in which all compute all tokens, and a sum weighs them."""

    def __init__(self, block: Any, weights: Callable[[Tensor, Tensor], Tensor], chosen: np.ndarray) -> None:
        super().__init__()
        self.block, self.formula, self.chosen = block, weights, torch.from_numpy(chosen.astype(np.int64))

    def forward(self, x: Tensor) -> Any:
        states = x.flatten(0, 1)
        router = self.block.router if hasattr(self.block, "router") else self.block.gate
        logits = F.linear(states, router.weight, getattr(router, "bias", None))
        weights = self.formula(logits, torch.zeros_like(logits).scatter(1, self.chosen, 1.0))
        one = torch.ones(len(states), 1)
        out = sum(
            weights[:, e : e + 1] * self.block.experts(states, torch.full((len(states), 1), e), one).view_as(states)
            for e in range(logits.shape[1])
        )
        if hasattr(self.block, "shared_experts"):
            out = out + self.block.shared_experts(states)
        out = out.view_as(x)
        return (out, logits) if type(self.block).__name__.startswith("GptOss") else out


@pytest.mark.parametrize("checkpointing", [False, "selective", True])
@pytest.mark.parametrize("model_type", WEIGHTS)
def test_log_probs_and_gradients_equal_those_of_a_dense_computation(
    model_type: str, checkpointing: Checkpointing, tmp_path: Path
) -> None:
    policy = load(model_type, tmp_path, checkpointing)
    shape, rows = shape_of(policy), [0, 1, 2, 3]
    experts = recorded(shape)
    ours = policy(DeviceTokens.of(packed(rows, shape), CPU)).logprobs
    (ours * torch.linspace(-1, 1, len(ours))).sum().backward()
    found = gradients(policy.transformer)

    plain = make_family(model_type, **CHANGES.get(model_type, {})).eval()
    parts = []
    for row in rows:
        blocks = {}
        for number in shape.sparse:
            layer = plain.model.layers[number]
            blocks[number] = layer.mlp
            layer.mlp = Dense(layer.mlp, WEIGHTS[model_type], experts[row][:, number])
        ids = torch.from_numpy(SEQUENCES[row]).long()
        log_pi = (plain(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        logprobs = log_pi.gather(1, ids[1:, None]).squeeze(1)
        parts.append(torch.cat([torch.zeros(1), torch.where(torch.from_numpy(MASKS[row])[1:], logprobs, 0.0)]))
        for number, block in blocks.items():
            plain.model.layers[number].mlp = block
    exact = torch.cat(parts)
    assert (ours - exact).abs().max() < 1e-5
    (exact * torch.linspace(-1, 1, len(exact))).sum().backward()
    expected = gradients(plain)
    assert found.keys() == expected.keys()
    norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() < 1e-5 * norm, name
    routers = [name for name in expected if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == len(shape.sparse)
    assert all(expected[name].norm() > 1e-4 * norm for name in routers)


def test_order_and_microbatches_change_neither_loss_nor_gradient(tmp_path: Path) -> None:
    policy = load("qwen3_moe", tmp_path)
    results = []
    for rows in ([[0, 1, 2, 3]], [[3, 0, 2, 1]], [[2], [1, 0], [3], []]):
        policy.zero_grad()
        parts = []
        for row in rows:
            loss, metrics = share_of_loss(policy, packed(row, shape_of(policy)), row)
            loss.backward()
            parts.append(metrics)
        grads = torch.cat([grad.flatten() for grad in gradients(policy).values()])
        results.append((merge_metrics(parts)["policy/loss"].value(), grads))
    (loss, grads), *others = results
    for other, others_grads in others:
        assert other == pytest.approx(loss, rel=1e-5)
        assert (others_grads - grads).norm() < 1e-5 * grads.norm()


def test_a_row_without_a_record_is_computed_by_the_routers_choice(tmp_path: Path) -> None:
    policy = load("qwen3_moe", tmp_path)
    shape, plain = shape_of(policy), load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), temperature=0.8)
    tokens = DeviceTokens.of(pack(SEQUENCES, MASKS), CPU)
    live = policy(tokens).logprobs
    assert torch.equal(live, plain(tokens).logprobs)
    replayed = DeviceTokens.of(packed([0, 1, 2, 3], shape), CPU)
    assert (policy(replayed).logprobs - live).abs().max() > 1e-4
    assert torch.equal(plain(replayed).logprobs, live)  # a critic or a teacher computes with its own experts
    assert transformer_outputs(plain.transformer, replayed).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: x[:, :-1], "3 layers and 2 experts per token"),
        (lambda x: x[..., :1], "4 layers and 1 experts per token"),
        (lambda x: np.where(x == 3, 4, x), "expert 4"),
        (np.zeros_like, "one expert twice for a token"),
    ],
    ids=["layers", "experts per token", "ids", "layers that were never written"],
)
def test_a_record_of_another_model_is_noticed(change: Any, problem: str) -> None:
    shape = RecordShape(layers=4, sparse=(1, 2, 3), chosen=2, experts=4)
    whole = recorded(shape)
    shape.check(pack(SEQUENCES, MASKS, experts=[whole[0], None, *whole[2:]]))
    shape.check(pack(SEQUENCES, MASKS))
    with pytest.raises(ValueError, match=r"^learner\.router_replay") as error:
        shape.check(pack(SEQUENCES, MASKS, experts=[change(each) for each in whole]))
    assert str(error.value) == (
        f"learner.router_replay=rollout: the engine has recorded {problem}, and the learner's model has 4 layers and 2 "
        "experts per token out of 4. They do not compute the same model. Set it to none."
    )


def train_with_records(world: World, model: Path, zero_stage: int) -> dict[str, Any]:
    """Old and reference log-probs and the first updates of a real learner whose rollouts bring random experts."""
    from rlhf.learner.policy import Learner

    algo = {"kl_coef": 0.1, "kl_estimator": "k2"}
    section = {"epochs_per_step": 2, "zero_stage": zero_stage, "optimizer": {"lr": 1e-2}}
    config = make_config(model, algo=algo, learner=section, cluster={"learners": world.size})
    # no config of a run says this on CPU, where no engine returns experts
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"router_replay": "rollout"})})
    learner = Learner(config, world)
    groups = make_groups(groups=2, samples=2, vocabulary=250, longest=20, seed=3)
    batch, minibatches, advantages = plan_first_epoch(config, groups)
    drawn = np.tile(np.arange(4, dtype=np.uint8), (len(batch.tokens.token_ids), 4, 1))
    experts = np.random.default_rng(0).permuted(drawn, axis=2)[..., :2]
    tokens = replace(batch.tokens, experts=experts)
    seen: dict[str, Any] = {}
    learner.start_step(batch.tokens, [minibatches] * 2)
    live, _ = learner.logprobs()
    learner.start_step(tokens, [minibatches] * 2)
    old, ref = learner.logprobs()
    assert live is not None
    assert old is not None
    assert ref is not None
    seen["replayed"] = float(np.abs(old - live).max())
    seen["kl"] = float(np.abs(old - ref).max())
    columns = [column_of_shard(batch, minibatches, world.rank, numbers) for numbers in (old, ref)]
    outcomes = learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), *columns))
    seen["ratio_max"] = outcomes[0].metrics["policy/ratio_max"].value()
    seen["later"] = outcomes[1].metrics["policy/ratio_max"].value()
    try:
        learner.start_step(replace(tokens, experts=experts[:, :1]), [minibatches])
    except ValueError as error:
        seen["error"] = str(error)
    learner.close()
    return seen


@pytest.mark.stack
@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 2), (2, 3)])
def test_on_the_first_step_the_ratio_is_exactly_1_and_the_kl_exactly_0(
    ranks: int, zero_stage: int, tmp_path: Path
) -> None:
    make_family("qwen3_moe").save_pretrained(tmp_path)
    for seen in run_world(train_with_records, ranks, tmp_path, zero_stage):
        assert seen["replayed"] > 1e-4
        assert seen["kl"] == 0.0
        assert seen["ratio_max"] == 1.0
        assert seen["later"] > 1.001
        assert "recorded 1 layers" in seen["error"]
