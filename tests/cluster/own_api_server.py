"""An API server of a test's own, beside the test bed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.apiserver import CRD, apiserver_with_crd
from elastic_operator.api.serialization import format_time
from testbed import components
from testbed.errors import CannotRunHereError
from testbed.kubectl import Kubectl


@contextlib.contextmanager
def own_api_server(*flags: str, crd: Path = CRD) -> Iterator[Kubectl]:
    """Start an API server with the kind ElasticTrainingJob, or skip the test where none can run."""
    with contextlib.ExitStack() as stack:
        try:
            kubectl = stack.enter_context(apiserver_with_crd(*flags, crd=crd))
        except CannotRunHereError as error:
            pytest.skip(str(error))
        yield kubectl


@contextlib.contextmanager
def daemon(folder: Path, program: str, config: Path, *flags: str) -> Iterator[None]:
    """Run a part of the control plane beside the API server; print the end of its log afterwards."""
    with open(folder / f"{program}.log", "wb") as log:
        command = [str(components.bin_dir() / program), f"--kubeconfig={config}", "--leader-elect=false", *flags]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command, "--secure-port=0"], stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.kill()
            process.wait(timeout=20)
            print((folder / f"{program}.log").read_text()[-3000:])


def play_node(kubectl: Kubectl, name: str) -> None:
    """Create a Ready node with two GPUs, without a kubelet."""
    kubectl.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    amounts = {"amd.com/gpu": "2", "cpu": "8", "memory": "8Gi", "pods": "110"}
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Played",
        "message": "",
        "lastTransitionTime": format_time(time.time())[:-5] + "Z",
    }
    status = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}
    kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(status))
    kubectl("taint", "node", name, "node.kubernetes.io/not-ready-", check=False)
