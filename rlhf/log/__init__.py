"""What is measured, where it goes, and what it means.

To add a metric, compute it in `run/rollout_log.py` (rollouts), `learner/update.py` (losses) or
`RolloutLoop.log_step`, and describe it in docs/metrics.md; `Terminal.ROLLOUT_COLUMNS` are those on the terminal,
`panels` the charts. A new sink: a class in `sinks`, which `run/run_log.py` opens, and its keys in `AnyLoggingConfig`. A
new diagnosis: a rule in `diagnosis`.
"""
