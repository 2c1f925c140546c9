"""The edges to the cluster: watches, caches, reader, writer, leader election and kopf's handlers.

These modules make no decisions. They may import `client` and all pure packages. `controller`, `main` and `probes`
import them.
"""
