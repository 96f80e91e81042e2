"""Learners to engines: everything, or what has changed (changes.py).

A new transport: a branch in `transfer.make_sender`, a receiver that `transfer.RECEIVERS` names, and a name in
`transfer.backend_of`.
"""
