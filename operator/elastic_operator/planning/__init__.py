"""Choice of a topology for the available capacity: planner, constraints, cost, memory, growth.

Pure arithmetic, described in docs/planner.md. Imports `api` and `observed`; imported by `reconcile` and the plugin.
"""
