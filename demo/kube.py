"""The cluster that the demo runs on: the test bed, kind, or the one that the user has given."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from demo.manifests import READER, reader_pod
from demo.options import JOB, NAMESPACE
from testbed import storage
from testbed.kubectl import Kubectl
from testbed.provider import RESOURCES, Provider, Size
from testbed.providers import PROVIDERS

_READER_SECONDS = 300
"""Time for a node to pull the image and to attach the volume."""


class DemoError(Exception):
    """The demo's job did not do what the demo shows."""


class Kube:
    """kubectl, and faults of nodes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.is_own = options.kubeconfig is None
        self.provider: Provider = PROVIDERS[options.cluster]()
        self._volume: Path | None = None

    @functools.cached_property
    def kubeconfig(self) -> Path:
        """The admin's credentials; our own cluster has to be up."""
        return self.options.kubeconfig or self.provider.kubeconfig()

    @functools.cached_property
    def kubectl(self) -> Kubectl:
        """kubectl on this cluster."""
        return Kubectl(self.kubeconfig)

    @property
    def machine(self) -> Path:
        """Folder of a node below which the node has this machine's folders."""
        return self.provider.on_node(Path("/"))

    def get(self, *arguments: str) -> dict[str, Any]:
        """Objects of the demo's namespace; an empty dict where there is nothing."""
        return self.kubectl.get(*arguments, "-n", NAMESPACE)

    def apply(self, *objects: dict[str, Any]) -> None:
        """`kubectl apply`."""
        self.kubectl.apply(*objects)

    def prepare(self) -> None:
        """An empty namespace with a claim for checkpoints."""
        if not self.is_own:
            for kind, name in (("etj", JOB), ("pod", READER)):
                self.kubectl("delete", kind, name, "-n", NAMESPACE, "--ignore-not-found", "--wait=true")
            return
        self.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=true")
        self.kubectl("delete", "pv", f"{NAMESPACE}-checkpoints", "--ignore-not-found", "--wait=true")
        self.kubectl("create", "namespace", NAMESPACE)
        self._volume = self.provider.make_volume(NAMESPACE)
        shutil.rmtree(self._volume / JOB, ignore_errors=True)
        self.apply(*storage.claim(NAMESPACE, "checkpoints", self.provider.on_node(self._volume)))

    def node_of(self, attempt: int, index: int) -> str:
        """Node that runs pod `index` of an attempt."""
        selector = f"batch.kubernetes.io/job-name={JOB}-a{attempt},batch.kubernetes.io/job-completion-index={index}"
        pods = self.get("pods", "-l", selector).get("items", [])
        if not pods:
            raise DemoError(f"attempt {attempt} has no pod {index}")
        return str(pods[0]["spec"]["nodeName"])

    def kill(self, node: str) -> None:
        """End the node."""
        if self.is_own:
            self.provider.kill_node(node)
        else:
            subprocess.run(self.options.kill_command.format(node=node), shell=True, check=True)

    def heal(self, node: str) -> None:
        """Bring the node back."""
        if self.is_own:
            self.provider.heal_node(node)
        else:
            subprocess.run(self.options.heal_command.format(node=node), shell=True, check=True)

    def loss_logs(self, path: str, folder: Path) -> None:
        """Copy the attempts' loss logs into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("loss-a*.jsonl"):  # of the run before
            log.unlink()
        if self._volume is not None:
            for source in (self._volume / path).glob("loss-a*.jsonl"):
                shutil.copy(source, folder)
            return
        self.apply(reader_pod(self.options, path))
        done = ("--for=jsonpath={.status.phase}=Succeeded", f"--timeout={_READER_SECONDS}s")
        self.kubectl("wait", "-n", NAMESPACE, *done, f"pod/{READER}")
        for line in self.kubectl("logs", "-n", NAMESPACE, READER).splitlines():
            attempt = json.loads(line)["attempt"]
            with open(folder / f"loss-a{attempt}.jsonl", "a", encoding="utf-8") as stream:
                stream.write(line + "\n")


@contextlib.contextmanager
def cluster(kube: Kube) -> Iterator[None]:
    """A cluster on this machine for the time of the demo, unless another one was given."""
    if not kube.is_own:
        yield
        return
    resource = kube.options.resource
    kube.provider.up(Size(resources=RESOURCES if resource in RESOURCES else (resource,)))
    try:
        yield
    finally:
        if not kube.options.keep:
            kube.provider.down()


def wait_for(condition: Callable[[], Any], *, what: str, timeout_seconds: float) -> Any:
    """Call `condition` until it returns something true.

    Raises:
        DemoError: it did not in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise DemoError(f"waited {timeout_seconds:.0f} s for {what}")
