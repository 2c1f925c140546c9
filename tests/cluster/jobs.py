"""Jobs and operators for the cluster tests."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from testbed import podenv

LIGHT = ["python", "tests/cluster/light_trainer.py"]
"""A training without a model: see there for its arguments."""
_AT_ONCE = ("--grace-period=0", "--force", "--wait=false")
LAUNCH = ("python", "-m", "elastic_trainer.launch", "--preload", "torch._dynamo")
"""Starts the ranks. Each optimizer imports torch's compiler, a processor second: once for all ranks of a pod."""
GPT_AT_FULL_SPEED = [*LAUNCH, "examples/gpt_deepspeed/train.py"]
# At full speed, three ranks would take both processors from all that is tested.
GPT = [*GPT_AT_FULL_SPEED, "--save-every", "5", "--step-delay", "0.4"]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Operator:
    """`elastic-operator run` as a process of this machine; without a namespace it serves all."""

    def __init__(self, kubeconfig: Path, namespace: str | None, log: Path, *options: str) -> None:
        program = str(Path(sys.executable).with_name("elastic-operator"))
        served = [f"--namespace={namespace}"] if namespace is not None else []
        self._command = [program, "run", "--kubeconfig", str(kubeconfig), *served, *options]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with open(self._log, "ab") as stream:
            self._process = subprocess.Popen(self._command, stderr=stream)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(timeout=30)

    def crash(self) -> None:
        self.stop(signal.SIGKILL)
        self.start()


class Run:
    """One ElasticTrainingJob and its operator."""

    def __init__(self, cluster: Any, namespace: str, name: str = "gpt") -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name

    def submit(
        self,
        command: list[str],
        *,
        pod: dict[str, Any] | None = None,
        pod_spec: dict[str, Any] | None = None,
        name: str = "",
        labels: dict[str, str] | None = None,
        template_labels: dict[str, str] | None = None,
        **spec: Any,
    ) -> None:
        """Create the job: `pod` changes the training container, `pod_spec` the pod around it; `labels` of the job."""
        container = {
            "name": "train", "image": "replaced", "command": command,
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        }  # fmt: skip
        template = podenv.host_python({"spec": {"terminationGracePeriodSeconds": 5, "containers": [container]}})
        template["spec"]["containers"][0] |= pod or {}
        template["spec"] |= pod_spec or {}
        template |= {"metadata": {"labels": template_labels}} if template_labels else {}
        job = {
            "apiVersion": "elastictraining.dev/v1beta1",
            "kind": "ElasticTrainingJob",
            "metadata": {"name": name or self.name, "namespace": self.namespace, "labels": labels or {}},
            "spec": {
                "accelerator": {"resource": "amd.com/gpu", "perNode": [2]},
                "nodes": {"min": 1, "max": 1},
                "batch": {"globalSamples": 20, "microSamples": 2},
                "checkpoint": {"claimName": "ckpt", "path": self.name, "intervalSeconds": 1000},
                "template": template,
                **spec,
            },
        }
        self.cluster.apply(job)

    def remove(self) -> None:
        """Delete all jobs of the namespace, and wait until they hold no GPU any more."""
        self.cluster.kubectl("delete", "etj", "--all", "-n", self.namespace)
        delete_pods(self.cluster, self.namespace)

    def status(self) -> dict[str, Any]:
        return dict(self.cluster.get("etj", self.name, "-n", self.namespace).get("status", {}))

    def until(self, what: str, test: Any, timeout_seconds: float = 120) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def holds() -> bool:
            found.clear()
            found.update(self.status())
            return bool(test(found))

        try:
            self.cluster.wait(holds, what=what, timeout_seconds=timeout_seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; status: {json.dumps(found, indent=1)}") from None
        return found

    def until_phase(self, phase: str, timeout_seconds: float = 120) -> dict[str, Any]:
        return self.until(f"phase {phase}", lambda status: status.get("phase") == phase, timeout_seconds)

    def patch(self, **spec: Any) -> None:
        text = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "etj", self.name, "-n", self.namespace, "--type=merge", "-p", text)

    def events(self) -> list[str]:
        return [item["reason"] for item in self.cluster.get("events", "-n", self.namespace).get("items", [])]

    def condition(self, type_: str) -> dict[str, Any]:
        return next((item for item in self.status().get("conditions", []) if item["type"] == type_), {})

    def workers(self) -> list[dict[str, Any]]:
        """The training pods, without the failed ones of earlier attempts that stay for their logs."""
        items = self.cluster.get("pods", "-n", self.namespace, "-l", "elastictraining.dev/role=worker").get("items", [])
        newest = max((_attempt(item) for item in items), default=0)
        return [
            item
            for item in items
            if "deletionTimestamp" not in item["metadata"]
            and (_attempt(item) == newest or item["status"]["phase"] not in ("Succeeded", "Failed"))
        ]


def delete_pods(cluster: Any, namespace: str, *selector: str) -> None:
    """Delete pods by force until there are none: a Job that is being deleted may replace those that were deleted."""

    def are_gone() -> bool:
        cluster.kubectl("delete", "pods", "-n", namespace, *(selector or ("--all",)), *_AT_ONCE, check=False)
        return not cluster.get("pods", "-n", namespace, *selector).get("items")

    cluster.wait(are_gone, what=f"the pods of {namespace} to be gone", timeout_seconds=60)


def find_process(pod: dict[str, Any], program: str) -> int:
    """Return the number of a process of a pod, as this machine sees it, by a word of its command."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            if program.encode() in command and pod["metadata"]["uid"] in (path / "cgroup").read_text():
                return int(path.name)
    raise AssertionError(f"no process {program} of pod {pod['metadata']['name']} on this machine")


def _attempt(item: dict[str, Any]) -> int:
    return int(item["metadata"]["labels"]["elastictraining.dev/attempt"])


def elastic(**recovery: Any) -> dict[str, Any]:
    """3 nodes of 2 GPUs: tp=1,pp=3,dp=2 on all of them, another tp or pp on two."""
    return {
        "nodes": {"min": 1, "max": 3},
        "parallelism": {"tensor": [1, 2], "pipeline": [1, 2, 3]},
        "model": {
            "parameters": 1.0e6, "layers": 6, "hiddenSize": 128, "attentionHeads": 4, "keyValueHeads": 2,
            "vocabSize": 257, "sequenceLength": 64,
        },
        "recovery": {"scaleUpStableSeconds": 5, **recovery},
    }  # fmt: skip


def victim(run: Run) -> str:
    """A node of the attempt that does not host rank 0."""
    label = "batch.kubernetes.io/job-completion-index"
    return next(str(pod["spec"]["nodeName"]) for pod in run.workers() if pod["metadata"]["labels"][label] == "1")


def resumed(attempt: int) -> Any:
    return lambda status: status.get("attempt", 0) > attempt and status.get("phase") == "Running"


def committed(status: dict[str, Any]) -> bool:
    checkpoint = status.get("checkpoint", {})
    return status.get("phase") == "Running" and checkpoint.get("attempt") == status.get("attempt")
