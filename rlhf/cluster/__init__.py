"""Ray: actors and how they start, calls of all ranks, engines and their replacement, the canary.

Where to add a role: its line in `config/roles.py` names the class that its actors host and the function that
estimates its memory. Placement, counts and checks then follow. If the role has a section of its own: a class, a field
of the program's config, whose keys say with `resume=` whether a resumed run may change them.
"""
