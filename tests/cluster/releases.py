"""The chart, rendered and installed, for the cluster tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from testbed import helm

CHART = Path(__file__).parents[2] / "charts/elastic-training-operator"
NAME = "elastic-training-operator"
OLDEST = "1.31.0"
"""Of the versions of Kubernetes that the chart is for."""

FAST = {"imageSeconds": 3, "nodeStableSeconds": 5, "reshardBackoffSeconds": 2}
"""Settings that tests do not have to wait for."""

ON_THE_TEST_BED = {
    "image": {"repository": f"localhost/{NAME}", "pullPolicy": "Never"},
    "reshardImage": {"repository": "localhost/elastic-training-reshard", "pullPolicy": "Never"},
    "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
    "tolerations": [{"operator": "Exists"}],
    "settings": FAST,
}
"""Images as the test bed names them."""


def render(namespace: str, values: Mapping[str, Any], name: str = NAME) -> list[dict[str, Any]]:
    """The objects of a release."""
    # What helm assumes without a cluster depends on how it was built.
    text = helm.run("template", name, CHART, f"--kube-version={OLDEST}", namespace=namespace, values=values)
    return [item for item in yaml.safe_load_all(text) if item]


@dataclasses.dataclass(frozen=True)
class Release:
    """An installation of the chart in a namespace of a cluster.

    Attributes:
        serves: namespaces that it serves; empty for all.
    """

    cluster: Any
    namespace: str
    serves: tuple[str, ...]
    name: str = NAME

    def install(self, *options: str, **values: Any) -> str:
        """`helm install`, and wait until all replicas are ready."""
        return self._helm("install", self.name, CHART, "--wait", "--timeout=120s", *options, values=values)

    def upgrade(self, *options: str, **values: Any) -> str:
        """`helm upgrade`, and wait until all new replicas are ready."""
        return self._helm("upgrade", self.name, CHART, "--wait", "--timeout=120s", *options, values=values)

    def uninstall(self) -> str:
        """`helm uninstall`, and wait until all is gone."""
        return self._helm("uninstall", self.name, "--wait", "--timeout=120s")

    def pods(self) -> list[dict[str, Any]]:
        """The operator's pods that are not being deleted."""
        label = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/name={NAME}"
        items = self.cluster.get("pods", "-n", self.namespace, "-l", label).get("items", [])
        return [item for item in items if "deletionTimestamp" not in item["metadata"]]

    def lease(self) -> dict[str, Any]:
        """The leader's."""
        return dict(self.cluster.get("lease", self.name, "-n", self.namespace))

    def leader(self) -> str:
        """Name of the pod that leads; empty for none."""
        return str(self.lease().get("spec", {}).get("holderIdentity", "")).rpartition("_")[0]

    def logs(self, *options: str) -> str:
        """Return the logs of all replicas."""
        label = f"app.kubernetes.io/instance={self.name}"
        return str(
            self.cluster.kubectl(
                "logs", "-n", self.namespace, "-l", label, "--tail=-1", "--prefix", *options, check=False
            )
        )

    def _helm(self, *arguments: str | Path, values: Mapping[str, Any] | None = None) -> str:
        if values is not None:
            values = {**ON_THE_TEST_BED, "watchNamespaces": list(self.serves), **values}
        return helm.run(*arguments, namespace=self.namespace, kubeconfig=self.cluster.kubeconfig, values=values)
