"""One row over several ranks: losses, log-probs and gradients are those of one rank that holds the whole row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import make_family
from worlds import make_config, pack_rows, rollout_of, run_world

from rlhf.types import Denominators, PackedTokens, PolicyTargets, ValueTargets, World

pytestmark = pytest.mark.stack

# Norms of queries and keys; capped scores and windows; sinks, windows, experts; learned positions; chunks, scales by
# position, experts; latent attention with values of another width.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {}, "gemma2": {}, "gpt_oss": {}, "gpt2": {},
    "llama4_text": {"attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.5},
    "deepseek_v3": {"v_head_dim": 48},
}  # fmt: skip
SCALAR = ("qwen3", "gemma2", "gpt_oss")  # with a class of one number
# Float64, relative to the largest number; and of families that compute a part in float32 (position's scale, router).
ROUNDING, IN_FLOAT32 = 1e-9, {"llama4_text": 1e-7, "deepseek_v3": 1e-6}


def make_row(vocabulary: int = 120) -> PackedTokens:
    """Six sequences, four of which begin with one prompt; their number of computed tokens is odd."""
    rng = np.random.default_rng(0)
    rollouts = []
    for length, responses in ((20, (40, 14, 11, 3)), (5, (12,)), (3, (1,))):
        question = rng.integers(0, vocabulary, length)
        for more in responses:
            ids = np.concatenate([question, rng.integers(0, vocabulary, more)]).astype(np.int32)
            mask = (np.arange(len(ids)) >= length) & (rng.random(len(ids)) < 0.8)
            logprobs = np.where(mask, -rng.random(len(ids)) * 4, 0.0)
            rollouts.append(rollout_of(ids, mask, logprobs))
    return pack_rows(rollouts, range(6))


ROW = make_row()
SHORT = make_row().take(np.array([5]))  # fewer tokens than four ranks need for one each, but for one


def losses_of(policy: Any, critic: Any, reward: Any) -> dict[str, Callable[[Any], tuple[Any, Any]]]:
    """Name -> tokens on the device -> the loss and what it is computed from, for every kind of training."""
    from rlhf.learner.critic import value_microbatch
    from rlhf.learner.update import policy_microbatch

    def columns(count: int, tokens: Any) -> list[np.ndarray]:
        return list(np.random.default_rng(1).normal(size=(count, len(tokens.token_ids))))

    def grpo(tokens: Any) -> tuple[Any, Any]:
        algo = {"kl_coef": 0.1, "kl_estimator": "k3", "loss_aggregation": "sequence_mean", "entropy_coef": 0.01}
        balance = {"router_balance_coef": 0.1} if policy.has_balancing_loss else {}
        config = make_config(Path("nowhere"), algo=algo, learner=balance)
        advantages, old, ref = columns(3, tokens)
        targets = PolicyTargets(advantages, -np.abs(old), -np.abs(ref))
        loss, metrics = policy_microbatch(policy, tokens, targets, Denominators(60, 6, 6), config)
        load = metrics.get("router/load")
        return loss, [] if load is None else vars(load)

    def value(tokens: Any) -> tuple[Any, Any]:
        old, returns = columns(2, tokens)
        loss, _ = value_microbatch(critic, tokens, ValueTargets(old, returns), Denominators(60, 6, 6), clip=0.5)
        return loss, critic(tokens)

    def teacher(tokens: Any) -> tuple[Any, Any]:
        loss = policy(tokens, teacher=policy.as_teacher(tokens), temperature=0.7).teacher_kl
        return loss.sum() + policy(tokens).logprobs.square().sum(), loss

    def sft(tokens: Any) -> tuple[Any, Any]:
        logprobs = policy(tokens).logprobs
        return -logprobs.sum() / 60, logprobs

    def scores(tokens: Any) -> tuple[Any, Any]:
        numbers = reward(tokens)
        return torch.nn.functional.logsigmoid(numbers[0::2].sum() - numbers[1::2].sum()), numbers

    scalar = {} if critic is None else {"value": value, "scores": scores}
    return {"grpo": grpo, "teacher": teacher, "sft": sft} | scalar


def gradients_of(model: Any) -> dict[str, Any]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def differences(world: World, folder: Path, families: tuple[str, ...]) -> dict[tuple[str, str, str], float]:
    """(family, row and loss, number) -> the largest relative difference between the group and this rank alone."""
    import torch.distributed as dist

    from rlhf.config.sections import ModelConfig
    from rlhf.learner.deepspeed_settings import join_world
    from rlhf.learner.policy_model import DeviceTokens, load_policy
    from rlhf.learner.sequence_parallel import SequenceGroup
    from rlhf.learner.value_model import RewardModel, ValueModel, load_scalar_transformer

    in_float32 = torch.Tensor.float  # some norms sum in it, and in an order of their own
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else in_float32(x)  # type: ignore[method-assign]
    world = dataclasses.replace(world, sequence_parallel=world.size)
    device = join_world("cpu", world)
    group = SequenceGroup(world)
    apart: dict[tuple[str, str, str], float] = {}
    for family in families:
        model = ModelConfig(path=str(folder / family), dtype="float32", gradient_checkpointing=True)
        policy: Any = load_policy(model, temperature=0.8).double()
        policy.transformer.config._experts_implementation = "eager"  # torch groups no products in float64
        critic: Any = None
        reward: Any = None
        if family in SCALAR:
            torch.manual_seed(0)
            scalar = load_scalar_transformer(model.path, model, key="x", new_head="random")
            scalar.config._experts_implementation = "eager"
            critic, reward = ValueModel(scalar).double(), RewardModel(scalar).double()
        for row_name, row in (("row", ROW), ("short", SHORT)):
            for name, loss_of in losses_of(policy, critic, reward).items():
                trained = critic if name in ("value", "scores") else policy
                results = []
                for ranks in (None, group):
                    loss, numbers = loss_of(DeviceTokens.of(row, device, ranks))
                    loss.backward()
                    grads = gradients_of(trained)
                    if ranks is not None:
                        for name_of, param in trained.named_parameters():
                            if param.requires_grad:
                                dist.all_reduce(grads.setdefault(name_of, torch.zeros_like(param)))
                    results.append({"loss": loss.detach(), "numbers": numbers, **grads})
                alone, together = results
                for key, value in together.items():
                    expected = alone.get(key, 0.0)
                    numbers = torch.as_tensor(value - expected) if not isinstance(value, dict | list) else None
                    if numbers is None:
                        assert value == expected
                        continue
                    size = float(torch.as_tensor(expected).detach().abs().max()) or 1.0
                    where = family, f"{row_name} {name}", key
                    apart[where] = float(numbers.detach().abs().max()) / size
    return apart


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("families")
    for name, changes in FAMILIES.items():
        layers = {} if name == "llama4_text" else {"num_hidden_layers": 2}
        make_family(name, **layers, **changes).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_outputs_and_gradients_are_those_of_one_rank(ranks: int, families: Path) -> None:
    for apart in run_world(differences, ranks, families, tuple(FAMILIES)):
        assert {where[0] for where in apart} == FAMILIES.keys()
        wrong = {where: value for where, value in apart.items() if not value <= IN_FLOAT32.get(where[0], ROUNDING)}
        assert not wrong, "\n".join(map(str, wrong.items()))
