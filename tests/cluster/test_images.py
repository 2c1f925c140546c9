"""The project's images on a real cluster, as the most restricted pods that Kubernetes knows."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import Current, Resume
from elastic_operator.manifests.attempt import JobRef, reshard_job
from elastic_operator.manifests.reshard_pod import ReshardImage
from reshard.contract import COMMIT_FILE
from reshard.topology import Topology
from testbed import cluster as bed
from testbed import machine, oci, podenv, project, shell
from testbed.components import bin_dir
from testbed.errors import TestbedError
from testbed.paths import state_dir
from testbed.rootfs import USER
from tests.cluster.jobs import GPT, Operator, Run, committed, elastic, resumed

pytestmark = pytest.mark.cluster

GOLDEN = Path(__file__).parents[1] / "golden/deepspeed-0.19.8/pipeline-tp2-pp2/step-00000002"
IMAGE = ReshardImage(name=project.RESHARD, pull_policy="Never")
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
STRANGER = 1234


@pytest.fixture(scope="module", autouse=True)
def _images(cluster: Any) -> None:
    if not cluster.is_testbed:
        pytest.skip("the images are only on the nodes of the test bed")
    bed.ensure_images()


@pytest.fixture
def restricted(cluster: Any, namespace: str) -> str:
    """A namespace that admits nothing but restricted pods."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    return namespace


@pytest.fixture
def commit(cluster: Any, namespace: str, checkpoints: Path) -> Iterator[Path]:
    """A commit on the claim `ckpt`, in folders of its own."""
    root = checkpoints / "gpt"
    shutil.copytree(GOLDEN, root / "a1" / GOLDEN.name)
    yield root
    shutil.rmtree(root, ignore_errors=True)


def own(root: Path, user: int) -> None:
    for path in (root.parent, root, *root.rglob("*")):
        os.chown(path, user, user)


def finished(cluster: Any, namespace: str, name: str) -> tuple[int, str]:
    """Exit code and log of a pod's only container, once it has ended."""

    def ended() -> Any:
        status = cluster.get("pod", name, "-n", namespace).get("status", {})
        (container,) = status.get("containerStatuses") or [{}]
        waiting = container.get("state", {}).get("waiting", {}).get("reason", "")
        assert not waiting.startswith(("Err", "CreateContainer", "RunContainer")), container
        return container.get("state", {}).get("terminated")

    code = cluster.wait(ended, what=f"the end of pod {name}")["exitCode"]
    return code, cluster.kubectl("logs", "-n", namespace, name)


def run(cluster: Any, namespace: str, image: str, **container: Any) -> tuple[int, str]:
    """Run an image as a restricted pod."""
    main = {"name": "main", "image": image, "imagePullPolicy": "Never", "securityContext": RESTRICTED, **container}
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"restartPolicy": "Never", "securityContext": security, "containers": [main]}
    name = "try"
    cluster.kubectl("delete", "pod", name, "-n", namespace, "--ignore-not-found", "--grace-period=0")
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec})
    return finished(cluster, namespace, name)


def test_each_image_runs_its_command_as_nobody_in_particular_on_a_read_only_root(cluster: Any, restricted: str) -> None:
    code, text = run(cluster, restricted, project.OPERATOR, args=["run", "--help"])
    assert (code, "--reshard-image IMAGE" in text) == (0, True), text
    assert run(cluster, restricted, project.RESHARD, args=["--version"]) == (0, f"reshard {project.VERSION}\n")
    show = "import os, elastic_trainer.launch; print(os.getuid(), os.listdir('/app/examples/gpt_deepspeed'))"
    code, text = run(cluster, restricted, project.EXAMPLE, command=["python", "-c", show])
    assert code == 0, text
    assert text.startswith("65532 ")
    assert "train.py" in text


def test_the_operators_image_has_neither_torch_nor_numpy_nor_a_shell(cluster: Any, restricted: str) -> None:
    look = (
        "import importlib.util, shutil\n"
        "print([name for name in ('torch', 'numpy', 'deepspeed', 'pip') if importlib.util.find_spec(name)])\n"
        "print([name for name in ('sh', 'bash', 'curl', 'apt-get') if shutil.which(name)])\n"
        "try:\n    open('/written', 'w')\nexcept OSError as error:\n    print(error.strerror)\n"
    )
    code, text = run(cluster, restricted, project.OPERATOR, command=["python", "-c", look])
    assert (code, text) == (0, "[]\n[]\nRead-only file system\n")


def reshard_pod(namespace: str, **security: Any) -> dict[str, Any]:
    """The pod of the reshard Job of a training with this security context."""
    spec = {
        "accelerator": {"resource": "amd.com/gpu", "perNode": [2]},
        "nodes": {"min": 1, "max": 3},
        "batch": {"globalSamples": 8},
        "checkpoint": {"claimName": "ckpt", "path": "gpt", "format": "DeepSpeed"},
        "template": {
            "spec": {
                "securityContext": security,
                "containers": [{"name": "train", "image": "no-such-image:1", "securityContext": {"privileged": True}}],
            }
        },
    }
    resume = Resume(source=f"/checkpoint/gpt/a1/{GOLDEN.name}", uri=f"/checkpoint/gpt/a2/{GOLDEN.name}", step=2)
    current = Current(topology=Topology(dp=2), num_nodes=1, gpus_per_node=2, resume=resume)
    job = reshard_job(JobRef(name="gpt", namespace=namespace, uid="u"), parse_spec(spec), 2, current, IMAGE)
    template = job["spec"]["template"]
    # The golden checkpoint is a folder without a commit of ours.
    template["spec"]["containers"][0]["args"].remove("--require-commit")
    meta = {"name": "r", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}


