"""How long a job and its objects stay: its deletion after the end, its deadline, the pods kept for their logs.

Pure. Imports `api`, `observed` and the other modules of `reconcile`; imported by `decide` and `pending_actions`.
"""
