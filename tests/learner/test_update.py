"""The learner through the real DeepSpeed engine: first step, Adam variants, schedule, skipped updates, checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import column_of_shard, make_config, make_groups, plan_first_epoch, record_gradients, run_world, save

from rlhf.log.reductions import UpdateOutcome
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, World

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 4, "samples": 4, "vocabulary": 250, "longest": 60, "seed": 5}


def step(learner: Any, config: Any) -> list[UpdateOutcome]:
    """Log-prob passes and updates of one training step, as the loop makes them, on one rank."""
    batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
    learner.start_step(batch.tokens, [minibatches])
    old, ref = (column_of_shard(batch, minibatches, learner.world.rank, numbers) for numbers in learner.logprobs())
    return learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), old, ref))


def start_step(learner: Any, config: Any) -> PolicyTargets:
    """Give the learner the step; the targets of its updates, where the policy of each update is the old one."""
    batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
    learner.start_step(batch.tokens, [minibatches])
    return PolicyTargets(broadcast_to_tokens(batch, advantages), None, None)


# --- the first step ---


def save_wide_model(folder: Path) -> Path:
    """Hidden size 896, as of a 0.5B model, where the same rows in another microbatch differ in bf16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=896, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return folder


def first_step_metrics(world: World, model: Path, checkpointing: bool) -> list[dict[str, float]]:
    from rlhf.learner.policy import Learner

    config = make_config(
        model,
        model={"dtype": "bfloat16", "gradient_checkpointing": checkpointing},
        algo={"kl_coef": 0.1},
        learner={
            "max_tokens_per_microbatch": 200,
            "minibatches_per_epoch": 2,
            "optimizer": {"lr": 1e-3},
        },
        cluster={"device": "cpu", "learners": world.size},
    )
    learner = Learner(config, world)
    return [{name: metric.value() for name, metric in update.metrics.items()} for update in step(learner, config)]


@pytest.mark.parametrize(("learners", "checkpointing"), [(1, True), (2, False)])
def test_on_the_first_update_every_ratio_is_1_and_every_kl_0_exactly_at_hidden_size_896_in_bf16(
    tmp_path: Path, learners: int, checkpointing: bool
) -> None:
    model = save_wide_model(tmp_path / "wide")
    for first, second in run_world(first_step_metrics, learners, model, checkpointing):
        assert first["policy/ratio"] == 1.0
        assert first["policy/ratio_max"] == 1.0
        for name in ("policy/kl_k1", "policy/kl_k2", "policy/kl_k3", "policy/kl_k4", "policy/kl_old"):
            assert first[name] == 0.0, name
        assert first["policy/clip_fraction"] == 0.0
        assert second["policy/ratio_max"] != 1.0  # the first update moved the policy
        assert second["policy/kl_old"] > 0.0
        for name in ("policy/kl_k1", "policy/kl_k2", "policy/kl_k3", "policy/kl_k4"):
            assert second[name] == 0.0, name  # the rollouts are still the old policy's, and that is the reference


# --- Adam ---


def adam_epsilon_hat(weights: torch.Tensor, grads: list[torch.Tensor], *, lr: float, eps: float) -> torch.Tensor:
    """Kingma & Ba, the order of computation given before their section 2.1, in float64."""
    beta1, beta2 = 0.9, 0.95
    theta, m, v = weights.double().clone(), torch.zeros_like(weights).double(), torch.zeros_like(weights).double()
    for t, grad in enumerate(grads, start=1):
        m = beta1 * m + (1 - beta1) * grad.double()
        v = beta2 * v + (1 - beta2) * grad.double() ** 2
        theta -= lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (v.sqrt() + eps)
    return theta


def adam_torch(weights: torch.Tensor, grads: list[torch.Tensor], *, lr: float, eps: float) -> torch.Tensor:
    parameter = torch.nn.Parameter(weights.double().clone())
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.0)
    for grad in grads:
        parameter.grad = grad.double()
        optimizer.step()
    return parameter.detach()


