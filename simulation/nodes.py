"""The nodes of the simulated cluster: what has failed, what the operator sees of it, and what the scheduler may use."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Collection

from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import NodeView
from simulation.assumptions import GPUS_PER_NODE
from simulation.policies import RESOURCE

CPU_NODE = "cpu"
"""Node without accelerators, on which the reshard pods run."""


def node_name(number: int) -> str:
    """Return the name of a node."""
    return f"gpu-{number:05d}"


class Silence(enum.IntEnum):
    """How much the operator can see of a silent node."""

    UNSEEN = 0
    LEASE_STALE = 1
    NOT_READY = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What is wrong with a node.

    Attributes:
        silent_since: when it fell silent; None while it answers.
        silence: what the operator sees of that.
        changed: last transition of its Ready condition.
        healthy_gpus: GPUs that its device plugin offers.
        cordoned_since: when it was closed for new pods; None while it is open.
    """

    silent_since: float | None = None
    silence: Silence = Silence.UNSEEN
    changed: float = 0.0
    healthy_gpus: int = GPUS_PER_NODE
    cordoned_since: float | None = None

    @property
    def cordoned(self) -> bool:
        """True if it is closed for new pods."""
        return self.cordoned_since is not None

    @property
    def is_impaired(self) -> bool:
        """True if anything is wrong."""
        return self.silent_since is not None or self.healthy_gpus < GPUS_PER_NODE or self.cordoned

    @property
    def is_open(self) -> bool:
        """True if the scheduler would place a pod there; it does not know of a silence before the node is not Ready."""
        return self.silence < Silence.NOT_READY and self.healthy_gpus == GPUS_PER_NODE and not self.cordoned


class Nodes:
    """All nodes. A change makes a new pool at the next observation, as in the operator's own store."""

    def __init__(self, num_nodes: int) -> None:
        self._states = {node_name(number): NodeState() for number in range(num_nodes)}
        self._views = {name: _view(name, state, 0.0) for name, state in self._states.items()}
        self._views[CPU_NODE] = NodeView(name=CPU_NODE)
        self._aging: set[str] = set()
        self._pool: NodePool | None = None

    def __getitem__(self, name: str) -> NodeState:
        return self._states[name]

    def pool(self, now: float) -> NodePool:
        """Return the views of all nodes at `now`."""
        for name in self._aging:
            self._refresh(name, now)
        if self._pool is None:
            self._pool = NodePool(RESOURCE, dict(self._views))
        return self._pool

    def change(self, name: str, state: NodeState, now: float) -> None:
        """Set the state of a node."""
        self._states[name] = state
        # The age of a stale Lease grows until the node is not Ready, which confirms the loss.
        (self._aging.add if state.silence is Silence.LEASE_STALE else self._aging.discard)(name)
        self._refresh(name, now)

    def choose(self, count: int, avoid: Collection[str]) -> tuple[str, ...]:
        """Return the nodes on which the scheduler places `count` pods; fewer if there are not enough."""
        names = (name for name, state in self._states.items() if state.is_open and name not in avoid)
        return tuple(itertools.islice(names, count))

    def is_silent(self, name: str) -> bool:
        """Return whether a node has fallen silent, seen or not."""
        return name != CPU_NODE and self._states[name].silent_since is not None

    def num_working(self) -> int:
        """Count the nodes with which nothing is wrong."""
        return sum(not state.is_impaired for state in self._states.values())

    def _refresh(self, name: str, now: float) -> None:
        view = _view(name, self._states[name], now)
        if view != self._views[name]:
            self._views[name] = view
            self._pool = None


def _view(name: str, state: NodeState, now: float) -> NodeView:
    is_stale = state.silence is not Silence.UNSEEN and state.silent_since is not None
    return NodeView(
        name=name,
        ready="Unknown" if state.silence is Silence.NOT_READY else "True",
        ready_since=state.changed,
        unschedulable=state.cordoned,
        cordoned_since=state.cordoned_since,
        allocatable={RESOURCE: state.healthy_gpus},
        capacity={RESOURCE: GPUS_PER_NODE},
        lease_age_seconds=now - state.silent_since if is_stale and state.silent_since is not None else None,
    )
