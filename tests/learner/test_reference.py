"""The reference policy of a real learner: it stays, is replaced, or follows as an average, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import make_config, make_groups, plan_first_epoch, run_world, save

from rlhf.learner.rank_place import Place
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 2, "samples": 2, "vocabulary": 250, "longest": 20, "seed": 3}


def move_and_look(place: Place, model: Path, folder: Path) -> dict[str, Any]:
    """Weights of policy and reference after an update, a replacement, and an average with a decay of 0.75."""
    from rlhf.learner.worker import Learner

    kl = {"kl_coef": 0.1, "kl_estimator": "k1", "kl_place": "reward"}  # in the reward, so that both passes are made
    config = make_config(
        model, algo={**kl, "ref_update": "average", "ref_decay": 0.75}, learner={"optimizer": {"lr": 1e-2}}
    )
    learner = Learner(config, place)
    assert learner.reference is not None
    batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
    learner.start_step(batch.tokens, [minibatches])

    def weights(module: Any) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in module.parameters()])

    def update() -> None:
        learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), None, None))

    def largest_kl() -> float:
        old, ref = learner.logprobs()
        assert old is not None
        assert ref is not None
        return float(np.abs(old - ref).max())

    policy, reference = learner.engine.module, learner.reference.model
    seen = {"kl at the start": largest_kl()}
    start = weights(reference)
    update()
    seen["moved by an update"] = float((weights(reference) - start).abs().max())
    seen["kl after an update"] = largest_kl()
    learner.blend_reference(0.0)
    seen["kl after a replacement"] = largest_kl()
    replaced = weights(reference)
    update()
    target = 0.75 * replaced + 0.25 * weights(policy)
    learner.blend_reference(0.75)
    seen["off the average"] = float((weights(reference) - target).abs().max())
    seen["average moved by"] = float((weights(reference) - replaced).abs().max())
    averaged = weights(reference)
    save(learner, folder)
    learner.blend_reference(0.0)
    learner.load(str(folder))
    seen["off after a resume"] = float((weights(reference) - averaged).abs().max())
    learner.blend_reference(0.0)  # the policy as it was saved, which has moved on from the average
    replaced = weights(reference)
    save(learner, folder)
    learner.load(str(folder))
    seen["moved by the replacement"] = float((replaced - averaged).abs().max())
    seen["off after a second resume"] = float((weights(reference) - replaced).abs().max())
    learner.close()
    return seen


def test_a_reference_stays_is_replaced_or_follows_as_an_average_and_comes_back_from_a_checkpoint(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    (seen,) = run_world(move_and_look, 1, tiny_model_dir / "model", tmp_path)
    assert seen["kl at the start"] == 0.0
    assert seen["moved by an update"] == 0.0
    assert seen["kl after an update"] > 1e-3
    assert seen["kl after a replacement"] == 0.0
    assert seen["off the average"] < 1e-6 < 1e-3 < seen["average moved by"]
    assert seen["off after a resume"] == 0.0
    assert seen["off after a second resume"] == 0.0 < 1e-3 < seen["moved by the replacement"]
