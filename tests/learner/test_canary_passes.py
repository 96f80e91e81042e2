"""What the canary asks of a learner: log-probs in float32 from bfloat16 weights, perturbed tensors and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import make_config, make_groups, plan_first_epoch, run_world

from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, World

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 4, "samples": 4, "vocabulary": 250, "longest": 60, "seed": 5}
SEQUENCES = [np.arange(5, 60, dtype=np.int32), np.arange(5, 90, 2, dtype=np.int32)]


def weights(learner: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner}


def changed(learner: Any, before: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in learner if tensor.dtype != torch.bfloat16 or not torch.equal(tensor, before[name])]


@torch.no_grad()
def in_transformers(model: Path, state: dict[str, Tensor]) -> list[np.ndarray]:
    """Log-probs of a float32 model with these weights."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    by_sequence = []
    for sequence in SEQUENCES:
        ids = torch.from_numpy(sequence).long()
        logprobs = torch.log_softmax(net(input_ids=ids[None]).logits[0, :-1], -1)
        by_sequence.append(logprobs.gather(-1, ids[1:, None])[:, 0].numpy())
    return by_sequence


def float32_pass(world: World, model: Path, stage: int) -> None:
    from rlhf.learner.policy import Learner

    config = make_config(
        model,
        model={"dtype": "bfloat16"},
        learner={"zero_stage": stage, "optimizer": {"lr": 1e-3}},
        cluster={"device": "cpu", "learners": world.size},
    )
    learner = Learner(config, world)
    batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
    learner.start_step(batch.tokens, [minibatches])
    targets = PolicyTargets(broadcast_to_tokens(batch, advantages), None, None)
    learner.update(targets)
    before = weights(learner)
    own, exact = learner.canary(SEQUENCES), learner.canary(SEQUENCES, True)
    for mine, rounded, expected in zip(exact, own, in_transformers(model, before), strict=True):
        np.testing.assert_allclose(mine[1:], expected, rtol=0, atol=2e-5)
        assert np.abs(rounded[1:] - expected).mean() > 1e-3
    assert changed(learner, before) == []
    assert all(np.array_equal(a, b) for a, b in zip(learner.canary(SEQUENCES), own, strict=True))
    learner.update(targets)
    assert changed(learner, before)


@pytest.mark.parametrize(("learners", "stage"), [(1, 1), (2, 3)])
def test_the_same_weights_are_computed_with_in_float32_and_stay_as_they_were(
    tiny_model_dir: Path, learners: int, stage: int
) -> None:
    run_world(float32_pass, learners, tiny_model_dir / "model", stage)


class NewMemory(TorchDispatchMode):
    """Adds up the bytes of all memory that operations take, whether or not they give it back."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


def perturb_and_restore(world: World, model: Path, stage: int) -> None:
    from rlhf.learner.policy import Learner

    config = make_config(
        model, learner={"zero_stage": stage}, cluster={"device": "cpu", "learners": world.size},
        model={"dtype": "bfloat16"},
    )  # fmt: skip
    learner = Learner(config, world)
    names = list(learner.trained)
    with learner.whole(learner.trained[names[4]], modify=True), torch.no_grad():
        learner.trained[names[4]].zero_()
    before = weights(learner)
    learner.perturb_weights(3, 6)
    assert changed(learner, before) == names[3:6]
    after = weights(learner)
    assert torch.equal(after[names[3]].abs(), before[names[3]].abs())
    assert after[names[4]].view(-1)[:4].tolist() == [1, 0, 0, 1]
    learner.restore_weights()
    assert changed(learner, before) == []
    with NewMemory() as taken:
        learner.perturb_weights()
    perturbed = changed(learner, before)
    with taken:
        learner.restore_weights()
    assert perturbed == names
    assert changed(learner, before) == []
    assert 0 < taken.bytes < 40 * len(names)  # whether a tensor has any element that is not 0, and nothing larger


@pytest.mark.parametrize(("learners", "stage"), [(1, 2), (2, 3)])
def test_a_run_of_tensors_is_perturbed_in_place_zeros_too_and_restored_bit_for_bit(
    tiny_model_dir: Path, learners: int, stage: int
) -> None:
    run_world(perturb_and_restore, learners, tiny_model_dir / "model", stage)
