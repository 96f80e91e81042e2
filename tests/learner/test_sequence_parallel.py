"""One row over several ranks: losses, log-probs and gradients are those of one rank that holds the whole row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import MODEL_TYPES, make_family, write_family
from worlds import make_config, pack_rows, rollout_of, run_world

from rlhf.config.sections import ModelConfig
from rlhf.types import Denominators, PackedTokens, PolicyTargets, ValueTargets, World

pytestmark = pytest.mark.stack

# Norms of queries and keys; capped scores and windows; sinks, windows, experts; chunks, scales by position, experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {}, "gemma2": {}, "gpt_oss": {},
    "llama4_text": {
        "no_rope_layer_interval": 2, "attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.5
    },
}  # fmt: skip
# State spaces, convolutions, linear attention and delta rules in some layers.
WITH_MIXERS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "granitemoehybrid", "nemotron_h", "kimi_linear",
    "lfm2", "lfm2_moe", "falcon_h1", "minimax", "bamba", "jamba", "zamba2", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip
SCALAR = ("qwen3", "gpt_oss")  # critic and reward model too
# In float64, relative to the largest number. Scales by position are quotients in float32.
ROUNDING, IN_FLOAT32 = 1e-9, {"llama4_text": 1e-7, "llama4": 1e-7}


def make_row(vocabulary: int = 120) -> PackedTokens:
    """Six sequences, four of which begin with one prompt; their number of computed tokens is odd."""
    rng = np.random.default_rng(0)
    rollouts = []
    for length, responses in ((20, (40, 14, 11, 3)), (6, (12,)), (2, (1,))):
        question = rng.integers(0, vocabulary, length)
        for more in responses:
            ids = np.concatenate([question, rng.integers(0, vocabulary, more)]).astype(np.int32)
            mask = (np.arange(len(ids)) >= length) & (rng.random(len(ids)) < 0.8)
            mask[-1] = True
            logprobs = np.where(mask, -rng.random(len(ids)) * 4, 0.0)
            rollouts.append(rollout_of(ids, mask, logprobs))
    return pack_rows(rollouts, range(6))


# The second one has fewer tokens than four ranks.
ROWS = {"row": make_row(), "short": make_row().take(np.array([5]))}


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
        load = metrics.get("router/max_load")
        return loss, loss if load is None else load.tokens

    def sft_and_teacher(tokens: Any) -> tuple[Any, Any]:
        logprobs, _, _, teacher_kl = policy(tokens, teacher=policy.as_teacher(tokens), temperature=0.7)
        return teacher_kl.sum() - logprobs.sum() / 60, torch.stack([logprobs, teacher_kl])

    def value(tokens: Any) -> tuple[Any, Any]:
        old, returns = columns(2, tokens)
        loss, metrics = value_microbatch(critic, tokens, ValueTargets(old, returns), Denominators(60, 6, 6), clip=0.5)
        return loss, metrics["critic/value"].total

    def scores(tokens: Any) -> tuple[Any, Any]:
        numbers = reward(tokens)
        return torch.nn.functional.logsigmoid(numbers[0::2].sum() - numbers[1::2].sum()), numbers

    scalar = {} if critic is None else {"value": value, "scores": scores}
    return {"grpo": grpo, "sft and teacher": sft_and_teacher} | scalar


def stay_in_float64() -> None:
    """Some norms and routers compute in float32, whose sums depend on the number of tokens."""

    def cast(name: str) -> None:
        plain = getattr(torch.Tensor, name)

        def float64(x: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = torch.float32 if name == "float" else args[0] if args else kwargs.get("dtype")
            return x if x.dtype == torch.float64 and wanted == torch.float32 else plain(x, *args, **kwargs)

        setattr(torch.Tensor, name, float64)

    for name in ("float", "to", "type"):
        cast(name)


def computed(world: World, folder: Path, families: tuple[str, ...]) -> dict[int, dict[tuple[str, ...], np.ndarray]]:
    """Ranks that share a row -> (family, what) -> numbers and gradients, in float64; of 1, only on rank 0.

    Where two ranks share a row, each of the two data shards computes one row.
    """
    import torch.distributed as dist

    from rlhf.learner.deepspeed_settings import join_world
    from rlhf.learner.policy_model import DeviceTokens, load_policy
    from rlhf.learner.sequence_parallel import SequenceGroup
    from rlhf.learner.value_model import RewardModel, ValueModel, load_scalar_transformer

    stay_in_float64()
    device = join_world("cpu", world)
    worlds = {size: dataclasses.replace(world, sequence_parallel=size) for size in (1, 2, 4)}
    groups = {size: SequenceGroup.of(each) for size, each in worlds.items()}
    found: dict[int, dict[tuple[str, ...], np.ndarray]] = {size: {} for size in worlds}
    for family in families:
        model = ModelConfig(path=str(folder / family), dtype="float32", gradient_checkpointing=family == "qwen3")
        policy: Any = load_policy(model, temperature=0.8).double()
        policy.transformer.config._experts_implementation = "eager"  # torch groups no products in float64
        critic: Any = None
        reward: Any = None
        if family in SCALAR:
            torch.manual_seed(0)
            scalar = load_scalar_transformer(model.path, model, key="x", new_head="random")
            scalar.config._experts_implementation = "eager"
            critic, reward = ValueModel(scalar).double(), RewardModel(scalar).double()
        for size in worlds:
            if size == 1 and world.rank:
                continue  # the others wait
            for name, row in ROWS.items():
                if size == 2 and name != [*ROWS][worlds[size].shard]:
                    continue
                for kind, loss_of in losses_of(policy, critic, reward).items():
                    loss, numbers = loss_of(DeviceTokens.of(row, device, groups[size]))
                    loss.backward()
                    found[size] |= {
                        (family, name, kind, what): x.detach().numpy()
                        for what, x in {"loss": loss, "numbers": numbers}.items()
                    }
            for trained in filter(None, (policy, critic)):
                for name, param in trained.named_parameters():
                    grad = torch.zeros_like(param) if param.grad is None else param.grad
                    if size > 1:
                        dist.all_reduce(grad)
                    found[size][family, type(trained).__name__, name] = grad.numpy().copy()
                trained.zero_grad()
    return found


def differences(folder: Path, families: tuple[str, ...]) -> dict[tuple[Any, ...], float]:
    """(rank, ranks that share a row, family, what) -> the largest relative difference to one rank that holds it."""
    by_rank = run_world(computed, 4, folder, families)
    alone = by_rank[0][1]
    assert {where[0] for where in alone} == set(families)
    return {
        (rank, size, *where): float(np.abs(x - alone[where]).max()) / (float(np.abs(alone[where]).max()) or 1.0)
        for rank, found in enumerate(by_rank)
        for size in (2, 4)
        for where, x in found[size].items()
    }


def test_losses_outputs_and_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    for name, changes in FAMILIES.items():
        make_family(name, num_hidden_layers=2, **changes).save_pretrained(tmp_path / name)
    apart = differences(tmp_path, tuple(FAMILIES))
    wrong = {where: value for where, value in apart.items() if not value <= IN_FLOAT32.get(where[2], ROUNDING)}
    assert not wrong, "\n".join(map(str, wrong.items()))


@pytest.mark.faults
def test_every_family_without_mixers_computes_shared_rows(tmp_path: Path) -> None:
    families = [family for family in MODEL_TYPES if family not in WITH_MIXERS]
    for family in families:
        write_family(family, tmp_path / family)
    apart = differences(tmp_path, tuple(families))
    wrong = {where: value for where, value in apart.items() if not value <= IN_FLOAT32.get(where[2], ROUNDING)}
    assert not wrong, "\n".join(map(str, wrong.items()))


# --- refusals by the ranks, of what no file of the model says ---


class AddsThePreviousToken(torch.nn.Module):
    """A module outside of attention that knows where sequences begin, but not that others hold a part of the row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from rlhf.learner.segments import segments_of_row

        segments = segments_of_row()
        continues = segments.positions()[1][segments.held] > 0
        previous = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + torch.where(continues[:, None], previous, 0.0)