def test_a_namespace_of_restricted_pods_admits_the_reshard_pod_of_a_training_that_is_not_root(
    cluster: Any, restricted: str
) -> None:
    cluster.apply(reshard_pod(restricted, runAsUser=STRANGER))
    assert cluster.get("pod", "r", "-n", restricted)["spec"]["securityContext"]["runAsUser"] == STRANGER
    with pytest.raises(TestbedError, match="violates PodSecurity"):
        cluster.apply({**reshard_pod(restricted), "metadata": {"name": "root", "namespace": restricted}})


def test_a_namespace_of_baseline_pods_admits_the_one_that_looks_for_its_user(cluster: Any, namespace: str) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline")
    cluster.apply(reshard_pod(namespace))
    pod = cluster.get("pod", "r", "-n", namespace)
    assert pod["spec"]["containers"][0]["command"][:3] == ["python3", "-m", "reshard.owner"]


@pytest.mark.parametrize(
    ("security", "owner"),
    [
        ({"runAsUser": STRANGER, "runAsGroup": STRANGER}, STRANGER),
        ({}, STRANGER),
        ({}, 0),
        ({"runAsUser": 0}, STRANGER),
    ],
    ids=["declared", "found at run time", "root", "root by declaration in a folder of somebody else"],
)
def test_a_commit_resharded_in_the_operators_image_belongs_to_who_trains(
    cluster: Any, namespace: str, commit: Path, security: dict[str, Any], owner: int
) -> None:
    own(commit, owner)
    for path in (commit.parent, commit, *(item for item in commit.rglob("*") if item.is_dir())):
        path.chmod(0o700)
    cluster.apply(reshard_pod(namespace, **security))
    code, text = finished(cluster, namespace, "r")
    assert code == 0, text
    assert (commit / "a2" / GOLDEN.name / COMMIT_FILE).exists()
    expected = security.get("runAsUser", owner)
    assert {path.stat().st_uid for path in (commit / "a2", *(commit / "a2").rglob("*"))} == {expected}


def images_on(name: str) -> str:
    """List the images of a node's container runtime."""
    init = machine.init_pid(name)
    assert init is not None
    enter = ["nsenter", "--target", str(init), "--mount", "--net"]
    return shell.run(*enter, bin_dir() / "ctr", "-n", "k8s.io", "images", "ls", "-q", check=False)


def test_a_node_that_was_off_has_old_and_new_images_when_it_is_back(testbed: Any) -> None:
    testbed.kill_node("gpu-1")
    late = state_dir() / "images" / "late.tar"
    layer = oci.layer_of(files={"file": (b"", 0o644)})
    oci.write(late, [oci.Image(reference="localhost/late:1", layers=(layer,))])
    wanted = {"localhost/late:1", project.OPERATOR, project.RESHARD, project.EXAMPLE}
    try:
        testbed.heal_node("gpu-1")
        # Nobody has noticed that the node was off: it may seem Ready before its runtime has started.
        testbed.wait(lambda: wanted <= set(images_on("gpu-1").split()), what=f"{sorted(wanted)} on gpu-1")
    finally:
        late.unlink()


@pytest.fixture
def trained(testbed: Any, namespace: str, crd: None, checkpoints: Path, log: Path) -> Iterator[Run]:
    """A job whose operator reshards in its own image."""
    options = ("--no-leader-election", f"--reshard-image={project.RESHARD}", "--reshard-image-pull-policy=Never")
    operator = Operator(testbed.kubeconfig, namespace, log, *options)
    own(checkpoints, USER)
    job = Run(testbed, namespace)
    yield job
    job.remove()
    operator.stop()
    sys.stdout.write(log.read_text())


@pytest.mark.soak_only
def test_the_example_trains_reshards_and_resumes_from_images_and_nobody_is_root(trained: Run) -> None:
    container = {"name": "train", "command": [*GPT, "--steps", "100000"]}
    template = podenv.example_image({"spec": {"terminationGracePeriodSeconds": 5, "containers": [container]}})
    shape = {"nodes": {"min": 1, "max": 1}, "parallelism": {"tensor": [1], "pipeline": [2]}}
    trained.submit([], **{**elastic(), **shape}, template=template)
    before = trained.until("a commit", committed, 240)
    trained.patch(parallelism={"tensor": [2], "pipeline": [1]})
    after = trained.until("the next attempt", resumed(before["attempt"]), 240)
    assert after["reshard"]["verified"] is True
    assert (before["topology"]["pp"], after["topology"]["tp"]) == (2, 2)
    pods = trained.cluster.get("pods", "-n", trained.namespace)["items"]
    assert {pod["spec"]["securityContext"]["runAsUser"] for pod in pods} == {USER}
    images = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    assert images == {project.EXAMPLE, project.RESHARD}
