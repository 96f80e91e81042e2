"""The reference policy beside a real learner: it stays, is replaced, or follows as an average, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import make_config, make_groups, plan_first_epoch, run_world, work_of_rank

from rlhf.learner.messages import Place
from rlhf.step import batching

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 2, "samples": 2, "vocabulary": 250, "longest": 20, "seed": 3}


def move_and_look(place: Place, model: Path, folder: Path) -> dict[str, Any]:
    """Weights of policy and reference after an update, a replacement, and an average with a decay of 0.75."""
    from rlhf.learner.worker import Learner

    config = make_config(
        model, algo={"kl_coef": 0.1, "ref_update": "average", "ref_decay": 0.75}, learner={"optimizer": {"lr": 1e-2}}
    )
    learner = Learner(config, place)
    assert learner.reference is not None
    groups = make_groups(**GROUPS)
    minibatches, _ = plan_first_epoch(config, groups)
    row = {i: np.zeros(len(s.rollout.token_ids), np.float32) for i, s in enumerate(batching.flatten(groups))}

    def weights(module: Any) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in module.parameters()])

    def update() -> None:
        learner.update(work_of_rank(config, groups, place.rank, row, row))

    def largest_kl() -> float:
        passes = learner.logprobs([m.microbatches[place.rank] for m in minibatches], True)
        return float(max(np.abs(one.old - one.ref).max() for found in passes for one in found))

    policy, reference = learner.engine.module, learner.reference.model
    found = {"kl at the start": largest_kl()}
    start = weights(reference)
    update()
    found["moved by an update"] = float((weights(reference) - start).abs().max())
    found["kl after an update"] = largest_kl()
    learner.blend_reference(0.0)
    found["kl after a replacement"] = largest_kl()
    replaced = weights(reference)
    update()
    target = 0.75 * replaced + 0.25 * weights(policy)
    learner.blend_reference(0.75)
    found["off the average"] = float((weights(reference) - target).abs().max())
    found["average moved by"] = float((weights(reference) - replaced).abs().max())
    averaged = weights(reference)
    learner.save(str(folder))
    learner.blend_reference(0.0)
    learner.load(str(folder), 2)
    found["off after a resume"] = float((weights(reference) - averaged).abs().max())
    learner.blend_reference(0.0)  # the policy as it was saved, which has moved on from the average
    replaced = weights(reference)
    learner.save(str(folder))
    learner.load(str(folder), 2)
    found["moved by the replacement"] = float((replaced - averaged).abs().max())
    found["off after a second resume"] = float((weights(reference) - replaced).abs().max())
    learner.close()
    return found


def test_a_reference_stays_is_replaced_or_follows_as_an_average_and_comes_back_from_a_checkpoint(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    (found,) = run_world(move_and_look, 1, tiny_model_dir / "model", tmp_path)
    assert found["kl at the start"] == 0.0
    assert found["moved by an update"] == 0.0
    assert found["kl after an update"] > 1e-3
    assert found["kl after a replacement"] == 0.0
    assert found["off the average"] < 1e-6 < 1e-3 < found["average moved by"]
    assert found["off after a resume"] == 0.0
    assert found["off after a second resume"] == 0.0 < 1e-3 < found["moved by the replacement"]
