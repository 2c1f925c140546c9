"""kubectl as a function, on any cluster: the one on the PATH, else the one that was fetched for the test bed."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from testbed import reads
from testbed.components import bin_dir
from testbed.errors import TestbedError


@dataclasses.dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl with the credentials of one cluster.

    Attributes:
        kubeconfig: file with the credentials.
        timeout_seconds: for one command.
    """

    kubeconfig: Path
    timeout_seconds: float = 120

    def __call__(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run a command and return what it prints.

        Raises:
            TestbedError: it failed and `check` is set.
        """
        program = shutil.which("kubectl") or str(bin_dir() / "kubectl")
        done = subprocess.run(
            [program, "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=self.timeout_seconds,
        )
        if check and done.returncode:
            raise TestbedError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get ... -o json`; an empty dict where there is nothing."""
        if (read := reads.read(self.kubeconfig, arguments)) is not None:
            return read
        text = self("get", *arguments, "-o", "json", "--ignore-not-found")
        value: dict[str, Any] = json.loads(text) if text.strip() else {}
        return value

    def apply(self, *objects: dict[str, Any]) -> None:
        """`kubectl apply`."""
        self("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def apply_crd(self, path: Path) -> None:
        """Apply a CustomResourceDefinition, and wait until the API server serves its kind.

        Raises:
            TestbedError: the API server refuses it, or does not serve it within the timeout.
        """
        self("apply", "--server-side", "-f", str(path))
        self.wait_established(yaml.safe_load(path.read_text(encoding="utf-8"))["metadata"]["name"])

    def wait_established(self, crd: str) -> None:
        """Wait until the API server serves the kind of a CustomResourceDefinition.

        `kubectl wait` fails at once while the object has no conditions yet (Kubernetes 1.36).

        Raises:
            TestbedError: it does not within the timeout.
        """
        deadline = time.monotonic() + self.timeout_seconds
        while time.monotonic() < deadline:
            conditions = self.get("crd", crd).get("status", {}).get("conditions") or []
            if any((item["type"], item["status"]) == ("Established", "True") for item in conditions):
                return
            time.sleep(0.1)
        raise TestbedError(f"CustomResourceDefinition {crd} was not established within {self.timeout_seconds:g} s")
