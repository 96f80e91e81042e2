"""A run's arithmetic, layout and memory before anything starts; imports neither torch nor ray nor vllm.

A new check that refuses a start: `start_checks`. One that only warns: the end of `report`.
"""
