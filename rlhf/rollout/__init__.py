"""Prompts to sampled responses: the engine actor, what it is asked for, and the buffer with its rule of staleness.

`run/sample_and_grade.py` makes a graded group of them; a loop of several turns with an environment would go there.
"""
