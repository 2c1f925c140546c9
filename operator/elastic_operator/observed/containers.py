"""The container of a pod that is ours, by its name: admission may add others, in any order. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_operator.api.pod_template import MAIN_CONTAINER

_ORDINARY_WAITS = ("ContainerCreating", "PodInitializing", None)


def name_main_container(pod: Mapping[str, Any]) -> str:
    """Return the name of the container that trains or converts; empty if the pod has no container.

    The operator writes the name into each pod's template. A pod of an older operator has no such annotation.
    """
    names = [item.get("name") or "" for item in (pod.get("spec") or {}).get("containers") or ()]
    name = (pod["metadata"].get("annotations") or {}).get(MAIN_CONTAINER)
    return name if name in names else next(iter(names), "")


def find_end(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the ContainerStateTerminated of a container, empty if it has not ended."""
    return _find_state(status, name).get("terminated") or {}


def list_survivors(status: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the containers that keep a pod from ending although the container `name` has ended.

    Init containers do not: the kubelet stops those with `restartPolicy: Always` after the others.
    """
    if find_end(status, name) and status.get("phase") not in ("Succeeded", "Failed"):
        for item in status.get("containerStatuses") or ():
            if item.get("name") != name and not (item.get("state") or {}).get("terminated"):
                yield str(item.get("name"))


def find_phase(status: Mapping[str, Any], name: str) -> str:
    """Return the phase of a pod, which is Running once the container `name` has started.

    The kubelet calls a pod Pending as long as any container waits for its first start.
    """
    phase = str(status.get("phase", "Pending"))
    return "Running" if phase == "Pending" and _has_started(status, name) else phase


def find_wait(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the ContainerStateWaiting that keeps a container from running, empty if it is nothing out of the ordinary.

    The container waits for itself and for init containers, sidecars among them. Once it runs, it waits for none.
    """
    if _has_started(status, name):
        return {}
    own = (item for item in status.get("containerStatuses") or () if item.get("name") == name)
    statuses = itertools.chain(status.get("initContainerStatuses") or (), own)
    states = ((item.get("state") or {}).get("waiting") for item in statuses)
    return next((state for state in states if state and state.get("reason") not in _ORDINARY_WAITS), {})


def _has_started(status: Mapping[str, Any], name: str) -> bool:
    """Return whether a container runs or has ended, and does not wait to be started once more."""
    state = _find_state(status, name)
    return "running" in state or "terminated" in state


def _find_state(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    states = {item.get("name"): item.get("state") or {} for item in status.get("containerStatuses") or ()}
    return states.get(name, {})
