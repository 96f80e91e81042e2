"""The part of a checkpoint besides weights and optimizer: the progress and the counters of the run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self

from rlhf.rollout.buffer import Account


@dataclass
class RunState:
    """The driver's part of a checkpoint, as JSON in `driver.json`; the defaults are those of a new run.

    Attributes:
        step: completed training steps.
        updates: the config keys that set the number of optimizer steps; a resumed run must have the same values.
        stream: the position in the order of the prompts.
        outstanding: positions of prompts that were dispatched and not trained on; a resumed run samples them again.
        updates_taken: optimizer steps of the policy. updates_skipped: those with a non-finite gradient.
        tokens: prompt and response tokens that were trained on.
        reward_status: how often each part of the reward ended with each status.
        evaluations: metrics by training step.
        seconds: by phase of the run.
        kl_controller: `coef`, the coefficient of the KL in PPO; empty in GRPO.
    """

    step: int = 0
    updates: dict[str, int] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    outstanding: list[int] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    updates_taken: int = 0
    updates_skipped: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "response": 0})
    reward_status: dict[str, int] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    wandb_run_id: str | None = None
    mlflow_run_id: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    kl_controller: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "account": vars(self.account)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The state that `to_json` wrote; keys of another version are ignored, missing ones get their default."""
        state = cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        state.account = Account(**values.get("account", {}))
        state.evaluations = {int(step): metrics for step, metrics in values.get("evaluations", {}).items()}
        return state
