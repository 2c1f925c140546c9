"""What the demo leaves on a cluster that is not its own must not be taken for the next run's."""

import argparse
import json
from pathlib import Path
from typing import Any

from demo.kube import Kube
from demo.options import NAMESPACE


class Kubectl:
    """Lists calls, and has the log of the reader pod."""

    def __init__(self, log: str = "") -> None:
        self.log = log
        self.calls: list[str] = []

    def __call__(self, *arguments: str) -> str:
        self.calls.append(" ".join(arguments))
        return self.log if arguments[0] == "logs" else ""

    def apply(self, *objects: dict[str, Any]) -> None:
        self.calls += [f"apply {item['metadata']['name']}" for item in objects]


def other_cluster(kubectl: Kubectl) -> Kube:
    kube = Kube(argparse.Namespace(kubeconfig=Path("/k"), cluster="testbed", image="i", claim="c"))
    kube.__dict__["kubectl"] = kubectl
    return kube


def test_a_run_removes_the_reader_of_the_run_before() -> None:
    kubectl = Kubectl()
    other_cluster(kubectl).prepare()
    assert f"delete pod read-losses -n {NAMESPACE} --ignore-not-found --wait=true" in kubectl.calls


def test_the_losses_of_the_run_before_are_not_added_to(tmp_path: Path) -> None:
    for step in (1, 2):
        line = json.dumps({"attempt": 1, "step": step})
        other_cluster(Kubectl(f"{line}\n")).loss_logs("gpt", tmp_path)
    assert (tmp_path / "loss-a1.jsonl").read_text() == f"{line}\n"
