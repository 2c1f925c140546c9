"""How kind is run, and what its configuration says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.kind.cluster import is_ready
from testbed.kind.configuration import GRACE_SECONDS, NAME, configuration, node_names, on_node, route
from testbed.provider import Size

MOUNTS = {Path("/srv/code"): True, Path("/srv/volumes"): False}


def patches(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The kubeadm patches by kind; no kind may come twice, since a later list would replace the earlier one."""
    found = [yaml.safe_load(text) for text in cluster["kubeadmConfigPatches"]]
    kinds = [item["kind"] for item in found]
    assert len(kinds) == len(set(kinds))
    return dict(zip(kinds, found, strict=True))


@pytest.mark.parametrize(
    ("daemon_answers", "image_arrives", "own_daemon", "own_image"),
    [(True, True, False, False), (True, False, False, True), (False, False, True, True), (False, True, True, True)],
)
def test_the_plainest_way_that_works_is_taken(
    daemon_answers: bool, image_arrives: bool, own_daemon: bool, own_image: bool
) -> None:
    chosen = route(daemon_answers=daemon_answers, image_arrives=image_arrives)
    assert dataclasses.astuple(chosen) == (own_daemon, own_image)


def test_the_file_in_the_repository_is_the_default_size_without_any_mount() -> None:
    file = yaml.safe_load((Path(__file__).parents[4] / "testbed/kind/cluster.yaml").read_text(encoding="utf-8"))
    made = configuration(Size(fast_clocks=False), {})
    assert [node.pop("extraMounts") for node in made["nodes"]] == [[]] * 4
    assert made == file
    assert (file["name"], file["kind"]) == (NAME, "Cluster")
    assert [node["labels"]["etj-testbed/role"] for node in file["nodes"]] == ["cpu", "gpu", "gpu", "gpu"]


def test_every_node_sees_the_folders_of_the_machine_below_one_folder() -> None:
    cluster = configuration(Size(num_gpu_nodes=2), MOUNTS)
    assert [node["role"] for node in cluster["nodes"]] == ["control-plane", "worker", "worker"]
    for node in cluster["nodes"]:
        assert node["extraMounts"] == [
            {"hostPath": "/srv/code", "containerPath": "/host/srv/code", "readOnly": True},
            {"hostPath": "/srv/volumes", "containerPath": "/host/srv/volumes", "readOnly": False},
        ]
    assert on_node(Path("/")) == Path("/host")
    with pytest.raises(ValueError, match="code"):
        on_node(Path("code"))


def test_written_yaml_has_no_references_that_kind_would_have_to_follow() -> None:
    text = yaml.safe_dump(configuration(Size(), MOUNTS))
    mounts, labels = (text.count(word) for word in ("containerPath: /host/srv/code", "etj-testbed/role: gpu"))
    assert (mounts, labels) == (4, 3)


def test_fast_clocks_shorten_the_grace_and_keep_what_kind_sets() -> None:
    fast = patches(configuration(Size(), {}))
    arguments = {item["name"]: item["value"] for item in fast["ClusterConfiguration"]["controllerManager"]["extraArgs"]}
    assert arguments == {"enable-hostpath-provisioner": "true", "node-monitor-grace-period": f"{GRACE_SECONDS}s"}
    # A lease that is renewed less often than the grace period would make every node NotReady.
    assert fast["KubeletConfiguration"]["nodeLeaseDurationSeconds"] < GRACE_SECONDS
    # The kubelet tells of a failed GPU only when it updates the node's status.
    assert fast["KubeletConfiguration"]["nodeStatusUpdateFrequency"] == "2s"
    slow = patches(configuration(Size(fast_clocks=False), {}))
    assert set(slow) == {"InitConfiguration"}


def test_old_control_groups_and_the_address_are_set_only_where_they_are_needed() -> None:
    plain = configuration(Size(), {})
    assert "networking" not in plain
    assert "failCgroupV1" not in patches(plain)["KubeletConfiguration"]
    old = configuration(Size(), {}, cgroup_v1=True, api_address="192.0.2.7")
    assert old["networking"] == {"apiServerAddress": "192.0.2.7"}
    assert patches(old)["KubeletConfiguration"]["failCgroupV1"] is False


def test_nodes_are_named_as_kind_names_containers() -> None:
    assert node_names(3) == ("etj-worker", "etj-worker2", "etj-worker3")
    assert node_names(0) == ()


@pytest.mark.parametrize(
    ("ready", "gpus", "expected"),
    [("True", "2", True), ("Unknown", "2", False), ("True", "1", False), ("True", "", False)],
)
def test_a_node_is_ready_with_all_its_gpus(ready: str, gpus: str, expected: bool) -> None:
    allocatable = {"amd.com/gpu": gpus, "nvidia.com/gpu": "2"} if gpus else {}
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": allocatable}
    assert is_ready(status, Size()) is expected
