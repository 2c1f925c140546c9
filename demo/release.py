"""The operator on the demo's cluster: installed with Helm from this checkout's chart, as users install it."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.kube import Kube
from demo.manifests import ROOT
from testbed import helm

NAME = "elastic-training-operator"
NAMESPACE = "elastic-training"
CHART = ROOT / "charts/elastic-training-operator"
_LOOK_SECONDS = 5.0
_READY_SECONDS = 180


class Operator:
    """The operator's pods."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._looked = 0.0
        self._alive = True

    def alive(self) -> bool:
        """At least one replica is ready; looked up every few seconds at most."""
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            status: dict[str, Any] = self._kube.kubectl.get("deployment", NAME, "-n", NAMESPACE).get("status", {})
            self._alive = status.get("readyReplicas", 0) > 0
        return self._alive

    def save_logs(self, path: Path) -> None:
        """Save the logs of all replicas."""
        selector = f"app.kubernetes.io/instance={NAME}"
        text = self._kube.kubectl(
            "logs", "-n", NAMESPACE, "-l", selector, "--tail=-1", "--prefix", "--ignore-errors", check=False
        )
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def operator(options: argparse.Namespace, kube: Kube) -> Iterator[Operator]:
    """Install the chart; its pods' logs are saved at the end, and the release is removed unless it is to be kept.

    Raises:
        HelmError: helm failed, or the operator did not become ready.
    """
    values = [options.helm_values] if options.helm_values else []
    if kube.is_own:
        values.append(ROOT / "testbed/values.yaml")
    command = ["upgrade", "--install", NAME, str(CHART), "--create-namespace", "--take-ownership"]
    command += ["--wait", f"--timeout={_READY_SECONDS}s", *(f"--values={path}" for path in values)]
    helm.run(*command, namespace=NAMESPACE, kubeconfig=kube.kubeconfig)
    kube.kubectl("wait", "--for=condition=Established", "crd", "elastictrainingjobs.elastictraining.dev")
    found = Operator(kube)
    try:
        yield found
    finally:
        found.save_logs(options.output / "operator.log")
        if not options.keep and not kube.is_own:  # our own cluster goes as a whole
            wait = ("--wait", f"--timeout={_READY_SECONDS}s")
            helm.run("uninstall", NAME, *wait, namespace=NAMESPACE, kubeconfig=kube.kubeconfig)
