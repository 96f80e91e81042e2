"""One run around its loop: start, folder, sampling and grading, evaluation, what is logged.

After a fault: `restarts` for the whole run; `cluster/replacement.py` for one engine.
"""
