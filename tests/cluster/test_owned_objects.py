"""Others may patch the metadata of every object that the operator creates, and the garbage collector is one of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import Current, Resume
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import read_kubeconfig
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.writer import ClusterWriter
from elastic_operator.manifests.attempt import JobRef, attempt_objects, reshard_job
from elastic_operator.reconcile.actions import Create, Event
from elastic_operator.reconcile.effective_spec import read_newest_spec
from reshard.contract import GROUP, KIND, VERSION
from reshard.topology import Topology
from testbed.kubectl import Kubectl
from tests.cluster.jobs import Operator
from tests.cluster.own_api_server import daemon, own_api_server, play_node

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server]

SPEC: dict[str, Any] = {
    "nodes": {"min": 1, "max": 2},
    "accelerator": {"resource": "amd.com/gpu", "perNode": [2]},
    "parallelism": {"tensor": [1, 2]},
    "batch": {"globalSamples": 8},
    "checkpoint": {"claimName": "ckpt", "path": "gpt"},
    "model": {
        "parameters": 7.0e9, "layers": 2, "hiddenSize": 8, "attentionHeads": 2, "keyValueHeads": 2, "vocabSize": 16,
        "sequenceLength": 8,
    },
    "template": {
        "metadata": {"annotations": {"note": "a < b && c > d, é, \U0001f600, \u2028, \u0007, \u007f, \\u003c"}},
        "spec": {"containers": [{"name": "train", "image": "i", "x": {"b": 1e-7, "a": 0.1, "c": 1e22}}]},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def kubectl() -> Iterator[Kubectl]:
    with own_api_server() as client:
        yield client


def _create_all(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """Create a resource, and with the operator's own writer everything that it may own; return the resource."""
    resource = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": name, "namespace": "default"}}
    kubectl("create", "--validate=false", "-f", "-", stdin=json.dumps({**resource, "spec": SPEC}))
    stored = kubectl.get("etj", name)
    asyncio.run(_write_all(kubectl.kubeconfig, stored))
    return stored


async def _write_all(config: Path, stored: Mapping[str, Any]) -> None:
    meta, spec = stored["metadata"], parse_spec(stored["spec"])
    job = JobRef(name=meta["name"], namespace="default", uid=meta["uid"], generation=1)
    resume = Resume(source="/checkpoint/gpt/a1/step-00000001", uri="/checkpoint/gpt/a2/step-00000001", step=1)
    current = Current(topology=Topology(tp=2), num_nodes=1, gpus_per_node=2, resume=resume)
    nodes, renewals = NodeCache(), RenewalCache()
    client = KubernetesClient(read_kubeconfig([config], None, {}))
    try:
        writer = ClusterWriter(client, ClusterReader(client, nodes, renewals, ClusterStore(nodes, renewals), ()))
        await writer.keep_spec(job, stored["spec"])
        for manifest in [*attempt_objects(job, spec, 1, current, 10.0), reshard_job(job, spec, 2, current)]:
            await writer.act("default", job.name, Create(manifest=manifest))
        await writer.post_event(stored, Event(reason="Launched", message="a message"), 1_800_000_000.0)
    finally:
        await client.close()


def _list_own(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    kinds = "jobs,services,serviceaccounts,roles,rolebindings,leases,poddisruptionbudgets,controllerrevisions"
    found = kubectl.get(kinds, "-l", f"elastictraining.dev/job-name={name}")["items"]
    events = kubectl.get("events")["items"]
    return [*found, *(item for item in events if item["involvedObject"]["name"] == name)]


def test_others_may_patch_the_metadata_of_every_object(kubectl: Kubectl) -> None:
    stored = _create_all(kubectl, "patched")
    own = _list_own(kubectl, "patched")
    assert {item["kind"] for item in own} == {
        "Job", "Service", "ServiceAccount", "Role", "RoleBinding", "Lease", "PodDisruptionBudget", "ControllerRevision",
        "Event",
    }  # fmt: skip
    names = [f"{item['kind'].lower()}/{item['metadata']['name']}" for item in own]
    kubectl("label", *names, "strategic=yes")
    kubectl("annotate", *names, "strategic=yes")
    kubectl("patch", *names, "--type=merge", "-p", '{"metadata": {"labels": {"merge": "yes"}}}')
    kubectl("patch", *names, "--type=json", "-p", '[{"op": "add", "path": "/metadata/labels/json", "value": "yes"}]')
    partial = [
        {
            "apiVersion": item["apiVersion"],
            "kind": item["kind"],
            "metadata": {"name": item["metadata"]["name"], "labels": {"applied": "yes"}},
            **({"revision": 1} if item["kind"] == "ControllerRevision" else {}),
        }
        for item in own
    ]
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(partial))
    for item in kubectl.get(*names)["items"]:
        labels = item["metadata"]["labels"]
        assert {key for key in labels if labels[key] == "yes"} == {"strategic", "merge", "json", "applied"}, item[
            "kind"
        ]
    kept = next(name for name in names if name.startswith("controllerrevision/"))
    assert read_newest_spec([kubectl.get(kept)], stored["metadata"]["uid"]) == parse_spec(stored["spec"])


def test_a_job_can_be_deleted_without_what_it_owns(kubectl: Kubectl, tmp_path: Path) -> None:
    _create_all(kubectl, "orphaned")
    own = [item for item in _list_own(kubectl, "orphaned") if item["kind"] != "Event"]
    with daemon(tmp_path, "kube-controller-manager", kubectl.kubeconfig, "--controllers=garbage-collector-controller"):
        kubectl("delete", "etj", "orphaned", "--cascade=orphan", "--timeout=100s")
    left = [item for item in _list_own(kubectl, "orphaned") if item["kind"] != "Event"]
    assert len(left) == len(own) > 8
    assert not any(item["metadata"].get("ownerReferences") for item in left)


def _until(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_a_namespace_that_is_deleted_ends_its_job_without_a_relaunch(kubectl: Kubectl, tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    kubectl("create", "namespace", "ends")
    play_node(kubectl, "gpu-1")
    resource = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": "gpt", "namespace": "ends"}}
    operator = Operator(kubectl.kubeconfig, "ends", log, "--no-leader-election")
    try:
        spec = {**SPEC, "template": {"spec": {"containers": [{"name": "train", "image": "i"}]}}}
        kubectl.apply({**resource, "spec": spec})
        _until("the Job", lambda: kubectl.get("job", "gpt-a1", "-n", "ends"))
        _until("its UID in the status", lambda: kubectl.get("etj", "gpt", "-n", "ends")["status"].get("jobUids"))
        kubectl("delete", "namespace", "ends", "--wait=false")  # what is in it goes one after another
        kubectl("delete", "job", "gpt-a1", "-n", "ends")
        _until("the refusal", lambda: "the namespace is being deleted" in log.read_text())
        status = kubectl.get("etj", "gpt", "-n", "ends")["status"]
        assert (status["attempt"], status.get("recoveries", [])) == (1, [])
        kubectl("delete", "etj", "gpt", "-n", "ends")
    finally:
        operator.stop()
        print(log.read_text()[-5000:])
    before, *after = log.read_text().split("the namespace is being deleted")
    assert "Traceback" not in before
    assert len(after) == 1, "said once"
    assert not {"WARNING", "ERROR"} & set(after[0].split())
