"""The cluster tier: one real cluster for the whole run, one namespace for each test."""

import contextlib
import dataclasses
import datetime
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.apiserver import CRD
from testbed import cluster as bed
from testbed import extensions, faults, storage
from testbed.errors import CannotRunHereError
from testbed.kubectl import Kubectl
from testbed.paths import kubeconfig as testbed_kubeconfig
from testbed.paths import run_dir
from tests.cluster.jobs import Operator, Run
from tests.cluster.releases import Release

ROOT = Path(__file__).parents[2]
NODE_RECOVERY_SECONDS = 60
DEVICES_SECONDS = 4


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A real cluster, and the operations of tests on it."""

    kubeconfig: Path
    is_testbed: bool

    @property
    def kubectl(self) -> Kubectl:
        """kubectl on this cluster."""
        return Kubectl(self.kubeconfig)

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get ... -o json`; an empty dict where there is no such object."""
        return self.kubectl.get(*arguments)

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply manifests."""
        self.kubectl.apply(*objects)

    def wait(self, condition: Callable[[], Any], *, what: str, timeout_seconds: float = 120) -> Any:
        """Call `condition` until it returns something true."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.4)
        raise AssertionError(f"waited {timeout_seconds} s for {what}")

    def node_is_ready(self, name: str) -> bool:
        """Condition Ready of a node."""
        conditions = self.get("node", name).get("status", {}).get("conditions", [])
        return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)

    def kill_node(self, name: str) -> None:
        """Power loss."""
        faults.kill_node(name)

    def heal_node(self, name: str) -> None:
        """Switch on again and wait until the node is Ready with its GPUs."""
        faults.heal_node(name)
        self.wait(lambda: self.node_is_ready(name), what=f"{name} to be Ready", timeout_seconds=NODE_RECOVERY_SECONDS)
        bed.wait_ready(tuple(node for node in bed.members() if node.name == name))


def _unavailable(reason: str) -> None:
    """On CI a missing cluster is a failure, elsewhere a skip that says why."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster given with --kubeconfig, else a test bed for the time of the run."""
    given = request.config.getoption("--kubeconfig") or os.environ.get("ETJ_TEST_KUBECONFIG")
    if given:
        yield Cluster(kubeconfig=Path(given), is_testbed=False)
        return
    keep = bool(os.environ.get("ETJ_KEEP_TESTBED"))
    try:
        bed.check_machine()
    except CannotRunHereError as error:
        _unavailable(str(error))
    with bed.reserved(), extensions.guard_locks():
        bed.up()
        try:
            yield Cluster(kubeconfig=testbed_kubeconfig(), is_testbed=True)
        finally:
            if not keep:
                bed.down()


@pytest.fixture(scope="session")
def kubeconfig(cluster: Cluster) -> Path:
    """Admin credentials of the cluster."""
    return cluster.kubeconfig


@pytest.fixture
def testbed(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose nodes may be hurt; all nodes are whole again afterwards."""
    if not cluster.is_testbed:
        pytest.skip("hurts nodes: only on the test bed")
    yield cluster
    dead = [node for node in bed.members() if not cluster.node_is_ready(node.name)]
    for node in dead:
        faults.heal_node(node.name)
    for node in bed.members():
        for path in node.gpu_control.glob("*"):
            path.unlink()
    bed.wait_ready(bed.members())
    if dead:
        # A kubelet that has just started still shows the devices of before, and withdraws them until they register.
        time.sleep(DEVICES_SECONDS)
        bed.wait_ready(bed.members())


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own, removed with all that is in it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    cluster.wait(lambda: cluster.get("serviceaccount", "default", "-n", name), what="the default ServiceAccount")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def checkpoints(testbed: Cluster, namespace: str) -> Iterator[Path]:
    """The claim `ckpt` in the test's namespace, and its folder on this machine."""
    folder = storage.make_volume(namespace)
    testbed.apply(*storage.claim(namespace, "ckpt", folder))
    yield folder
    testbed.kubectl("delete", "pv", f"{namespace}-ckpt", "--wait=false", check=False)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def crd(cluster: Cluster) -> None:
    cluster.kubectl.apply_crd(CRD)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "operator.log"


@pytest.fixture
def operator(testbed: Any, namespace: str, crd: None, log: Path) -> Iterator[Operator]:
    process = Operator(
        testbed.kubeconfig,
        namespace,
        log,
        "--no-leader-election",
        "--image-seconds=3",
        "--node-stable-seconds=5",
        "--reshard-backoff-seconds=2",
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.stop()
    sys.stdout.write(log.read_text())


@contextlib.contextmanager
def home_of_operators(cluster: Cluster, name: str) -> Iterator[str]:
    """A namespace for an operator; it admits only restricted pods."""
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    cluster.wait(lambda: cluster.get("serviceaccount", "default", "-n", name), what="the default ServiceAccount")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def home(cluster: Cluster, namespace: str) -> Iterator[str]:
    """A namespace for the operator that serves `namespace`."""
    with home_of_operators(cluster, f"{namespace}-operator") as name:
        yield name


@pytest.fixture(scope="module")
def installed(cluster: Cluster, crd: None) -> Iterator[Release]:
    """The operator as a pod of its image, installed by the chart, on the one node that no test hurts.

    It serves all namespaces, and all tests of a module that want it. A module has either tests that want it or tests
    that start operators of their own: two would serve the same job.
    """
    if not cluster.is_testbed:
        pytest.skip("the operator's image is only on the nodes of the test bed")
    place = {"kubernetes.io/hostname": next(node.name for node in bed.members() if not node.num_gpus)}
    with home_of_operators(cluster, f"operator-{uuid.uuid4().hex[:8]}") as home:
        release = Release(cluster, home, serves=())
        try:
            release.install(crds={"enabled": False}, replicas=1, nodeSelector=place)
            yield release
        finally:
            release.uninstall()


@pytest.fixture
def run(testbed: Cluster, namespace: str, checkpoints: Path, installed: Release) -> Iterator[Run]:
    """A job that is not submitted yet, served by the installed operator."""
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    yield from _job(testbed, namespace)
    sys.stdout.write(installed.logs(f"--since-time={since}"))


@pytest.fixture
def run_by_process(testbed: Cluster, namespace: str, checkpoints: Path, operator: Operator) -> Iterator[Run]:
    """The same, served by a process of this machine, which a test may kill as often as it likes."""
    yield from _job(testbed, namespace)


def _job(testbed: Cluster, namespace: str) -> Iterator[Run]:
    job = Run(testbed, namespace)
    yield job
    job.remove()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show what the cluster looked like when a test failed."""
    report = yield
    if report.when == "call" and report.failed and (run_dir() / "ready").exists():
        views = (
            ("get", "etj,jobs,pods,leases", "-A", "-o", "wide"),
            ("get", "nodes"),
            ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        )
        seen = Cluster(kubeconfig=testbed_kubeconfig(), is_testbed=True)
        for view in views:
            text = seen.kubectl(*view, check=False)
            report.sections.append((f"kubectl {' '.join(view)}", text[-6000:]))
    return report
