"""Adapters that make a script of one training stack elastic with a few lines.

`loop` owns the session for scripts with their own training loop; one module per stack supplies loading and saving.
Frameworks are imported only when a function needs them. The stacks use the session and `data`.
"""
