"""One set of hyper-parameters gives one gradient: any number of learners, any budget, any ZeRO stage, any packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import (
    make_config,
    make_groups,
    plan_first_epoch,
    random_column,
    record_gradients,
    relative_error,
    rows_of_minibatch,
    run_world,
)

from rlhf.config.sections import Checkpointing
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, World

pytestmark = pytest.mark.stack

GROUPS = {"groups": 4, "samples": 4, "vocabulary": 250, "longest": 60, "seed": 3}
BUDGETS = (128, 300, 4096)
STAGES = (0, 1, 2, 3)


def config_for(
    model: Path, *, learners: int, budget: int, stage: int, dtype: str = "float32", reduced: str = "bfloat16",
    shared: int = 1, checkpointing: Checkpointing = False,
) -> Any:  # fmt: skip
    return make_config(
        model,
        model={"dtype": dtype, "gradient_checkpointing": checkpointing},
        algo={"kl_coef": 0.1, "kl_estimator": "k3", "loss_aggregation": "sequence_mean", "entropy_coef": 0.01},
        learner={
            "max_tokens_per_microbatch": budget,
            "zero_stage": stage,
            "reduce_dtype": reduced,
            "minibatches_per_epoch": 2,
            "optimizer": {"lr": 0.0},
        },
        cluster={"device": "cpu", "learners": learners, "sequence_parallel": shared},
    )


def collect_gradients(
    world: World, model: Path, budgets: tuple[int, ...], stages: tuple[int, ...], dtype: str, reduced: str = "bfloat16",
    checkpointing: Checkpointing = False,
) -> Any:  # fmt: skip
    """(stage, budget) -> gradients of the first minibatch by name, on this rank, through the real DeepSpeed engine."""
    from rlhf.learner.policy import Learner
    from rlhf.learner.policy_model import load_policy

    by_case = {}
    groups = make_groups(**GROUPS)
    for stage in stages:
        for budget in budgets:
            config = config_for(
                model, learners=world.size, budget=budget, stage=stage, dtype=dtype, reduced=reduced,
                shared=world.sequence_parallel, checkpointing=checkpointing,
            )  # fmt: skip
            learner = Learner(config, world)
            seen = record_gradients(learner)
            with learner.loading():  # at stage 3 a share of each parameter, from the first byte on
                loaded = load_policy(config.model, temperature=1.0)
            assert all((p.numel() == 0) == (stage == 3) for p in loaded.parameters())
            batch, minibatches, advantages = plan_first_epoch(config, groups)
            old, ref = random_column(batch, 1), random_column(batch, 2)
            learner.start_step(batch.tokens, [minibatches[:1]])
            learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), old, ref))
            (by_case[stage, budget],) = seen
    return by_case


def plain_gradients(model: Path, dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    """The same minibatch by the papers' formulas on full logits, a sequence at a time, without any of our code."""
    from transformers import AutoModelForCausalLM

    config = config_for(model, learners=1, budget=4096, stage=2)
    groups = make_groups(**GROUPS)
    rollouts = [sample.rollout for group in groups for sample in group.samples]
    batch, minibatches, advantages = plan_first_epoch(config, groups)
    old, ref = (np.split(random_column(batch, seed), batch.tokens.cu_seqlens[1:-1]) for seed in (1, 2))
    rows = rows_of_minibatch(minibatches[0])
    net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    total = torch.zeros(())
    for row in rows:
        (sequence,) = rollouts[row].sequences
        ids = torch.from_numpy(sequence.token_ids).long()
        logits = net(input_ids=ids[None]).logits[0, :-1].float()
        log_softmax = torch.log_softmax(logits, -1)
        mask = torch.from_numpy(sequence.response_mask)[1:]
        logprobs = log_softmax.gather(-1, ids[1:, None])[:, 0][mask]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)[mask]
        old_row, ref_row = (torch.from_numpy(x[row])[1:][mask] for x in (old, ref))
        weight = (old_row - torch.from_numpy(sequence.rollout_logprobs)[1:][mask]).exp().clamp(max=2.0)
        ratio = (logprobs - old_row).exp()
        advantage = float(np.float32(advantages[row]))
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        d = logprobs - ref_row
        per_token = -weight * surrogate + 0.1 * ratio * ((-d).exp() - 1 + d) - 0.01 * entropy
        total = total + per_token.mean() / len(rows)
    total.backward()
    return {name: p.grad.float().numpy() for name, p in net.named_parameters()}


