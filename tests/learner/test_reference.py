"""The reference policy of a real learner: it stays, is replaced, or follows as an average, also after a resume."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import make_config, make_groups, plan_first_epoch, run_world, save

from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, World

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 2, "samples": 2, "vocabulary": 250, "longest": 20, "seed": 3}
DECAY = {"replace": 0.0, "average": 0.75}


def move_and_look(world: World, model: Path, folder: Path, kind: str) -> dict[str, Any]:
    """Where the reference is after an update of the policy, after it has followed twice, and after a resume."""
    from rlhf.learner.policy import Learner

    kl = {"kl_coef": 0.1, "kl_estimator": "k1", "kl_place": "reward"}  # in the reward, so that both passes are made
    config = make_config(model, algo={**kl, "ref_update": kind, "ref_decay": 0.75}, learner={"optimizer": {"lr": 1e-2}})
    learner = Learner(config, world)
    reference = learner.reference
    assert reference is not None
    batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
    learner.start_step(batch.tokens, [minibatches])

    def weights(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().flatten().clone() for tensor in tensors])

    def update() -> None:
        learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), None, None))

    def largest_kl() -> float:
        old, ref = learner.logprobs()
        assert old is not None
        assert ref is not None
        return float(np.abs(old - ref).max())

    seen = {"kl at the start": largest_kl()}
    start = weights(reference.movable())
    update()
    seen["moved by an update"] = float((weights(reference.movable()) - start).abs().max())
    seen["kl after an update"] = largest_kl()
    for _ in range(2):
        before = weights(reference.movable())
        learner.blend_reference(DECAY[kind])
        target = DECAY[kind] * before + (1 - DECAY[kind]) * weights(learner.trained.values())
        followed = weights(reference.movable())
        seen["off the target"] = float((followed - target).abs().max())
        seen["moved by following"] = float((followed - before).abs().max())
        seen["kl after following"] = largest_kl()
        save(learner, folder)
        update()
    learner.blend_reference(DECAY[kind])
    seen["moved after the checkpoint"] = float((weights(reference.movable()) - followed).abs().max())
    learner.load(str(folder))
    seen["off after a resume"] = float((weights(reference.movable()) - followed).abs().max())
    learner.close()
    return seen


@pytest.mark.parametrize("kind", DECAY)
def test_a_reference_stays_until_it_is_replaced_or_follows_as_an_average_and_comes_back_from_a_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, kind: str
) -> None:
    (seen,) = run_world(move_and_look, 1, tiny_model_dir / "model", tmp_path, kind)
    assert seen["kl at the start"] == 0.0
    assert seen["moved by an update"] == 0.0
    assert seen["kl after an update"] > 1e-3
    assert seen["off the target"] < 1e-6 < 1e-3 < seen["moved by following"]
    assert (seen["kl after following"] == 0.0) == (kind == "replace")
    assert seen["off after a resume"] == 0.0 < 1e-3 < seen["moved after the checkpoint"]


def resume_moving_from_fixed(world: World, model: Path, folder: Path) -> None:
    from rlhf.learner.policy import Learner

    for kind in ("fixed", "average"):
        learner = Learner(make_config(model, algo={"kl_coef": 0.1, "ref_update": kind}), world)
        if kind == "fixed":
            save(learner, folder)
    with pytest.raises(ValueError, match=r"algo\.ref_update=fixed"):
        learner.load(str(folder))
    learner.close()


def test_a_fixed_reference_is_not_in_a_checkpoint_and_a_moving_one_does_not_go_on_from_it(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    run_world(resume_moving_from_fixed, 1, tiny_model_dir / "model", tmp_path)
    assert not list(tmp_path.glob("reference-*"))
