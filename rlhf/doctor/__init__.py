"""`python -m rlhf.doctor`: checks, before a run, that it will start, fit and be right."""
