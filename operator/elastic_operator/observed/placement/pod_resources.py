"""What pods request and nodes offer, as the scheduler counts it. Pure.

Processor time counts in millicores, memory and storage in bytes, everything else in pieces. Source: Kubernetes 1.36,
k8s.io/component-helpers/resource (PodRequests) and k8s.io/apimachinery (Quantity).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from elastic_operator.manifests.ports import list_host_ports

CPU = "cpu"
PODS = "pods"
"""A node offers a number of pods; each pod counts as one."""
HOST_PORT = "hostPort "
"""Beginning of the name of a port of the node, for instance `hostPort 8080/TCP`. A node offers each port once."""

_QUANTITY = re.compile(r"([+-]?[0-9]{0,18}(?:\.[0-9]{0,9})?)(?:([eE][+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE]))?")
_FACTORS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}


@functools.lru_cache(maxsize=4096)
def parse_quantity(text: str) -> Decimal | None:
    """Return the number that a Kubernetes quantity such as `500m` or `16Gi` stands for; None if it is none.

    >>> parse_quantity("1.5Ki")
    Decimal('1536.0')
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    if match[2]:
        return Decimal(match[1] + match[2])
    return Decimal(match[1]) * _FACTORS.get(match[3] or "", Decimal(1))


def parse_extended(quantities: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the extended resources: whole numbers under the name of a domain. Kubernetes writes 1000 as `1k`."""
    amounts: dict[str, int] = {}
    for name, text in (quantities or {}).items():
        number = parse_quantity(str(text)) if "/" in name else None
        if number is not None and number >= 0 and number == (whole := int(number)):
            amounts[name] = whole
    return amounts


def parse_builtin(quantities: Mapping[str, Any] | None) -> dict[str, int]:
    """Return all other resources (cpu in millicores); quantities that cannot be read are left out."""
    amounts: dict[str, int] = {}
    for name, text in (quantities or {}).items():
        number = parse_quantity(str(text)) if "/" not in name else None
        if number is not None and number >= 0:
            amounts[name] = math.ceil(number * 1000 if name == CPU else number)
    return amounts


def pod_requests(spec: Mapping[str, Any]) -> dict[str, int]:
    """Sum the resources that a pod with this spec holds, besides its place on the node.

    A container without a request for a resource requests its limit. Init containers run one after another, those with
    `restartPolicy: Always` beside everything that follows.
    """
    total: dict[str, int] = {}
    for container in spec.get("containers") or ():
        _add(total, _container_requests(container))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        needed = _container_requests(container)
        if container.get("restartPolicy") == "Always":
            _add(total, needed)
            _add(sidecars, needed)
            needed = sidecars
        else:
            needed = {name: needed.get(name, 0) + sidecars.get(name, 0) for name in {*needed, *sidecars}}
        peak = {name: max(peak.get(name, 0), needed.get(name, 0)) for name in {*peak, *needed}}
    total = {name: max(total.get(name, 0), peak.get(name, 0)) for name in {*total, *peak}}
    total |= parse_builtin((spec.get("resources") or {}).get("requests"))  # of the whole pod
    _add(total, parse_builtin(spec.get("overhead")))
    return total | {f"{HOST_PORT}{port}": 1 for port in list_host_ports(spec)}


def extended_only(requests: Mapping[str, int]) -> dict[str, int]:
    """Return the extended resources among `requests`."""
    return {name: amount for name, amount in requests.items() if "/" in name and not name.startswith(HOST_PORT)}


def count_room(
    needed: Iterable[tuple[str, int]], offered: Mapping[str, int], used: Mapping[str, int]
) -> tuple[int, str]:
    """Return how many equal pods fit on a node, and the name of the resource that admits no more of them.

    Args:
        needed: name and amount (above 0) of each resource that one pod requests.
        offered: what the node offers; a built-in resource that it does not report counts as sufficient.
        used: what other pods hold there.
    """
    room, scarcest = MOST_PODS, ""
    for name, amount in needed:
        if name.startswith(HOST_PORT):
            available = 1
        elif name in offered or "/" in name or name.startswith("hugepages-"):
            available = offered.get(name, 0)
        else:
            continue
        fits = max(0, available - used.get(name, 0)) // amount
        if fits < room:
            room, scarcest = fits, name
    return room, scarcest


MOST_PODS = 65_536
"""More pods than a node can run."""


def _container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    quantities = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {**parse_builtin(quantities), **parse_extended(quantities)}


def _add(total: dict[str, int], amounts: Mapping[str, int]) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + amount
