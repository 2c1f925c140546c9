"""Simulated GPUs on kind, and how pods see this machine's Python there."""

from __future__ import annotations

import sys
from pathlib import Path

from testbed import podenv
from testbed.kind import devices


def test_one_container_for_each_resource_offers_the_same_devices() -> None:
    spec = devices.daemon_set(("amd.com/gpu", "nvidia.com/gpu"), 4)["spec"]["template"]["spec"]
    assert [item["name"] for item in spec["containers"]] == ["amd", "nvidia"]
    for item, resource in zip(spec["containers"], ("amd.com/gpu", "nvidia.com/gpu"), strict=True):
        assert item["command"][-3:] == [resource, "4", str(devices.CONTROL)]
    volumes = [item["name"] for item in spec["volumes"]]
    assert len(volumes) == len(set(volumes))
    for item in spec["containers"]:
        assert {mount["name"] for mount in item["volumeMounts"]} <= set(volumes)
    assert spec["nodeSelector"] == {"etj-testbed/role": "gpu"}


def test_nodes_have_the_machine_below_a_folder_and_pods_at_the_same_place() -> None:
    template = {"spec": {"containers": [{"name": "a"}]}}
    here, there = (podenv.host_python(template, machine=Path(path))["spec"] for path in ("/", "/host"))
    assert here["containers"] == there["containers"]
    paths = {item["name"]: item["hostPath"]["path"] for item in there["volumes"] if "hostPath" in item}
    assert paths == {name: f"/host{path}" for name, (path, _) in podenv.machine_folders().items()}
    mounted = [Path(item["mountPath"]) for item in there["containers"][0]["volumeMounts"]]
    assert any(Path(sys.prefix).is_relative_to(path) for path in mounted)
    assert here == podenv.host_python(template)["spec"]
