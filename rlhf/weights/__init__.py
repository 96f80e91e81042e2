"""Sends weights from learners to engines: all of them, or only the changed elements (`changes`).

A new transport: a branch in `transfer.make_sender`, a receiver that `transfer.RECEIVERS` names, and a name in
`transfer.backend_of`.
"""
