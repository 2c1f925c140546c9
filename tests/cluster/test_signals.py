"""Every signal of docs/operations.md on a real cluster: it happens, and the recovery has its name.

The page of failure modes lists the tests by signal; those of other modules cover the signals that are missing here. One
operator with short times serves all jobs of this module, each under a name of its own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testbed import faults, storage
from tests.cluster.conftest import Cluster
from tests.cluster.jobs import LIGHT, Operator, Run, delete_pods, victim

pytestmark = pytest.mark.cluster

GPU = "amd.com/gpu"
STEPS = [*LIGHT, "1000000", "0", "0"]
HANGS = ["env", "HANG_AT_STEP=3", *STEPS]
"""Rank 0 is alive and answers no drain."""
SECONDS = 60
TIMES = (
    "--heartbeat-seconds=1", "--image-seconds=2", "--startup-seconds=20", "--unschedulable-seconds=3",
    "--device-seconds=0.5", "--device-plugin-seconds=3", "--planned-seconds=1", "--node-stable-seconds=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(cluster: Cluster, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A namespace with a claim, and an operator with short times that serves it."""
    if not cluster.is_testbed:
        pytest.skip("hurts nodes: only on the test bed")
    name = f"signals-{uuid.uuid4().hex[:8]}"
    log = tmp_path_factory.mktemp("signals") / "operator.log"
    cluster.kubectl("create", "namespace", name)
    folder = storage.make_volume(name)
    cluster.apply(*storage.claim(name, "ckpt", folder))
    cluster.wait(lambda: cluster.get("serviceaccount", "default", "-n", name), what="the default ServiceAccount")
    operator = Operator(cluster.kubeconfig, name, log, "--no-leader-election", *TIMES)
    try:
        yield name
    finally:
        operator.stop()
        sys.stdout.write(log.read_text())
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        cluster.kubectl("delete", "pv", f"{name}-ckpt", "--wait=false", check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def idle(cluster: Cluster, place: str) -> Run:
    """A job on one GPU that never makes a step; it starts before the other tests and is judged after them."""
    run = Run(cluster, place, "idle")
    run.submit(["sleep", "1000"], accelerator={"resource": GPU, "perNode": [1]})
    return run


@pytest.fixture
def make(testbed: Cluster, place: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """Start a job on one whole node; its pods are gone when the next test begins."""
    made: list[Run] = []

    def submit(command: list[str], **spec: Any) -> Run:
        run = Run(testbed, place, f"j{uuid.uuid4().hex[:8]}")
        made.append(run)
        run.submit(command, **spec)
        return run

    yield submit
    for run in made:
        testbed.kubectl("delete", "etj", run.name, "-n", place, "--wait=false")
        own = ("-l", f"elastictraining.dev/job-name={run.name}")
        for pod in testbed.get("pods", "-n", place, *own).get("items", []):
            release(run, pod["metadata"]["name"])
        delete_pods(testbed, place, *own)


def trains(run: Run) -> dict[str, Any]:
    """Wait until the job makes steps; return its first pod."""
    run.until("steps", lambda found: found.get("progress", {}).get("step", 0) >= 3, SECONDS)
    return pod_of(run)


def pod_of(run: Run) -> dict[str, Any]:
    """The first pod of the job, once it is there."""
    own = ("-l", f"elastictraining.dev/job-name={run.name},elastictraining.dev/role=worker")

    def first() -> Any:
        return next(iter(run.cluster.get("pods", "-n", run.namespace, *own).get("items", [])), None)

    found: dict[str, Any] = run.cluster.wait(first, what="a pod", timeout_seconds=SECONDS)
    return found


def node_of(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["nodeName"])


def answered(run: Run, cause: str, *, planned: bool = False) -> dict[str, Any]:
    """Wait until the first attempt has ended, and check that this signal is the cause."""
    status = run.until(f"an answer to {cause}", lambda found: found.get("recoveries"), SECONDS)
    first: dict[str, Any] = status["recoveries"][0]
    assert (first["cause"], first.get("planned", False)) == (cause, planned), json.dumps(first, indent=1)
    return first


def hold(run: Run, pod: str) -> None:
    """Keep the object of a pod after its end, so that the operator sees how it ended, however late it looks."""
    finalizers = run.cluster.get("pod", pod, "-n", run.namespace)["metadata"].get("finalizers", [])
    patch = {"metadata": {"finalizers": [*finalizers, "elastictraining.dev/test"]}}
    run.cluster.kubectl("patch", "pod", pod, "-n", run.namespace, "--type=merge", "-p", json.dumps(patch))


def release(run: Run, pod: str) -> None:
    patch = '{"metadata":{"finalizers":null}}'
    run.cluster.kubectl("patch", "pod", pod, "-n", run.namespace, "--type=merge", "-p", patch, check=False)


def play(run: Run, pod: str, **status: Any) -> None:
    """Write the status of a pod that no scheduler and no kubelet takes care of."""
    patch = json.dumps({"status": status})
    arguments = ("patch", "pod", pod, "-n", run.namespace, "--subresource=status", "--type=merge", "-p", patch)
    run.cluster.kubectl(*arguments)


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_a_deleted_node_is_left_at_once(make: Callable[..., Run], testbed: Cluster) -> None:
    run = make(STEPS)
    name = node_of(trains(run))
    node = testbed.get("node", name)
    testbed.kubectl("delete", "node", name)
    try:
        assert answered(run, "NodeDeleted")["lost"] == [name]
    finally:
        meta = {key: node["metadata"].get(key) or {} for key in ("labels", "annotations")}
        testbed.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, **meta}, "spec": node["spec"]})


