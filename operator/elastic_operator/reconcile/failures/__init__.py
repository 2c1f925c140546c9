"""Consequences of a failure: its budget and backoff, the meaning of its exit code, the node to avoid.

Pure. Imports `api`, `observed` and `reconcile.context`; imported by the other modules of `reconcile`.
"""
