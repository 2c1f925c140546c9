"""Jobs that want the same nodes: nodes that are reserved for launched pods, and the order of jobs that wait.

Kept in memory and read with a clock. Imports `observed`, `reconcile` and `client`; imported by `controller` and
`cluster.reader`.
"""
