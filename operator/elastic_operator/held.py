"""Who holds how many accelerators on which node: counted from pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_operator.observation import pod_requests
from reshard.contract import Label

Held = dict[str, dict[str, dict[str, int]]]
"""Extended resources held on each node, by job (`namespace/name`; empty for pods that are not ours), by name."""


def add_held(used: Held, pod: Mapping[str, Any]) -> None:
    """Count what a live pod holds."""
    node = (pod.get("spec") or {}).get("nodeName")
    requests = pod_requests(pod["spec"]) if node else {}
    if not node or not requests:
        return
    meta = pod["metadata"]
    job = (meta.get("labels") or {}).get(Label.JOB)
    holder = used.setdefault(node, {}).setdefault(f"{meta['namespace']}/{job}" if job else "", {})
    for name, count in requests.items():
        holder[name] = holder.get(name, 0) + count


def held_by_others(used: Held, namespace: str, job: str, resource: str) -> dict[str, int]:
    """Accelerators on each node that are held by other pods than those of one job."""
    mine = f"{namespace}/{job}"
    return {
        node: total
        for node, holders in used.items()
        if (total := sum(count.get(resource, 0) for owner, count in holders.items() if owner != mine))
    }
