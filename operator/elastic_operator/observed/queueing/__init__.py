"""Kueue's objects as frozen views: the Workloads of a job, the flavors that were assigned to it, its priority. Pure.

Kinds are those of the API group kueue.x-k8s.io; Volcano and Kubernetes itself have kinds of the same names. `reconcile`
and `cluster` may import this package.
"""
