"""The flags of sbatch that a run's config asks for: nodes, GPUs and CPUs of each.

slurm_request.py --module NAME ARGUMENTS OF THE PROGRAM
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from rlhf.check.resources import count_gpus, count_nodes
from rlhf.config.cli import PROGRAMS
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.program import TrainingProgramConfig

CPUS_PER_GPU = 8  # vLLM has three processes per engine; grading, packing and an optimizer in host memory take the rest
GPUS_PER_NODE = 8  # of a program without engines, whose config does not say


def flags(config: TrainingProgramConfig) -> list[str]:
    roles, nodes, per_node = config.roles(), 1, 0
    if gpus := count_gpus(roles):
        per_node = min(gpus, GPUS_PER_NODE)
        nodes = math.ceil(gpus / per_node)
        if isinstance(config, GRPOConfig):
            per_node = min(gpus, config.cluster.gpus_per_node)
            nodes = count_nodes(roles, config.cluster.gpus_per_node)
    reserved = math.ceil(sum(role.count * role.cpus for role in roles) / nodes)
    asked = {"nodes": nodes, "cpus-per-task": max(reserved, CPUS_PER_GPU * max(1, per_node))}
    asked |= {"gpus-per-node": per_node} if per_node else {}
    return [f"--{name}={value}" for name, value in asked.items()]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--module", default="rlhf.grpo")
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    options, _ = parser.parse_known_intermixed_args(argv)
    program = PROGRAMS.get(options.module.removeprefix("rlhf.").replace("_", "-"))
    overrides = [argument for argument in options.overrides if "=" in argument]
    try:
        schema = (program and program.config) or GRPOConfig
        print(" ".join(flags(load_config(schema, options.config, overrides))))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
