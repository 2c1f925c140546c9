"""The test bed is a real cluster, and what is done to it has the effects that it would have on real machines."""

from typing import Any

import pytest

from testbed import faults
from testbed.images import HOST_PYTHON
from testbed.podenv import host_python

pytestmark = pytest.mark.cluster

PROGRAM = """
import os, socket, ssl, time, urllib.error, urllib.request
deadline = time.time() + 30
while True:
    try:
        print("peer", socket.gethostbyname("pair-1.pair"), flush=True)
        break
    except OSError:
        assert time.time() < deadline
        time.sleep(0.2)
context = ssl.create_default_context(cafile="/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
try:
    urllib.request.urlopen("https://kubernetes.default.svc/api/v1/nodes", context=context)
except urllib.error.HTTPError as error:
    print("api", error.code, flush=True)
try:
    socket.gethostbyname("nobody.pair")
except OSError:
    print("unknown name refused", flush=True)
print("gpus", os.environ["TESTBED_GPUS"], flush=True)
time.sleep(600)
"""


def pair_job() -> list[dict[str, Any]]:
    """Two pods on two nodes, two GPUs each."""
    template = {
        "metadata": {"labels": {"app": "pair"}},
        "spec": {
            "subdomain": "pair",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "main",
                    "command": ["python", "-c", PROGRAM],
                    "resources": {"limits": {"amd.com/gpu": "2"}},
                }
            ],
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "pair"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "pair"}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "pair"},
        "spec": {
            "completions": 2,
            "parallelism": 2,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": host_python(template),
        },
    }
    return [service, job]


def test_pods_get_names_devices_and_the_api_and_a_dead_node_is_noticed(testbed, namespace: str) -> None:
    objects = [{**item, "metadata": {**item["metadata"], "namespace": namespace}} for item in pair_job()]
    testbed.apply(*objects)

    def logs() -> list[str]:
        return testbed.kubectl("logs", "-n", namespace, "-l", "app=pair", check=False).splitlines()

    testbed.wait(lambda: sum(line.startswith("gpus") for line in logs()) == 2, what="both pods' output")
    lines = logs()
    assert sum(line.startswith("peer 10.88.") for line in lines) == 2
    assert lines.count("api 403") == 2
    assert lines.count("unknown name refused") == 2
    assert {line for line in lines if line.startswith("gpus")} <= {"gpus gpu0,gpu1", "gpus gpu1,gpu0"}

    pod = testbed.get("pods", "-n", namespace)["items"][0]
    node = pod["spec"]["nodeName"]
    faults.fail_gpu(node, "gpu0")

    def unhealthy() -> bool:
        status = testbed.get("pod", pod["metadata"]["name"], "-n", namespace)["status"]["containerStatuses"][0]
        found = status.get("allocatedResourcesStatus", [{}])[0].get("resources", [])
        return any(item["resourceID"] == "gpu0" and item["health"] == "Unhealthy" for item in found)

    testbed.wait(unhealthy, what="the pod to show its sick device")
    testbed.wait(lambda: testbed.get("node", node)["status"]["allocatable"]["amd.com/gpu"] == "1", what="one GPU less")

    testbed.kill_node(node)
    testbed.wait(lambda: not testbed.node_is_ready(node), what=f"{node} to be NotReady", timeout_seconds=30)
    testbed.heal_node(node)
    assert testbed.get("node", node)["status"]["allocatable"]["amd.com/gpu"] == "2"


def test_a_hung_kubelet_and_a_cut_cable_make_a_node_not_ready(testbed) -> None:
    faults.hang_kubelet("gpu-1")
    faults.unplug("gpu-2")
    for node in ("gpu-1", "gpu-2"):
        testbed.wait(lambda node=node: not testbed.node_is_ready(node), what=f"{node} NotReady", timeout_seconds=30)
    for node in ("gpu-1", "gpu-2"):
        testbed.heal_node(node)


def test_the_image_of_host_pods_is_never_pulled() -> None:
    found = host_python(
        {"spec": {"containers": [{"name": "a", "image": "x", "env": [{"name": "PATH", "value": "/x"}]}]}}
    )
    container = found["spec"]["containers"][0]
    assert (container["image"], container["imagePullPolicy"]) == (HOST_PYTHON, "Never")
    assert [item["value"] for item in container["env"] if item["name"] == "PATH"] == ["/x"]
