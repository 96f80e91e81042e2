"""The driver's part of a checkpoint: the progress of the run, its counters, and values that it must not change."""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter

import rlhf
from rlhf.rollout.buffer import Account

GIT_S = 5.0  # longest time of a call of git


@dataclass
class RunState:
    """`driver.json` of a checkpoint; the defaults are those of a new run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    step: int = 0  # completed training steps
    program: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # the stored form (see `references`)
    models: dict[str, dict[str, str]] = field(default_factory=dict)  # role -> fingerprints of its start model's parts
    # Fingerprints of the code files of each user function, environment and tool, by its name.
    rewards: dict[str, dict[str, str]] = field(default_factory=dict)
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)  # version and git state of the program
    # The config keys that set the number of optimizer steps; a resumed run must have the same values.
    updates: dict[str, int] = field(default_factory=dict)
    # Position in the order of the prompts; fingerprint of the data.
    stream: dict[str, Any] = field(default_factory=dict)
    # Positions of prompts that were dispatched and not trained on; a resumed run samples them again.
    outstanding: list[int] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    replacements: int = 0  # groups that dynamic sampling has replaced for the next training step
    updates_taken: int = 0
    updates_skipped: int = 0  # optimizer steps with a non-finite gradient
    tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "response": 0})
    reward_status: dict[str, int] = field(default_factory=dict)  # of trained groups, by `part/status`
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by training step
    wandb_run_id: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    kl_controller: dict[str, float] = field(default_factory=dict)  # `coef`: of the KL in PPO; empty in GRPO
    # Mean and std of the reward model's scores over responses of the start policy, if it was measured.
    reward_scale: dict[str, float] = field(default_factory=dict)
    base: str = ""  # the start model, by its name on the hub or its whole path; empty if a variable names it
    example: list[dict[str, Any]] | str = ""  # the first prompt: messages; text, if no chat template wrote it

    def summary(self) -> dict[str, Any]:
        """The part of the state that a finished run writes to `summary.json`."""
        return {
            "evaluation_before": self.evaluations.get(0, {}),
            "evaluation_after": self.evaluations.get(self.step, {}),
            "steps": self.step,
            "updates_taken": self.updates_taken,
            "updates_skipped": self.updates_skipped,
            "seconds": {phase: round(seconds, 3) for phase, seconds in self.seconds.items()},
            "tokens": self.tokens,
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the state that `to_json` wrote; ValueError if a key is missing, is unknown or has another type."""
        state = json.loads(text)
        if missing := [f.name for f in fields(cls) if f.name not in state] if isinstance(state, dict) else ["all keys"]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        state.pop("mlflow_run_id", None)  # checkpoints of version 0.1.0 have it
        return TypeAdapter(cls).validate_json(json.dumps(state))


@cache
def code_state() -> dict[str, str]:
    """The version of this program and, where it runs from its git repository, the commit and whether files differ."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True).stdout.strip()

    state = {"rlhf": rlhf.__version__}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if git("ls-files", Path(__file__).name):  # not a package installed inside another project's repository
            changed = "yes" if git("status", "--porcelain", "-uno") else "no"
            state |= {"commit": git("rev-parse", "HEAD"), "uncommitted changes": changed}
    return state
