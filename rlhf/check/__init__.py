"""Before anything starts: --plan (arithmetic, layout, memory), the checks that refuse a start, and the doctor.

Imports neither torch nor ray nor vllm, except in `doctor/`. A new check that refuses a start: `start_checks`. One that
only warns: the end of `report`.
"""
