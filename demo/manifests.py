"""The demo's job: the example's own manifest with the demo's clocks. Pure, but for reading the example."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from demo.options import JOB, NAMESPACE
from testbed.podenv import host_python

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/gpt_deepspeed/job.yaml"
READER = "read-losses"
CHECKPOINT_SECONDS = 10
STABLE_SECONDS = 20


def job(options: argparse.Namespace, machine: Path) -> dict[str, Any]:
    """The ElasticTrainingJob: commits and growth come sooner than in real life, everything else is the default.

    Args:
        options: of the demo.
        machine: folder of a node below which the node has this machine's folders.
    """
    documents = list(yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8")))
    found: dict[str, Any] = next(item for item in documents if item["kind"] == "ElasticTrainingJob")
    found["metadata"] = {"name": JOB, "namespace": NAMESPACE}
    spec = found["spec"]
    spec["accelerator"]["resource"] = options.resource
    spec["checkpoint"] |= {"claimName": options.claim or "checkpoints", "intervalSeconds": CHECKPOINT_SECONDS}
    spec.setdefault("recovery", {})["scaleUpStableSeconds"] = STABLE_SECONDS
    container = spec["template"]["spec"]["containers"][0]
    script = ROOT / "examples/gpt_deepspeed/train.py" if not options.kubeconfig else container["args"][0]
    container["args"] = [str(script), "--steps", str(options.steps)]
    if options.kubeconfig:
        container["image"] = options.image
    else:
        spec["template"] = host_python(spec["template"], machine=machine)
    return found


def reader_pod(options: argparse.Namespace, path: str) -> dict[str, Any]:
    """A pod that prints the loss logs, for clusters whose volumes this machine does not see."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": READER, "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "cat",
                    "image": options.image,
                    "command": ["sh", "-c", f"cat /checkpoint/{path}/loss-a*.jsonl"],
                    "volumeMounts": [{"name": "checkpoint", "mountPath": "/checkpoint", "readOnly": True}],
                }
            ],
            "volumes": [{"name": "checkpoint", "persistentVolumeClaim": {"claimName": options.claim}}],
        },
    }