def test_a_node_without_power_is_left(make: Callable[..., Run], testbed: Cluster) -> None:
    # Not the node of rank 0, whose silence and the Lease of the kubelet confirm a loss without the condition Ready.
    run = make(STEPS, nodes={"min": 1, "max": 2}, batch={"globalSamples": 16}, recovery={"suspectSeconds": 60})
    trains(run)
    name = victim(run)
    testbed.kill_node(name)
    assert answered(run, "NodeNotReady")["lost"] == [name]


@contextlib.contextmanager
def tainted(cluster: Cluster, node: str, taint: str) -> Iterator[None]:
    cluster.kubectl("taint", "node", node, taint)
    try:
        yield
    finally:
        cluster.kubectl("taint", "node", node, f"{taint}-")


@pytest.mark.soak_only
def test_a_node_that_is_tainted_out_of_service_is_left_at_once(make: Callable[..., Run], testbed: Cluster) -> None:
    # Kubernetes evicts the pods of such a node at once: a training that can commit may leave before the operator looks.
    run = make(HANGS)
    name = node_of(trains(run))
    with tainted(testbed, name, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"):
        assert answered(run, "NodeOutOfService")["lost"] == [name]


def test_a_node_that_a_vendor_taints_is_drained_first(make: Callable[..., Run], testbed: Cluster) -> None:
    run = make(STEPS)
    with tainted(testbed, node_of(trains(run)), "amd.com/gpu-unhealthy=true:NoSchedule"):
        assert answered(run, "NodeTainted", planned=True)["lostSteps"] == 0


@pytest.mark.soak_only
def test_a_node_whose_lease_alone_is_stale_is_left_after_its_grace(make: Callable[..., Run], testbed: Cluster) -> None:
    run = make(STEPS, recovery={"suspectSeconds": 1})
    name = node_of(trains(run))
    # Nobody says that the node is not Ready: its kubelet hangs, and so does what watches the kubelets.
    with faults.control_plane_stopped("kube-controller-manager"):
        faults.hang_kubelet(name)
        try:
            assert answered(run, "NodeLeaseStale")["lost"] == [name]
        finally:
            faults.resume_kubelet(name)


# -- accelerators -----------------------------------------------------------------------------------------------------


def test_a_node_that_offers_fewer_devices_than_its_pods_hold_is_left(
    make: Callable[..., Run], testbed: Cluster
) -> None:
    run = make(STEPS)
    name = node_of(trains(run))
    faults.hang_kubelet(name)  # it would write what it offers again
    try:
        patch = json.dumps({"status": {"allocatable": {GPU: "1"}}})
        testbed.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)
        answered(run, "DeviceMissing")
    finally:
        faults.resume_kubelet(name)


