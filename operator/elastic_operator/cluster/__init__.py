"""The edges to Kubernetes: watches, caches, reads, writes, leader election and kopf's handlers.

Nothing is decided here. Imports all pure packages; imported by `controller`, `main` and `probes`, and by the plugin for
the kinds of objects.
"""
