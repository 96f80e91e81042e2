"""What a checkpoint holds of the driver survives the way through its JSON file."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from rlhf.rollout.buffer import Account
from rlhf.run.state import RunState


def test_a_state_is_read_back_as_it_was_written() -> None:
    state = RunState(
        step=4,
        program="ppo",
        config={"run": {"seed": 1}},
        models={"learner": {"config": "0a"}},
        rewards={"mine.py:score": {"mine.py": "0b"}},
        environments={"mine.py:Game": {"mine.py": "0c"}},
        code={"rlhf": "0.1.0"},
        replacements=3,
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
        seconds={"update": 1.5},
        kl_controller={"coef": 0.1},
        reward_scale={"mean": 3.0, "std": 2.0},
        base="org/model",
        example=[{"role": "user", "content": "2 + 3"}],
    )
    assert all(getattr(state, f.name) != getattr(RunState(), f.name) for f in fields(state))
    assert RunState.from_json(state.to_json()) == state


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"of_another_version": 1}, "of_another_version"),
        ({"step": "4"}, "step"),
        ({"account": {"sampled": "64"}}, "sampled"),
        ({"tokens": None}, "tokens"),
    ],
)
def test_a_state_with_unknown_missing_or_mistyped_keys_is_refused(change: dict[str, Any], reason: str) -> None:
    values = {**json.loads(RunState(step=2).to_json()), **change}
    values = {key: value for key, value in values.items() if value is not None or key.endswith("_run_id")}
    with pytest.raises(ValueError, match=reason):
        RunState.from_json(json.dumps(values))
