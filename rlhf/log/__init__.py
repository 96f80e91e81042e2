"""What is measured, where it goes, and what it means.

A new metric: of rollouts `rollout_metrics`, of losses `learner/update.py`, else `TrainingRun.log_step`; a row in
docs/metrics.md; for its column on the terminal `Terminal.COLUMNS`. A new sink: a class in `sinks`, which
`run/outputs.py` opens, and its keys in `LoggingConfig`. A new diagnosis: a rule in `diagnosis`.
"""