def run_adam(world: World, model: Path, variant: str, updates: int) -> dict[str, Any]:
    """Start and end weights and the gradients between, through ZeRO-2."""
    from rlhf.learner.policy import Learner

    config = make_config(
        model,
        run={"steps": updates},
        learner={
            "max_tokens_per_microbatch": 4096,
            "max_grad_norm": None,
            "optimizer": {"variant": variant, "lr": 1e-4, "eps": 1e-5, "betas": [0.9, 0.95]},
        },
        cluster={"device": "cpu", "learners": world.size},
    )
    learner = Learner(config, world)
    gradients = record_gradients(learner)
    names = ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight")
    start = {name: learner.trained[name].detach().numpy().copy() for name in names}
    targets = start_step(learner, config)
    for _ in range(updates):
        learner.update(targets)
    group = learner.deepspeed.optimizer.param_groups[0]
    return {
        "start": start,
        "end": {name: learner.trained[name].detach().numpy().copy() for name in names},
        "grads": {name: np.stack([g[name] for g in gradients]) for name in names},
        "held": {key: group[key] for key in ("betas", "eps", "weight_decay", "lr")},
    }


@pytest.mark.parametrize("variant", ["tensorflow", "torch"])
def test_adam_through_zero_2_agrees_with_an_independent_implementation_over_100_steps(
    tiny_model_dir: Path, variant: str
) -> None:
    reference, other = (adam_epsilon_hat, adam_torch) if variant == "tensorflow" else (adam_torch, adam_epsilon_hat)
    (run,) = run_world(run_adam, 1, tiny_model_dir / "model", variant, 100)
    held = run["held"]
    assert held["betas"] == (0.9, 0.95)
    assert held["weight_decay"] == 0.0
    assert held["lr"] == 1e-4
    assert held["eps"] == pytest.approx(1e-5 if variant == "torch" else 1e-5 / math.sqrt(1 - 0.95**100))
    differs = 0.0
    for name, weights in run["start"].items():
        start, grads = torch.from_numpy(weights), list(torch.from_numpy(run["grads"][name]))
        expected = reference(start, grads, lr=1e-4, eps=1e-5)
        moved = (expected - start).abs().max().item()
        assert moved > 1e-3
        torch.testing.assert_close(torch.from_numpy(run["end"][name]).double(), expected, rtol=0, atol=1e-3 * moved)
        differs = max(differs, (other(start, grads, lr=1e-4, eps=1e-5) - expected).abs().max().item())
    assert differs > 1e-5  # the two variants are not the same thing here


# --- schedule and skipped updates ---


def whole_weights(learner: Any) -> dict[str, np.ndarray]:
    """Every parameter, gathered at ZeRO-3; iterating a learner yields what it would send to the engines."""
    return {name: tensor.float().numpy().copy() for name, tensor in learner}


def run_with_a_poisoned_update(world: World, model: Path, stage: int) -> dict[str, Any]:
    from rlhf.learner.policy import Learner

    config = make_config(
        model,
        run={"steps": 4},
        learner={
            "zero_stage": stage,
            "optimizer": {"variant": "tensorflow", "lr": 1e-3},
            "schedule": {"name": "cosine", "warmup_steps": 1},
            "max_tokens_per_microbatch": 300,
        },
        cluster={"device": "cpu", "learners": world.size, "sequence_parallel": world.sequence_parallel},
    )
    learner = Learner(config, world)
    targets = start_step(learner, config)
    advantages = targets.advantages.copy()
    advantages[np.flatnonzero(advantages)[-1]] = np.nan  # one token, on one rank
    poisoned = replace(targets, advantages=advantages)
    rates = []
    before: dict[str, np.ndarray] = {}
    after: dict[str, np.ndarray] = {}
    for update in range(4):
        if update == 1:
            before = whole_weights(learner)
        if update == 2:
            (outcome,) = learner.skip_updates(1)
            assert not outcome.taken
        else:
            (outcome,) = learner.update(poisoned if update == 1 else targets)
            assert outcome.taken == (update != 1)
        if update == 2:
            after = whole_weights(learner)
        rates.append(outcome.metrics["learner/lr"].value())
    return {
        "rates": rates,
        "unmoved": all(np.array_equal(before[name], after[name]) for name in learner.trained),
        "adam_steps": learner.adam_steps,
        "updates": learner.updates_done,
        "finite": all(np.isfinite(w).all() for w in whole_weights(learner).values()),
        "eps": learner.deepspeed.optimizer.param_groups[0]["eps"],
    }


