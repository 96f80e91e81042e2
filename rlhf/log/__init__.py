"""Metrics: their reductions, the sinks that they are logged to, and the diagnosis.

To add a metric, compute it in `run/rollout_log.py` (rollouts), `learner/update.py` (losses) or
`RolloutLoop.step_metrics`, and describe it in docs/metrics.md; `terminal.ROLLOUT_COLUMNS` lists the
metrics on the terminal, `panels` the charts. To add a sink, write a class in `sinks`, open it in `run/run_log.py`, and
add its keys to `AnyLoggingConfig`. To add a diagnosis, write a rule in `diagnosis`.
"""
