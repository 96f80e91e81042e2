"""Training on fixed examples: the plain loss for any number of learners; a step depends on seed and number alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import record_gradients, relative_error, run_world, save

from rlhf.algo.packing import draw_minibatches, pack
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.supervised import SFTConfig, SupervisedConfig
from rlhf.log.reductions import merge_metrics, merge_outcomes
from rlhf.types import PackedTokens, World

pytestmark = pytest.mark.stack

ROWS, SEED, VOCABULARY = 13, 4, 250
SFT, PAIRS = "sequences_per_update", "pairs_per_update"  # keys of `learner`, one for each program


def config_for(
    kind: str, model: Path, *, learners: int = 1, shared: int = 1, per_update: int = 6, **learner: Any
) -> SupervisedConfig:
    values = {
        "run": {"dir": str(model.parent / "run"), "epochs": 2, "seed": SEED},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "none.jsonl", "max_tokens": 64},
        "learner": {kind: per_update, "max_tokens_per_microbatch": 4096, **learner},
        "cluster": {"device": "cpu", "learners": learners, "sequence_parallel": shared},
    }
    schema = SFTConfig if kind == SFT else RewardTrainingConfig
    return schema.model_validate_json(json.dumps(values)).with_steps(ROWS)


def trainer_of(kind: str, config: Any, world: World) -> Any:
    from rlhf.learner.reward_trainer import RewardTrainer
    from rlhf.learner.supervised import SFTTrainer

    trainer = (SFTTrainer if kind == SFT else RewardTrainer)(config, world)
    trainer.hold(examples(kind), examples(kind))
    return trainer


def examples(kind: str) -> PackedTokens:
    """Ragged random sequences with holes in their masks; the two of a pair begin alike."""
    rng = np.random.default_rng(2)
    sequences = []
    for _ in range(ROWS):
        ids = rng.integers(0, VOCABULARY, rng.integers(4, 40)).astype(np.int32)
        other = np.concatenate([ids[: len(ids) // 2], rng.integers(0, VOCABULARY, rng.integers(2, 20))])
        sequences += [ids] if kind == SFT else [ids, other.astype(np.int32)]
    masks = [(rng.random(len(ids)) < 0.6) & (np.arange(len(ids)) > 0) for ids in sequences]
    return pack(sequences, masks)


def plain(kind: str, model: Path, rows: np.ndarray, head: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by the formula on full logits, a sequence at a time, without any of our code."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    data = examples(kind)
    sequences, masks = (np.split(column, data.cu_seqlens[1:-1]) for column in (data.token_ids, data.response_mask))
    if kind == SFT:
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        losses = []
        for row in rows:
            ids, mask = torch.from_numpy(sequences[row]).long(), torch.from_numpy(masks[row])
            logits = net(input_ids=ids[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[mask[1:]])
        loss = torch.cat(losses).mean()
    else:
        net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        net.score.weight.data.copy_(torch.from_numpy(head))

        def score(ids: np.ndarray) -> torch.Tensor:
            return net.score(net.model(input_ids=torch.from_numpy(ids).long()[None]).last_hidden_state[0, -1])

        margins = torch.cat([score(sequences[2 * row]) - score(sequences[2 * row + 1]) for row in rows])
        loss = -margins.sigmoid().log().mean()
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in net.named_parameters()}


CASES = [{"max_tokens_per_microbatch": 128, "zero_stage": 2}, {"zero_stage": 0}, {"per_update": 1}, {"zero_stage": 3}]


def first_updates(world: World, kind: str, model: Path) -> list[Any]:
    """For each case: what the first update measured, the gradients, and the first weights of the head."""
    results = []
    for case in CASES:
        config = config_for(kind, model, learners=world.size, shared=world.sequence_parallel, **case)
        trainer = trainer_of(kind, config, world)
        head = trainer.trained.get("score.weight", torch.zeros(0))
        with trainer.whole(head):
            start = head.detach().clone().numpy()
        gradients = record_gradients(trainer)
        evaluated: Any = []
        while (of_part := trainer.evaluate(len(evaluated))) is not None:
            evaluated.append(of_part)
        results.append((trainer.train(0), merge_metrics(evaluated), gradients[0], start))
    return results


@pytest.mark.parametrize("kind", [SFT, PAIRS])
def test_loss_and_gradient_are_the_plain_ones_for_any_learners_budget_a_learner_without_a_row_and_a_shared_row(
    tiny_model_dir: Path, kind: str
) -> None:
    model = tiny_model_dir / "model"
    for learners, shared in ((1, 1), (2, 1), (2, 2)):
        by_rank = run_world(first_updates, learners, kind, model, sequence_parallel=shared)
        for number, case in enumerate(CASES):
            outcomes, evaluations, gradients, heads = zip(*(ranks[number] for ranks in by_rank), strict=True)
            outcomes, evaluations = outcomes[::shared], evaluations[::shared]
            config = config_for(kind, model, **case)
            minibatches = config.updates_per_epoch(ROWS)
            rows = draw_minibatches(ROWS, minibatches=minibatches, seed=SEED, step=0, epoch=0)[0]
            loss, expected = plain(kind, model, rows, heads[0])
            assert merge_outcomes(outcomes).metrics["train/loss"].value() == pytest.approx(loss, rel=1e-5)
            for of_rank in gradients:
                assert relative_error(of_rank, expected) < 2e-5, (learners, shared, case)
            loss, _ = plain(kind, model, np.arange(ROWS), heads[0])
            assert merge_metrics(list(evaluations))["eval/loss"].value() == pytest.approx(loss, rel=1e-5)


def train_in_two_parts(world: World, model: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    config = config_for(SFT, model, schedule={"name": "cosine"}, optimizer={"lr": 1e-2})
    whole = trainer_of(SFT, config, world)
    logged = []
    for step in range(config.steps):
        logged.append(whole.train(step).metrics)
        if step == 3:  # in the second epoch
            save(whole, folder)
    resumed = trainer_of(SFT, config, world)
    resumed.load(str(folder))
    for step in range(4, config.steps):
        resumed.train(step)
    weights = [{name: param.detach().clone().numpy() for name, param in x.trained.items()} for x in (whole, resumed)]
    return weights[0], weights[1], logged


def test_a_resumed_training_takes_the_steps_of_an_uninterrupted_one_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    ((whole, resumed, logged),) = run_world(train_in_two_parts, 1, tiny_model_dir / "model", tmp_path)
    rates, tokens = ([metrics[name].value() for metrics in logged] for name in ("learner/lr", "train/tokens"))
    assert len(rates) == 6  # two epochs of ceil(13 / 6) updates
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0
    assert sum(tokens[:3]) == sum(tokens[3:]) == len(examples(SFT).token_ids)  # every row once in an epoch
    assert tokens[:3] != tokens[3:]  # in another order
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)