@pytest.mark.soak_only
def test_a_device_plugin_that_stays_away_while_no_step_ends_is_a_failure(make: Callable[..., Run]) -> None:
    run = make(HANGS)
    with faults.device_plugins_stopped(node_of(trains(run))):
        answered(run, "DevicePluginGone")


# -- pods and Jobs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def priority(testbed: Cluster, place: str) -> Iterator[str]:
    """The name of a PriorityClass above that of the trainings."""
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": place}}
    testbed.apply({**body, "value": 1000})
    yield place
    testbed.kubectl("delete", "priorityclass", place)


def blocker(run: Run, name: str, **spec: Any) -> dict[str, Any]:
    """A pod that takes two GPUs and whose container never starts."""
    container = {
        "name": name, "image": "localhost/nowhere:1", "imagePullPolicy": "Never", "resources": {"limits": {GPU: "2"}},
    }  # fmt: skip
    meta = {"name": name, "namespace": run.namespace}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


@pytest.mark.soak_only
def test_a_preempted_pod_that_does_not_commit_in_time_is_a_failure(make: Callable[..., Run], priority: str) -> None:
    run = make(HANGS, pod_spec={"terminationGracePeriodSeconds": 1})
    pod = trains(run)
    hold(run, pod["metadata"]["name"])
    here = {"nodeSelector": {"kubernetes.io/hostname": node_of(pod)}}
    run.cluster.apply(blocker(run, "urgent", priorityClassName=priority, **here))
    try:
        assert "PreemptionByScheduler" in answered(run, "PodPreempted")["message"]
    finally:
        run.cluster.kubectl("delete", "pod", "urgent", "-n", run.namespace)


def test_an_evicted_pod_that_does_not_commit_in_time_is_a_failure(make: Callable[..., Run]) -> None:
    run = make(HANGS, pod_spec={"terminationGracePeriodSeconds": 1}, recovery={"podDisruptionBudget": False})
    name = trains(run)["metadata"]["name"]
    hold(run, name)
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": run.namespace}}
    path = f"/api/v1/namespaces/{run.namespace}/pods/{name}/eviction"
    run.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    assert "EvictionByEvictionAPI" in answered(run, "PodDisrupted")["message"]


