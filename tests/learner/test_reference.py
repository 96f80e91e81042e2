"""The reference policy of a real learner: it stays, is replaced, or follows as an average, also after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import column_of_shard, make_config, make_groups, plan_first_epoch, run_world, save

from rlhf.config.teacher import TeacherModel
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


# --- teachers ---


def scored_by_teachers(world: World, model: Path, teacher: Path, stage: int) -> dict[str, Any]:
    """A rank's columns by the teacher and by the policy itself, before and after an update."""
    from rlhf.learner.policy import Learner

    settings = {"teacher": {"path": str(teacher), "over": "sampled" if stage == 3 else "vocabulary"}}
    section = {"zero_stage": stage, "optimizer": {"lr": 1e-2}}
    config = make_config(model, algo=settings, learner=section, cluster={"learners": world.size})
    learner = Learner(config, world)
    batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
    learner.start_step(batch.tokens, [minibatches])
    own = TeacherModel(own="policy", hint_column="hint")

    def column(of: TeacherModel) -> np.ndarray:
        return column_of_shard(batch, minibatches, world.rank, learner.teacher_logprobs(of)[0])

    assert config.algo.teacher is not None
    seen = {"teacher": column(config.algo.teacher), "policy": column(own)}
    updates = learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), None, None))
    learner.leave_gpu(offload=True)
    if stage < 3:
        seen["kl"] = np.array(updates[0].metrics["policy/teacher_kl"].value())
    seen |= {"teacher after": column(config.algo.teacher), "policy after": column(own)}
    learner.close()
    return seen


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 2)])
def test_a_teacher_gives_the_log_probs_of_its_own_model_which_updates_do_not_move(
    tmp_path: Path, tiny_model_dir: Path, stage: int, ranks: int
) -> None:
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(tiny_model_dir / "model", dtype=torch.float32)
    with torch.no_grad():
        for param in teacher.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    teacher.save_pretrained(tmp_path / "teacher")
    parts = run_world(scored_by_teachers, ranks, tiny_model_dir / "model", tmp_path / "teacher", stage)
    seen = {name: sum(part[name] for part in parts) for name in parts[0]}
    config = make_config(tiny_model_dir / "model")
    tokens = plan_first_epoch(config, make_groups(**GROUPS))[0].tokens
    policy, kls = AutoModelForCausalLM.from_pretrained(tiny_model_dir / "model", dtype=torch.float32), []
    for start, end in itertools.pairwise(tokens.cu_seqlens):
        ids = torch.from_numpy(tokens.token_ids[start:end]).long()
        with torch.no_grad():
            logits = teacher(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, ids[1:, None])[:, 0].numpy()
        sampled = tokens.response_mask[start + 1 : end]
        np.testing.assert_allclose(seen["teacher"][start + 1 : end][sampled], expected[sampled], atol=1e-4)
        if stage < 3:
            with torch.no_grad():
                own = policy(ids[None]).logits[0, :-1].log_softmax(-1)
            kls.append((own.exp() * (own - logits)).sum(1)[sampled])
    if stage < 3:  # the loss has the KL over the vocabulary: before the first update it is that of the two models
        np.testing.assert_allclose(seen["kl"], torch.cat(kls).mean(), rtol=1e-4)
    mask = tokens.response_mask
    assert (seen["teacher after"] == seen["teacher"])[mask].all()
    assert np.abs(seen["policy after"] - seen["policy"])[mask].max() > 1e-3
    assert np.abs(seen["policy"] - seen["teacher"])[mask].max() > 1e-2