@pytest.mark.parametrize(("stage", "shared"), [(0, 1), (2, 1), (3, 1), (0, 2)])
def test_a_non_finite_gradient_of_one_rank_and_a_skipped_step_consume_the_schedule_but_not_adams_step(
    tiny_model_dir: Path, stage: int, shared: int
) -> None:
    model = tiny_model_dir / "model"
    for run in run_world(run_with_a_poisoned_update, 2, model, stage, sequence_parallel=shared):
        assert run["unmoved"]
        assert run["finite"]
        assert (run["updates"], run["adam_steps"]) == (4, 2)
        # u = 1..4, w = 1: warm-up to the peak, then (1 + cos(pi p)) / 2 at p = 1/3, 2/3, 1
        assert run["rates"] == pytest.approx([1e-3, 0.75e-3, 0.25e-3, 0.0], abs=1e-12)
        assert run["eps"] == pytest.approx(1e-8 / math.sqrt(1 - 0.95**2))


def weights_after_a_step_at_lr_0(world: World, model: Path) -> bool:
    from rlhf.learner.policy import Learner

    config = make_config(model, learner={"optimizer": {"lr": 0.0, "weight_decay": 0.1}})
    learner = Learner(config, world)
    before = {name: p.detach().clone() for name, p in learner.trained.items()}
    learner.update(start_step(learner, config))
    return all(torch.equal(before[name], p) for name, p in learner.trained.items())


def test_with_lr_0_nothing_moves(tiny_model_dir: Path) -> None:
    assert run_world(weights_after_a_step_at_lr_0, 1, tiny_model_dir / "model") == [True]


# --- checkpoints and export ---


def checkpoint_config(model: Path, world: World, stage: int) -> Any:
    return make_config(
        model,
        learner={
            "zero_stage": stage,
            "optimizer": {"variant": "tensorflow", "lr": 1e-3},
            "max_tokens_per_microbatch": 300,
        },
        cluster={"device": "cpu", "learners": world.size, "sequence_parallel": world.sequence_parallel},
    )


def train_and_save(world: World, model: Path, folder: Path) -> dict[str, np.ndarray]:
    """Two updates, a checkpoint, an export, two more updates: the weights at the end."""
    from rlhf.learner.policy import Learner

    config = checkpoint_config(model, world, 2)
    learner = Learner(config, world)
    targets = start_step(learner, config)
    for _ in range(2):
        learner.update(targets)
    if world.rank == 0:
        (folder / "checkpoint").mkdir(parents=True)
    torch.distributed.barrier()
    save(learner, folder / "checkpoint")
    learner.export(str(folder / "export"), str(model))
    sequence = np.arange(5, 60, dtype=np.int32)
    canary = learner.canary([sequence])[0]
    for _ in range(2):
        learner.update(targets)
    return {"canary": canary} | whole_weights(learner)


def resume_and_train(world: World, model: Path, folder: Path, stage: int) -> dict[str, np.ndarray]:
    from rlhf.learner.policy import Learner

    config = checkpoint_config(model, world, stage)
    learner = Learner(config, world)
    learner.load(str(folder / "checkpoint"))
    again = folder / f"again-{world.size}-{stage}-{world.sequence_parallel}"
    again.mkdir(exist_ok=True)
    save(learner, again)
    assert (learner.adam_steps, learner.updates_done) == (2, 2)
    targets = start_step(learner, config)
    for _ in range(2):
        learner.update(targets)
    return whole_weights(learner)