def whole_and_tiled(world: World, model: Path) -> Any:
    """The gradients by stage and budget, and by stage with MLPs in tiles, of which ranks have different numbers."""
    from rlhf.learner import tiles

    whole = collect_gradients(world, model, BUDGETS, STAGES, "float32")
    tiles.MLP_TILE = {"cpu": 16}
    tiled = collect_gradients(world, model, (300,), STAGES, "float32", checkpointing="tiled")
    return whole | {(stage, "tiled"): gradients for (stage, _), gradients in tiled.items()}


def test_the_gradient_is_the_plain_one_for_1_and_2_learners_3_budgets_and_every_zero_stage(
    tiny_model_dir: Path,
) -> None:
    model = tiny_model_dir / "model"
    expected = plain_gradients(model)
    assert all(np.abs(g).max() > 0 for g in expected.values())
    for learners in (1, 2):
        for rank, by_case in enumerate(run_world(whole_and_tiled, learners, model)):
            assert len(by_case) == (len(BUDGETS) + 1) * len(STAGES)
            for case, gradients in by_case.items():
                assert relative_error(gradients, expected) < 2e-5, (learners, rank, case)


@pytest.mark.parametrize(("learners", "stages"), [(2, STAGES), (4, (3,))], ids=["one_shard", "two_shards"])
def test_the_gradient_is_the_plain_one_where_two_learners_share_each_row(
    tiny_model_dir: Path, learners: int, stages: tuple[int, ...]
) -> None:
    model = tiny_model_dir / "model"
    expected = plain_gradients(model)
    by_rank = run_world(collect_gradients, learners, model, (64,), stages, "float32", sequence_parallel=2)
    for rank, by_case in enumerate(by_rank):
        for case, gradients in by_case.items():
            assert relative_error(gradients, expected) < 2e-5, (rank, case)


def test_with_two_learners_and_bf16_the_gradient_of_the_head_is_the_plain_one(tiny_model_dir: Path) -> None:
    model = tiny_model_dir / "model"
    head = "model.embed_tokens.weight"  # tied
    expected = plain_gradients(model, torch.bfloat16)[head]
    exact = plain_gradients(model)[head]
    noise = np.linalg.norm(expected - exact) / np.linalg.norm(exact)  # what bf16 itself costs
    for by_case in run_world(collect_gradients, 2, model, (300,), (1, 2, 3), "bfloat16"):
        for case, gradients in by_case.items():
            assert np.linalg.norm(gradients[head] - exact) / np.linalg.norm(exact) < 1.5 * noise + 1e-3, case


def test_reduced_in_float32_the_gradients_of_a_bf16_model_do_not_depend_on_the_stage(tiny_model_dir: Path) -> None:
    """Stage 1 adds up microbatches before ranks, 2 and 3 ranks before microbatches; bfloat16 rounds each sum."""
    model = tiny_model_dir / "model"
    apart = {}
    for reduced in ("float32", "bfloat16"):
        by_case, _ = run_world(collect_gradients, 2, model, (128,), (1, 2, 3), "bfloat16", reduced)
        first = by_case[1, 128]
        apart[reduced] = max(relative_error(by_case[stage, 128], first) for stage in (2, 3))
    assert apart["float32"] < 2e-6 < 1e-4 < apart["bfloat16"]


def test_one_learner_copies_no_gradient_into_a_bucket_and_rounds_none(tiny_model_dir: Path) -> None:
    ((buckets, by_case),) = run_world(buckets_of_one_learner, 1, tiny_model_dir / "model")
    assert buckets == [1, 1]  # stage 1 in bfloat16 has none
    assert max(relative_error(by_case[stage, 128], by_case[1, 128]) for stage in (2, 3)) < 2e-6


def buckets_of_one_learner(world: World, model: Path) -> Any:
    """Elements of the buffers that DeepSpeed allocates, and the gradients by stage."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    seen: list[int] = []
    for optimizer in (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        plain = optimizer.__init__

        def init(self: Any, *args: Any, plain: Any = plain, **kwargs: Any) -> None:
            seen.append(kwargs["reduce_bucket_size"])
            plain(self, *args, **kwargs)

        optimizer.__init__ = init
    return seen, collect_gradients(world, model, (128,), (1, 2, 3), "bfloat16")
