"""Frozen views of the cluster: nodes, pods, Leases, capacity and failure signals.

Pure: the functions take plain API objects and return views. Imports `api` and `manifests` (names and labels of the
operator's own objects); imported by `planning`, `reconcile` and the edges.
"""
