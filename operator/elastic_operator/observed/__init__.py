"""The cluster as frozen views: nodes, pods, Leases, capacity and failure signals.

Pure: plain API objects in, views out. Imports `api` and `manifests` (names and labels of our own objects); imported by
`planning`, `reconcile` and the edges.
"""
