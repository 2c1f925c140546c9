"""Ports of the node on which the pods of a template listen, and the port of the rendezvous. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Range of the rendezvous ports: below those that Kubernetes gives to Services (30000) and Linux to clients (32768)."""


def list_host_ports(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ports of the node on which a pod with this spec listens, for instance `8080/TCP`.

    Ports of different addresses of the node count as the same port, although the scheduler tells them apart.
    """
    sidecars = (item for item in spec.get("initContainers") or () if item.get("restartPolicy") == "Always")
    for container in (*(spec.get("containers") or ()), *sidecars):
        for port in container.get("ports") or ():
            # The API server sets hostPort in pods on the node's network, but a template may leave it out.
            number = port.get("hostPort") or (spec.get("hostNetwork") and port.get("containerPort"))
            if number:
                yield f"{number}/{port.get('protocol') or 'TCP'}"


def rendezvous_port(job_uid: str, attempt: int, template: Mapping[str, Any]) -> int:
    """Return the port on which rank 0 of an attempt listens.

    Pods on the node's network share its ports, so two jobs on one node need different ports, and so do two attempts of
    which the older may still run. A port that the template uses itself is left out.
    """
    taken = set(list_host_ports({**(template.get("spec") or {}), "hostNetwork": True}))
    first = int(hashlib.sha256(f"{job_uid}/{attempt}".encode()).hexdigest()[:8], 16)
    ports = (FIRST_PORT + (first + i) % NUM_PORTS for i in range(NUM_PORTS))
    return next(port for port in ports if f"{port}/TCP" not in taken)
