"""A run's arithmetic, layout and memory before anything starts; imports neither torch nor ray nor vllm.

A new check that refuses a start: `start_checks`. One that only warns: the end of `report`.
"""

from rlhf.plan.report import print_plan
from rlhf.plan.resources import GPU, check_resources, count_gpus, joins_a_cluster, local_resources, visible_gpus
from rlhf.plan.start_checks import evaluation_problems, start_problems

__all__ = [
    "GPU", "check_resources", "count_gpus", "evaluation_problems", "joins_a_cluster", "local_resources", "print_plan",
    "start_problems", "visible_gpus",
]  # fmt: skip
