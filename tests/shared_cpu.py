"""Program: rlhf.grpo or rlhf.ppo with engines and learners that take turns on a CPU, as on shared GPUs.

    python shared_cpu.py grpo ARGUMENTS

A config refuses that, since there is nothing to share. A sleep frees no memory here; everything else is as on GPUs.
"""

from __future__ import annotations

import sys
from importlib import import_module

from rlhf.config import contradictions
from rlhf.run.supervisor import supervise

REFUSED = "cluster.placement=colocated and cluster.device=cpu"


def allow() -> None:
    """From now on this process takes such a config."""
    contradictions.TRAINING_CONFLICTS.pop(REFUSED, None)


if __name__ == "__main__":
    allow()
    program = import_module(f"rlhf.{sys.argv.pop(1)}")
    sys.exit(supervise(program.main))
