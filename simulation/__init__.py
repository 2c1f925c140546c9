"""Simulation of long trainings with failures: the operator's real decisions in virtual time, in a model of the cluster.

`trace` draws failures from a seed, `assumptions` holds every number that the model needs and its source, `cluster` is
the model that `elastic_operator.reconcile.decide` observes and acts on, `run` moves the clock, `report` writes the
tables of docs/goodput.md. The package imports the operator and the wire contract; nothing imports it but its tests.
"""
