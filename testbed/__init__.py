"""A real multi-node Kubernetes cluster on one Linux machine, without Docker.

Every machine of the cluster (one control plane, CPU nodes, GPU nodes) is a set of Linux namespaces with an init process
of its own; killing that init is a power loss. `python -m testbed --help` lists what can be done to it.
"""