@pytest.mark.private
def test_a_checkpoint_continues_the_same_run_with_other_learners_another_zero_stage_and_shared_rows(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = tiny_model_dir / "model"
    whole = run_world(train_and_save, 2, model, tmp_path)[0]
    canary = whole.pop("canary")
    for learners, stage, shared in ((1, 2, 1), (2, 3, 1), (1, 0, 1), (2, 2, 2)):
        resumed = run_world(resume_and_train, learners, model, tmp_path, stage, sequence_parallel=shared)[0]
        case = f"{learners}-{stage}-{shared}"
        for name, expected in whole.items():
            np.testing.assert_allclose(resumed[name], expected, rtol=0, atol=2e-6, err_msg=f"{name} {case}")
        check_same_state(tmp_path / "checkpoint", tmp_path / f"again-{case}")
    assert {f.suffix for f in (tmp_path / "checkpoint").rglob("*") if f.is_file()} == {".safetensors", ".json"}
    exported_logprobs_agree(tmp_path / "export", canary)


def weights_after_loading(world: World, model: Path, folder: Path, stage: int) -> dict[str, np.ndarray]:
    """What a learner in bfloat16 computes with after it has trained, saved, trained on, and loaded.

    The update after the load is the one after the save, bit for bit.
    """
    from rlhf.learner.policy import Learner

    config = make_config(
        model,
        model={"dtype": "bfloat16"},
        learner={"zero_stage": stage, "offload_optimizer": stage == 3, "optimizer": {"lr": 1e-3}},
        cluster={"device": "cpu", "learners": world.size},
    )
    learner = Learner(config, world)
    targets = start_step(learner, config)
    (folder / "start").mkdir(exist_ok=True)
    save(learner, folder / "start")
    learner.update(targets)
    first = whole_weights(learner)
    save(learner, folder)
    learner.update(targets)
    expected = whole_weights(learner)
    torch.distributed.barrier()
    learner.load(str(folder / "start"))  # which has no moments: they are 0 again
    learner.update(targets)
    for name, values in whole_weights(learner).items():
        np.testing.assert_array_equal(values, first[name], err_msg=name)
    learner.load(str(folder))
    loaded = whole_weights(learner)
    learner.update(targets)
    for name, values in whole_weights(learner).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    return loaded


@pytest.mark.parametrize("stage", [1, 3])
def test_after_a_load_in_bf16_the_model_computes_with_the_rounded_master_weights(
    tiny_model_dir: Path, tmp_path: Path, stage: int
) -> None:
    from rlhf.learner.rank_checkpoint import WEIGHTS, SliceReader

    by_rank = run_world(weights_after_loading, 2, tiny_model_dir / "model", tmp_path, stage)
    reader = SliceReader(tmp_path, WEIGHTS, ranks=range(2))
    for name, values in by_rank[1].items():
        master = reader.read(name, 0, values.size).view(values.shape)
        np.testing.assert_array_equal(values, master.bfloat16().float().numpy(), err_msg=name)
        np.testing.assert_array_equal(values, by_rank[0][name])
        assert not torch.equal(master, master.bfloat16().float()) or values.size < 200, name


def check_same_state(first: Path, second: Path) -> None:
    """Weights and moments of two checkpoints are equal bit for bit, whatever ranks hold them at whatever stage."""
    from rlhf.learner.rank_checkpoint import MOMENTS, WEIGHTS, LearnerIndex, SliceReader

    indices = [LearnerIndex.read(folder) for folder in (first, second)]
    assert indices[0].shapes == indices[1].shapes
    for kind in (WEIGHTS, *MOMENTS):
        readers = [
            SliceReader(folder, kind, ranks=range(index.ranks))
            for folder, index in zip((first, second), indices, strict=True)
        ]
        for name, shape in indices[0].shapes.items():
            values = [reader.read(name, 0, int(np.prod(shape))) for reader in readers]
            assert torch.equal(*values), f"{kind} {name} {second}"
            assert values[0].any() or name.endswith("bias")


def exported_logprobs_agree(folder: Path, canary: np.ndarray) -> None:
    """The exported model gives in transformers the log-probs that the learner gave."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(5, 60)
    with torch.no_grad():
        log_softmax = torch.log_softmax(net(input_ids=ids[None]).logits[0, :-1], -1)
    logprobs = log_softmax.gather(-1, ids[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(canary[1:], logprobs, rtol=0, atol=1e-5)
    assert canary[0] == 0.0
    assert AutoTokenizer.from_pretrained(folder).decode([40]) != ""
