"""Copies what the store and the node cache hold, in a millisecond or two and without a request."""

from __future__ import annotations

import time

from elastic_operator.cluster.caches import NodeCache
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.web.pages.snapshot import Snapshot


def take_snapshot(store: ClusterStore, nodes: NodeCache, limits: Timeouts) -> Snapshot:
    """Copy the tables; called by the event loop that changes them.

    Args:
        store: views of all jobs and their objects.
        nodes: views of all nodes.
        limits: timeouts of the operator.
    """
    return Snapshot(
        time=time.time(),
        records=store.all_records(),
        nodes=nodes.views(),
        pods=store.all_pods(),
        jobs=store.all_jobs(),
        used=store.pod_usage.all_accelerators() if store.is_usage_current else None,
        is_live=store.is_live,
        limits=limits,
    )
