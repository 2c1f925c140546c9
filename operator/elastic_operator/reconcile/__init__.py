"""Decisions: `decide` takes a spec, a status and an observation, and returns the next status and actions.

Pure: no I/O, no clock. Imports `api`, `manifests`, `observed` and `planning`; imported by `metrics`, the edges and the
plugin.
"""