def bind(run: Run, pod: str, node: str) -> None:
    """Do what a scheduler does, without looking at what the node has left."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    meta = {"name": pod, "namespace": run.namespace}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
    path = f"/api/v1/namespaces/{run.namespace}/pods/{pod}/binding"
    run.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


@pytest.mark.soak_only
def test_a_pod_that_the_kubelet_rejects_is_a_failure_of_the_node(make: Callable[..., Run]) -> None:
    node = node_of(trains(make(STEPS)))  # this job holds both of its GPUs
    run = make(STEPS, pod_spec={"schedulerName": "nobody"})
    bind(run, pod_of(run)["metadata"]["name"], node)
    assert f"the kubelet of node {node} rejected" in answered(run, "PodRejected")["message"]


@pytest.mark.soak_only
def test_a_deleted_pod_whose_processes_do_not_end_is_a_failure(make: Callable[..., Run]) -> None:
    run = make(HANGS, pod_spec={"terminationGracePeriodSeconds": 1})
    pod = trains(run)
    name, place = pod["metadata"]["name"], (node_of(pod), pod["metadata"]["uid"])
    faults.hang_pod(*place)
    try:
        run.cluster.kubectl("delete", "pod", name, "-n", run.namespace, "--wait=false")
        answered(run, "PodDeleted")
    finally:
        faults.resume_pod(*place)
    # The kubelet must have its GPUs back before another test needs them.
    run.cluster.wait(
        lambda: not run.cluster.get("pod", name, "-n", run.namespace), what="the pod to end", timeout_seconds=SECONDS
    )


def test_a_pod_whose_containers_nobody_saw_end_is_lost(make: Callable[..., Run]) -> None:
    run = make(STEPS, pod_spec={"schedulerName": "nobody"})
    name = pod_of(run)["metadata"]["name"]
    ended = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
    container = {"name": "train", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": ended}
    play(run, name, phase="Failed", containerStatuses=[container])
    answered(run, "PodLost")


@pytest.mark.soak_only
def test_a_job_that_fails_by_itself_is_a_failure(make: Callable[..., Run]) -> None:
    run = make(HANGS)
    trains(run)
    over = ("--type=merge", "-p", '{"spec":{"activeDeadlineSeconds":1}}')
    run.cluster.kubectl("patch", "job", f"{run.name}-a1", "-n", run.namespace, *over)
    assert "DeadlineExceeded" in answered(run, "JobFailed")["message"]


@pytest.mark.soak_only
def test_a_job_that_somebody_deletes_is_a_failure(make: Callable[..., Run]) -> None:
    run = make(HANGS)
    trains(run)
    run.cluster.kubectl("delete", "job", f"{run.name}-a1", "-n", run.namespace, "--wait=false")
    answered(run, "JobDeleted")


@pytest.mark.soak_only
def test_a_job_that_somebody_suspends_is_drained_first(make: Callable[..., Run]) -> None:
    run = make(STEPS)
    trains(run)
    # The Job controller would delete the pods at once, and the operator might see that first.
    with faults.control_plane_stopped("kube-controller-manager"):
        suspend = ("--type=merge", "-p", '{"spec":{"suspend":true}}')
        run.cluster.kubectl("patch", "job", f"{run.name}-a1", "-n", run.namespace, *suspend)
        assert answered(run, "JobSuspended", planned=True)["lostSteps"] == 0


def test_a_container_that_cannot_start_is_a_failure_after_its_grace(make: Callable[..., Run]) -> None:
    run = make(STEPS, pod={"image": "localhost/nowhere:1", "imagePullPolicy": "Never"})
    assert "ErrImageNeverPull" in answered(run, "ContainerCannotStart")["message"]


def test_an_attempt_that_makes_no_step_in_time_is_a_failure(idle: Run, testbed: Cluster) -> None:
    try:
        assert "no step was finished" in answered(idle, "StartupTimeout")["message"]
    finally:
        testbed.kubectl("delete", "etj", idle.name, "-n", idle.namespace)


def test_pods_that_find_no_node_are_replaced_where_another_plan_fits(make: Callable[..., Run], idle: Run) -> None:
    # Otherwise its GPU comes and goes, and so does the plan.
    idle.cluster.kubectl("delete", "etj", idle.name, "-n", idle.namespace, "--ignore-not-found")
    delete_pods(idle.cluster, idle.namespace)
    term = {"labelSelector": {"matchLabels": {"app": "nobody"}}, "topologyKey": "kubernetes.io/hostname"}
    beside = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    run = make(STEPS, pod_spec={"affinity": beside}, nodes={"min": 1, "max": 3}, batch={"globalSamples": 12})
    run.until("the scheduler's words", lambda found: found.get("reason") == "Unschedulable", SECONDS)
    assert run.status()["replicas"] == 3
    run.cluster.apply(blocker(run, "other"))
    try:
        answered(run, "Unschedulable")
    finally:
        run.cluster.kubectl("delete", "pod", "other", "-n", run.namespace)


# -- the training -----------------------------------------------------------------------------------------------------


def test_a_silent_rank_0_is_a_failure_after_its_grace(make: Callable[..., Run]) -> None:
    run = make(["env", "SILENT_AT_STEP=3", *STEPS], recovery={"suspectSeconds": 1})
    assert "silent" in answered(run, "HeartbeatStale")["message"]


def test_a_training_that_makes_no_step_is_hung(make: Callable[..., Run]) -> None:
    run = make(HANGS, recovery={"hangSeconds": 3})
    assert "step 3 was the last to finish" in answered(run, "Hang")["message"]


def test_a_commit_that_rank_0_refuses_ends_the_attempt(make: Callable[..., Run]) -> None:
    run = make(HANGS)
    trains(run)
    told = "elastictraining.dev/resume-error=CRC-32 differs"
    run.cluster.kubectl("annotate", "lease", f"{run.name}-a1", "-n", run.namespace, told)
    assert "CRC-32 differs" in answered(run, "ResumeRefused")["message"]
