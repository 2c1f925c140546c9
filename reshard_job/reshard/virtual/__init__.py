"""Virtual commits: a manifest says where the bytes are, and each rank loads its own.

Imports `api` and everything below it; imported by `cli` and by the trainer.
"""
