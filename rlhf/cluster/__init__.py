"""Ray: actors and how they start, calls on all ranks, the engines as one, engines that are replaced, the canary.

Where to add a role: its line in `config/roles.py` names the class that its actors host and what estimates its memory.
It is then placed, counted and checked by itself. If it has a section of its own: a class, a field of the program's
config, whose keys say with `resume=` whether a resumed run may change them.
"""
