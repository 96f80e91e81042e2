"""What is measured, where it goes, and what it means.

A new metric: `measure`, and a row in docs/metrics.md. A new sink: a class in `sinks`, which `run/run_log.py` opens, and
its keys in `LoggingConfig`. A new diagnosis: a rule in `diagnosis`.
"""
