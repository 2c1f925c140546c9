"""Access to the Kubernetes API: watches, caches, reader, writer, leader election and kopf's handlers.

These modules make no decisions. They may import all pure packages. `controller`, `main` and `probes` import them; the
plugin imports `resources`.
"""
