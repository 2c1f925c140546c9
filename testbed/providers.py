"""The clusters that can be chosen by name."""

from __future__ import annotations

from collections.abc import Callable

from testbed.kind.cluster import KindCluster
from testbed.namespaces import NamespaceCluster
from testbed.provider import Provider

PROVIDERS: dict[str, Callable[[], Provider]] = {"testbed": NamespaceCluster, "kind": KindCluster}
