"""What the canary asks of a learner: log-probs in float32 from bfloat16 weights, perturbed tensors and back."""

from __future__ import annotations

import dataclasses
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
from rlhf.types import PolicyTargets, Support, World

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 4, "samples": 4, "vocabulary": 250, "longest": 60, "seed": 5}
SEQUENCES = [np.arange(5, 60, dtype=np.int32), np.arange(5, 90, 2, dtype=np.int32)]


def weights(learner: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner}


def changed(learner: Any, before: dict[str, Tensor]) -> list[str]:
    """The tensors of another type, or with other bytes."""

    def same(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    return [name for name, tensor in learner if not same(tensor, before[name])]


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
    assert_scored_among_two(learner)
    learner.update(targets)
    assert changed(learner, before)


def assert_scored_among_two(learner: Any) -> None:
    """The last token of a sequence, if it was sampled from itself and another one."""
    sequence, other = SEQUENCES[0], 7
    sizes = 2 * (np.arange(len(sequence)) == len(sequence) - 1)
    support = Support.from_sizes(np.array([sequence[-1], other]), sizes)
    own, others = (x[-1] for x in learner.canary([sequence, np.append(sequence[:-1], np.int32(other))], True))
    (scored,) = learner.canary([sequence], True, 1.0, [support])
    assert scored[-1] == pytest.approx(own - np.logaddexp(own, others), abs=2e-5)


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


LORA = {"rank": 4, "targets": "all-linear"}
# Stage 3 keeps parameters with fewer elements than this whole: norms, biases and some adapters.
ZERO = {"stage3_param_persistence_threshold": 1000}


def perturb_at_every_stage(world: World, model: Path) -> list[float]:
    """-> deadlines of all process groups, seconds."""
    from rlhf.learner.policy import Learner

    world = dataclasses.replace(world, deadline_s=1234.0)
    for lora in (None, LORA):
        for stage in range(4):
            learner_section = {"zero_stage": stage, "deepspeed": {"zero_optimization": ZERO}}
            config = make_config(
                model, learner=learner_section, cluster={"device": "cpu", "learners": world.size},
                model={"dtype": "bfloat16" if stage > 1 else "float32", "lora": lora},
            )  # fmt: skip
            learner = Learner(config, world)
            cell, names = (world.size, stage, lora), learner.tensor_names()
            with learner.whole(learner.trained[names[4]], modify=True), torch.no_grad():
                learner.trained[names[4]].zero_()
            before, own = weights(learner), learner.canary(SEQUENCES)
            assert [*before] == names, cell
            for block in (slice(3, 6), slice(0, None)):
                with NewMemory() as taken:
                    learner.perturb_weights(block.start, block.stop)
                after = weights(learner)
                assert changed(learner, before) == names[block], cell
                assert torch.equal(after[names[5]].abs(), before[names[5]].abs()) == before[names[5]].any(), cell
                assert after[names[4]].view(-1)[:4].tolist() == [1, 0, 0, 1], cell
                for name, (share, first) in zip(names, learner.own_parts(), strict=True):
                    assert torch.equal(share, after[name].view(-1)[first:][: len(share)]), cell  # compared, and sent
                moved = np.concatenate(learner.canary(SEQUENCES)) - np.concatenate(own)
                assert np.abs(moved).mean() > 1e-3, cell
                with taken:
                    learner.restore_weights()
                assert changed(learner, before) == [], cell
                assert all(np.array_equal(a, b) for a, b in zip(learner.canary(SEQUENCES), own, strict=True)), cell
            # a few elements of each tensor, and whether it has any that is not 0; nothing larger
            assert 0 < taken.bytes < 40 * len(names), (cell, taken.bytes)
    if world.size == 1:
        wrong, learner.published["again"] = names[0], learner.published[names[0]]
    else:  # DeepSpeed keeps it whole, next to the shares of the ranks
        wrong = min(names, key=lambda name: before[name].numel())
        learner.published[wrong].data.add_(1)
    with pytest.raises(RuntimeError, match=rf"^learner\.zero_stage=3: {wrong} cannot be perturbed"):
        learner.perturb_weights()
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


@pytest.mark.private
@pytest.mark.parametrize("learners", [1, 2])
def test_every_tensor_that_is_sent_changes_its_bytes_and_gets_them_back_at_every_stage(
    tiny_model_dir: Path, learners: int
) -> None:
    for deadlines in run_world(perturb_at_every_stage, learners, tiny_model_dir / "model"):
        assert len(deadlines) > 1
        assert set(deadlines) == {1234.0}  # of the run, not DeepSpeed's and torch's
