"""What a checkpoint holds of the driver survives the way through its JSON file."""

from __future__ import annotations

import json
from dataclasses import fields

from rlhf.rollout.buffer import Account
from rlhf.run.state import RunState


def test_a_state_is_read_back_as_it_was_written() -> None:
    state = RunState(
        step=4,
        updates={"learner.epochs_per_step": 2},
        stream={"drawn": 32, "seed": 1, "sources": {}},
        outstanding=[30, 31],
        account=Account(sampled=64, trained=60, stale=4),
        updates_taken=7,
        updates_skipped=1,
        tokens={"prompt": 100, "response": 200},
        reward_status={"math/ok": 64},
        evaluations={0: {"eval/test/avg@1": 0.25}, 4: {"eval/test/avg@1": 0.5}},
        wandb_run_id="abc",
        mlflow_run_id="0",
        seconds={"update": 1.5},
        kl_controller={"coef": 0.1},
    )
    assert all(getattr(state, f.name) != getattr(RunState(), f.name) for f in fields(state))
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_unknown_keys_are_ignored_and_missing_keys_get_their_default() -> None:
    assert RunState.from_json({"step": 2, "of_another_version": 1}) == RunState(step=2)
