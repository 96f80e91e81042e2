"""Optimizer state and reference that leave the GPU: their memory is released, and training goes on as before."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import WAIT_S, eventually
from worlds import make_config, make_groups, plan_first_epoch, random_column, run_world

from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, World

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 2, "samples": 4, "vocabulary": 250, "longest": 40, "seed": 5}
SEQUENCES = [np.arange(5, 60, dtype=np.int32)]


def memory_in_use() -> dict[int, int]:
    """Bytes of all memory that a tensor of this process looks into, by address."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if isinstance(x, Tensor) and x.layout == torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type == "cpu"}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def leave_and_come_back(world: World, model: Path, stage: int, dtype: str, output: Path) -> None:
    from rlhf.learner.offload import gradient_buffers
    from rlhf.learner.policy import Learner

    config = make_config(
        model, model={"dtype": dtype}, algo={"kl_coef": 0.01, "kl_place": "loss"},
        learner={"zero_stage": stage, "optimizer": {"lr": 1e-3}},
        cluster={"device": "cpu", "learners": world.size},
    )  # fmt: skip
    learner = Learner(config, world)
    batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
    targets = PolicyTargets(broadcast_to_tokens(batch, advantages), None, random_column(batch, 1))

    def update() -> dict[str, Tensor]:
        learner.start_step(batch.tokens, [minibatches])
        learner.update(targets)
        return {name: tensor.clone() for name, tensor in learner}

    def save(name: str) -> dict[str, bytes]:
        folder = output / name
        if world.rank == 0:
            folder.mkdir()
        torch.distributed.barrier()
        learner.save(str(folder))
        assert eventually(lambda: learner.save_report() is not None, WAIT_S)
        torch.distributed.barrier()
        return files(folder)

    learner.leave_gpu(True)  # before there are moments, as at the start of a run
    update()
    learner.start_step(batch.tokens, [minibatches])
    logprobs = learner.logprobs()
    saved, own = save("at home"), learner.canary(SEQUENCES)

    moved = learner._movable()
    at_home = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in moved}
    learner.leave_gpu(True)
    learner.leave_gpu(True)  # a second time changes nothing
    assert not at_home.keys() & memory_in_use().keys()
    parameters = sum(tensor.numel() for tensor in learner.published.values())
    assert sum(at_home.values()) > (4 + 4) * parameters / world.size  # moments, and master weights or reference
    assert all(buffer.untyped_storage().nbytes() == 0 for buffer in gradient_buffers(learner.deepspeed))
    assert save("away") == saved
    assert np.array_equal(learner.canary(SEQUENCES)[0], own[0])

    assert all(np.array_equal(a, b) for a, b in zip(learner.logprobs(), logprobs, strict=True) if a is not None)
    learner.leave_gpu(True)
    after = update()
    learner.load(str(output / "at home"))
    learner.leave_gpu(True)
    learner.load(str(output / "away"))
    stayed = update()
    assert all(torch.equal(after[name], stayed[name]) for name in after)


@pytest.mark.private
@pytest.mark.parametrize(
    ("learners", "stage", "dtype"), [(1, 0, "float32"), (1, 1, "bfloat16"), (1, 2, "float32"), (2, 3, "bfloat16")]
)
def test_state_that_leaves_the_gpu_frees_its_memory_can_be_saved_and_comes_back_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path, learners: int, stage: int, dtype: str
) -> None:
    run_world(leave_and_come_back, learners, tiny_model_dir / "model", stage, dtype, tmp_path)
