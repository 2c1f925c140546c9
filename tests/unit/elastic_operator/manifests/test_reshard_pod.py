"""Whose image, which user and which rights a reshard pod gets."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest

from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import Current, Resume
from elastic_operator.manifests import reshard_pod
from elastic_operator.manifests.attempt import JobRef, reshard_job
from elastic_operator.manifests.reshard_pod import DEFAULT_RESOURCES, ReshardImage, multiply_quantity
from reshard.contract import ExitCode
from reshard.system.limits import DEFAULT_MEMORY_BYTES, MAX_THREADS, buffers_for, parse_bytes
from reshard.topology import Topology
from tests.examples import run_examples

IMAGE = ReshardImage(name="reg/reshard:1", pull_policy="IfNotPresent")
SOURCE = "/data/gpt/a3/step-00000020"
SPEC: dict[str, Any] = {
    "accelerator": {"resource": "amd.com/gpu", "perNode": [2]},
    "nodes": {"min": 1, "max": 3},
    "parallelism": {"tensor": [1, 2]},
    "batch": {"globalSamples": 8},
    "checkpoint": {"claimName": "ckpt", "path": "gpt", "format": "DeepSpeed"},
}
POD: dict[str, Any] = {
    "volumes": [
        {"name": "ckpt", "persistentVolumeClaim": {"claimName": "ckpt"}},
        {"name": "data", "hostPath": {"path": "/data"}},
    ],
    "imagePullSecrets": [{"name": "key"}],
    "tolerations": [{"operator": "Exists"}],
    "nodeSelector": {"gpu": "yes"},
    "containers": [
        {
            "name": "train",
            "image": "trainer:1",
            "command": ["python", "train.py"],
            "env": [{"name": "PYTHONPATH", "value": "/workspace"}],
            "workingDir": "/workspace",
            "resources": {"limits": {"amd.com/gpu": "2", "memory": "8Gi"}},
            "volumeMounts": [
                {"name": "ckpt", "mountPath": "/data", "subPath": "team"},
                {"name": "data", "mountPath": "/corpus"},
            ],
        }
    ],
}


def made(
    image: ReshardImage | None = IMAGE,
    *,
    pod: dict[str, Any] | None = None,
    container: dict[str, Any] | None = None,
    template: dict[str, Any] | None = None,
    resources: dict[str, Any] | None = None,
    oom_kills: int = 0,
) -> dict[str, Any]:
    """Pod spec of the reshard Job of a training with these security contexts."""
    training = copy.deepcopy(POD)
    training["securityContext"] = pod or {}
    training["containers"][0]["securityContext"] = container or {}
    value = {**SPEC, "template": {"spec": training}}
    if template is not None:
        value["reshard"] = {"template": template}
    if resources is not None:
        value["reshard"] = {"resources": resources}
    topology = Topology(tp=2, dp=2)
    resume = Resume(source=SOURCE, uri="/data/gpt/a4/step-00000020", step=20)
    current = Current(topology=topology, num_nodes=2, gpus_per_node=2, resume=resume)
    job = reshard_job(
        JobRef(name="gpt", namespace="team", uid="u"), parse_spec(value), 4, current, image, oom_kills=oom_kills
    )
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


OWN = {"team.example/cost": "7", "app": "mine"}


@pytest.mark.parametrize(
    ("template", "labels", "annotations"),
    [
        pytest.param(None, {"app": "gpt"}, {"sidecar.istio.io/inject": "false"}, id="derived"),
        pytest.param({}, {"app": "gpt"}, {"sidecar.istio.io/inject": "false"}, id="of-the-user"),
        pytest.param(
            {"labels": OWN, "annotations": {"sidecar.istio.io/inject": "true", "kueue.x-k8s.io/x": "y"}},
            OWN,
            {"sidecar.istio.io/inject": "true", "kueue.x-k8s.io/x": "y"},
            id="the-users-own-win",
        ),
    ],
)
def test_labels_and_annotations_of_the_training_are_carried(
    template: dict[str, Any] | None, labels: dict[str, str], annotations: dict[str, str]
) -> None:
    metadata = {
        "labels": {
            "app": "gpt", "kueue.x-k8s.io/queue-name": "q", "scheduling.x-k8s.io/pod-group": "g", "job-name": "j",
            "batch.kubernetes.io/job-name": "j", "elastictraining.dev/role": "worker",
        },
        "annotations": {
            "sidecar.istio.io/inject": "false", "scheduling.volcano.sh/queue-name": "q",
            "kubectl.kubernetes.io/default-container": "train",
            "container.apparmor.security.beta.kubernetes.io/train": "unconfined",
        },
    }  # fmt: skip
    value = {**SPEC, "template": {"metadata": metadata, "spec": copy.deepcopy(POD)}}
    if template is not None:
        value["reshard"] = {"template": {"metadata": template, "spec": {"containers": [{"name": "r", "image": "i"}]}}}
    resume = Resume(source=SOURCE, uri="/data/gpt/a4/step-00000020", step=20)
    current = Current(topology=Topology(tp=2, dp=2), num_nodes=2, gpus_per_node=2, resume=resume)
    made_job = reshard_job(JobRef(name="gpt", namespace="team", uid="u"), parse_spec(value), 4, current, IMAGE)
    found = made_job["spec"]["template"]["metadata"]
    name = "reshard" if template is None else "r"
    ours = {"elastictraining.dev/container": name, "kubectl.kubernetes.io/default-container": name}
    assert found["annotations"] == {**annotations, **ours}
    assert found["labels"]["elastictraining.dev/role"] == "reshard"
    own = ("app.kubernetes.io/", "elastictraining.dev/")
    assert {key: text for key, text in found["labels"].items() if not key.startswith(own)} == labels


def test_the_operators_image_gets_the_claim_and_nothing_else_of_the_training() -> None:
    pod = made(pod={"runAsUser": 1000})
    (main,) = pod["containers"]
    assert (main["image"], main["imagePullPolicy"]) == ("reg/reshard:1", "IfNotPresent")
    assert main["command"] == ["reshard"]
    assert main["args"][:3] == ["run", SOURCE, "/data/gpt/a4/step-00000020"]
    assert all(item["name"].startswith("ETJ_") for item in main["env"]), "PYTHONPATH and PATH are of another image"
    assert "workingDir" not in main
    assert main["volumeMounts"][0] == {"name": "ckpt", "mountPath": "/data", "subPath": "team"}
    assert [volume["name"] for volume in pod["volumes"]] == ["ckpt", "etj-tmp"], "nor its host folders"
    assert main["resources"] == DEFAULT_RESOURCES, "nor its memory and processors"
    assert (pod["imagePullSecrets"], pod["tolerations"]) == ([{"name": "key"}], [{"operator": "Exists"}])
    assert "nodeSelector" not in pod


@pytest.mark.parametrize(
    ("pod", "container", "user", "added", "becomes_owner"),
    [
        ({"runAsUser": 1000}, {}, 1000, [], False),
        ({"runAsUser": 1000}, {"runAsUser": 2000}, 2000, [], False),
        ({"runAsUser": 0}, {}, 0, ["DAC_OVERRIDE", "FOWNER"], False),
        ({}, {}, 0, ["DAC_OVERRIDE", "SETGID", "SETUID"], True),
        ({"fsGroup": 5}, {}, 0, ["DAC_OVERRIDE", "SETGID", "SETUID"], True),
    ],
)
def test_the_pod_writes_as_the_user_that_trains(
    pod: dict[str, Any], container: dict[str, Any], user: int, added: list[str], becomes_owner: bool
) -> None:
    found = made(pod=pod, container=container)
    (main,) = found["containers"]
    assert found["securityContext"]["runAsUser"] == user
    assert found["securityContext"].get("runAsNonRoot", False) is (user != 0)
    assert main["securityContext"]["capabilities"].get("add", []) == added
    if becomes_owner:
        assert main["command"] == ["python3", "-m", "reshard.owner", SOURCE, "reshard"]
    else:
        assert main["command"] == ["reshard"]


def test_a_user_that_is_not_root_and_not_known_is_had_only_in_its_own_image() -> None:
    (main,) = made(pod={"runAsNonRoot": True})["containers"]
    assert main["image"] == "trainer:1"
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_groups_of_the_volume_are_taken_over() -> None:
    groups = {"fsGroup": 5, "fsGroupChangePolicy": "OnRootMismatch", "supplementalGroups": [7]}
    found = made(pod={"runAsUser": 1000, "runAsGroup": 6, **groups, "sysctls": [{"name": "a", "value": "b"}]})
    assert found["securityContext"] == {
        **groups,
        "runAsUser": 1000,
        "runAsGroup": 6,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize("image", [IMAGE, None])
@pytest.mark.parametrize(
    "container",
    [
        {"privileged": True},
        {"capabilities": {"add": ["IPC_LOCK", "SYS_PTRACE"]}},
        {"allowPrivilegeEscalation": True},
        {"seccompProfile": {"type": "Unconfined"}},
    ],
)
def test_what_gpus_need_is_not_for_copying_files(image: ReshardImage | None, container: dict[str, Any]) -> None:
    found = made(image, pod={"runAsUser": 1000, "seccompProfile": {"type": "Unconfined"}}, container=container)
    own = found["containers"][0]["securityContext"]
    assert not own.get("privileged")
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own.get("seccompProfile", {"type": "RuntimeDefault"}) == {"type": "RuntimeDefault"}


def test_the_operators_image_has_a_read_only_root_and_a_folder_for_temporary_files() -> None:
    (main,) = made()["containers"]
    assert main["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "etj-tmp", "mountPath": "/tmp"} in main["volumeMounts"]


def test_without_an_image_of_the_operators_the_training_image_reshards_with_its_environment() -> None:
    found = made(None)
    (main,) = found["containers"]
    assert (main["image"], main["workingDir"]) == ("trainer:1", "/workspace")
    assert [item for item in main["env"] if not item["name"].startswith("ETJ_")] == [
        {"name": "PYTHONPATH", "value": "/workspace"}
    ]
    assert len(main["volumeMounts"]) == 2
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["DAC_OVERRIDE", "FOWNER"]}
    assert "readOnlyRootFilesystem" not in main["securityContext"], "nobody knows where that image writes"


def test_the_training_image_reshards_without_volumes_of_huge_pages_for_which_it_has_no_request() -> None:
    training = copy.deepcopy(POD)
    training["volumes"] += [
        {"name": "huge", "emptyDir": {"medium": "HugePages-2Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = training["containers"][0]["volumeMounts"]
    mounts += [{"name": "huge", "mountPath": "/dev/hugepages"}, {"name": "shm", "mountPath": "/dev/shm"}]
    spec = parse_spec({**SPEC, "template": {"spec": training}})
    found = reshard_pod.reshard_template(spec, None, SOURCE)["spec"]
    assert [item["name"] for item in found["volumes"]] == ["ckpt", "data", "shm"]
    assert [item["name"] for item in found["containers"][0]["volumeMounts"]] == ["ckpt", "data", "shm"]


def test_a_template_of_the_users_wins_and_is_left_alone() -> None:
    container = {"name": "r", "image": "mine:1", "securityContext": {"runAsUser": 7}}
    found = made(template={"spec": {"containers": [container]}})
    (main,) = found["containers"]
    assert (main["image"], main["securityContext"]) == ("mine:1", {"runAsUser": 7})


def _run_as_owner(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(argument) for argument in arguments]
    return subprocess.run([sys.executable, "-m", "reshard.owner", *words], capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_root_becomes_the_owner_of_the_nearest_folder_that_exists(tmp_path: Any) -> None:
    os.chown(tmp_path, 1234, 4321)
    done = _run_as_owner(tmp_path / "not" / "there", "sh", "-c", "id -u; id -g; id -G")
    assert done.returncode == 0, done.stderr
    user, group, groups = done.stdout.splitlines()
    assert (user, group) == ("1234", "4321")
    assert "4321" in groups.split()


def test_a_command_that_is_not_there_is_named(tmp_path: Any) -> None:
    done = _run_as_owner(tmp_path, "no-such-command")
    assert done.returncode == ExitCode.INTERNAL
    assert "'no-such-command' cannot be run as the owner of" in done.stderr
    assert _run_as_owner(tmp_path).returncode == ExitCode.USAGE


@pytest.mark.parametrize("image", [IMAGE, None])
@pytest.mark.parametrize(
    ("resources", "oom_kills", "expected"),
    [
        pytest.param(None, 0, DEFAULT_RESOURCES, id="default"),
        pytest.param(
            None,
            2,
            {"requests": {"cpu": "1", "memory": "2048Mi"}, "limits": {"cpu": "8", "memory": "4Gi"}},
            id="ran-out-of-memory-twice",
        ),
        pytest.param(
            None,
            99,
            {"requests": {"cpu": "1", "memory": "16384Mi"}, "limits": {"cpu": "8", "memory": "32Gi"}},
            id="not-without-end",
        ),
        pytest.param(
            {"requests": {"cpu": "250m"}}, 0, {"requests": {"cpu": "250m"}}, id="what-is-given-replaces-the-default"
        ),
        pytest.param(
            {"requests": {"memory": "1.5Gi"}, "limits": {"memory": 2_000_000_000}},
            1,
            {"requests": {"memory": "3Gi"}, "limits": {"memory": "4000000000"}},
            id="given-memory-is-doubled-too",
        ),
    ],
)
def test_a_conversion_asks_for_what_it_needs(
    image: ReshardImage | None, resources: dict[str, Any] | None, oom_kills: int, expected: dict[str, Any]
) -> None:
    (main,) = made(image, resources=resources, oom_kills=oom_kills)["containers"]
    assert main["resources"] == expected


def test_a_template_keeps_its_resources() -> None:
    container = {"name": "convert", "image": "mine:1", "resources": {"limits": {"memory": "2Gi"}}}
    (main,) = made(template={"spec": {"containers": [container]}}, oom_kills=3)["containers"]
    assert main["resources"] == {"limits": {"memory": "2Gi"}}


def test_the_default_memory_is_enough_for_the_default_buffers() -> None:
    free = parse_bytes(f"{DEFAULT_RESOURCES['limits']['memory']}B")
    assert buffers_for(free) == DEFAULT_MEMORY_BYTES
    assert int(DEFAULT_RESOURCES["limits"]["cpu"]) == MAX_THREADS


@pytest.mark.parametrize(("quantity", "doubled"), [("1e3", "2e3"), ("0.5Gi", "1Gi"), (7, "14"), ("many", "many")])
def test_a_quantity_is_multiplied_in_its_own_form(quantity: str | int, doubled: str) -> None:
    assert multiply_quantity(quantity, 2) == doubled


def test_the_examples_of_the_module_hold() -> None:
    run_examples(reshard_pod)
