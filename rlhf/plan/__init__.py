"""A run's arithmetic, layout and memory before anything starts; imports neither torch nor ray nor vllm."""

from rlhf.plan.report import print_plan
from rlhf.plan.resources import GPU, check_resources, count_gpus, joins_a_cluster, local_resources, visible_gpus

__all__ = ["GPU", "check_resources", "count_gpus", "joins_a_cluster", "local_resources", "print_plan", "visible_gpus"]
