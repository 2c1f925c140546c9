"""A model of a cluster with one job: API server, controllers, kubelets, trainings, storage and Kueue, and faults.

The operator under test is the real one without its HTTP calls: caches, views, `decide` and manifests. `World` is the
entry point. `invariants` checks after every pass and every second what must hold in any order of events.
"""