def refusals(world: World, folder: Path, families: tuple[str, ...], changed: str) -> list[str]:
    """The message for each family; `changed`: what is changed of the model that was loaded."""
    from rlhf.learner.deepspeed_settings import join_world
    from rlhf.learner.policy_model import check_packed, load_policy
    from rlhf.learner.sequence_parallel import SequenceGroup

    device, group = join_world("cpu", world), SequenceGroup.of(world)
    messages = []
    for family in families:
        policy = load_policy(ModelConfig(path=str(folder / family), dtype="float32"), temperature=1.0)
        layer: Any = policy.transformer.get_decoder().layers[-1] if changed else None
        if changed == "mixes":
            layer.mlp = torch.nn.Sequential(AddsThePreviousToken(), layer.mlp)
        if changed == "heads":  # one fewer in this layer alone
            attention, width = layer.self_attn, layer.self_attn.head_dim
            attention.num_key_value_groups = 1
            for name in ("q_proj", "k_proj", "v_proj"):
                projection = getattr(attention, name)
                projection.weight = torch.nn.Parameter(projection.weight[:width].detach())
            attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight[:, :width].detach())
        with pytest.raises(ValueError, match=r"^model\.path=the/model: ") as error:
            check_packed(policy, device, dtype="float32", key="model.path", path="the/model", group=group)
        messages.append(str(error.value).removeprefix("model.path=the/model: "))
    return messages


@pytest.mark.parametrize(
    ("families", "changed", "reason"),
    [
        (("qwen3",), "mixes", "it mixes tokens outside of attention. Set cluster.sequence_parallel to 1."),
        (("qwen3",), "heads", "it has 1 attention heads in a layer. Set cluster.sequence_parallel to 1."),
        pytest.param(
            WITH_MIXERS, "", "mixes tokens outside of attention. Set cluster.sequence_parallel to 1.",
            marks=pytest.mark.faults,
        ),
    ],
    ids=["mixes tokens", "heads of one layer", "all families with mixers"],
)  # fmt: skip
def test_ranks_that_cannot_compute_a_row_together_refuse_the_model(
    families: tuple[str, ...], changed: str, reason: str, tmp_path: Path
) -> None:
    for family in families:
        write_family(family, tmp_path / family)
    for messages in run_world(refusals, 2, tmp_path, families, changed, sequence_parallel=2):
        for message in messages:
            assert message.startswith("2 learners cannot share a sequence of this model, since it")
            assert message.endswith(reason)
