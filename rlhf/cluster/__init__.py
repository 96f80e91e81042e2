"""Ray: actors and how they start, calls on all ranks, the engines as one, engines that are replaced, the canary.

Where to add a role: its line in `config/roles.py` names the class that its actors host and what estimates its memory.
"""
