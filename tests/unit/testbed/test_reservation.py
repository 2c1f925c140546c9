"""Check that a machine has one run of tests, one command and one cluster of the test bed at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed import cgroups, cluster
from testbed.cluster import lock, refuse_others, reserved
from testbed.errors import TestbedError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that all cache folders of the machine share."""
    monkeypatch.setattr(cluster, "MACHINE_DIR", tmp_path / "machine")
    monkeypatch.setenv("ETJ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "machine"


@pytest.mark.parametrize(
    ("take", "text"),
    [
        pytest.param(reserved, "tests of process {} use the test bed.*--kubeconfig", id="tests"),
        pytest.param(lock, "is being changed by process {}: wait for it", id="commands"),
    ],
)
def test_a_second_process_is_told_who_uses_the_test_bed_whatever_its_cache_folder(
    machine, tmp_path, monkeypatch, take, text
):
    with take():
        monkeypatch.setenv("ETJ_CACHE_DIR", str(tmp_path / "another"))
        with pytest.raises(TestbedError, match=text.format(os.getpid())), take():
            pass
    with take():
        pass


def test_a_run_that_failed_leaves_no_reservation(machine):
    with pytest.raises(KeyError), reserved():
        raise KeyError
    with reserved():
        pass


def test_a_cluster_of_another_cache_folder_is_left_alone(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "exists", lambda: True)
    another = own(machine, tmp_path / "another")
    with pytest.raises(TestbedError, match=f"cache folder {another} is up.*`ETJ_CACHE_DIR={another} python -m testbed"):
        refuse_others()


@pytest.mark.parametrize(("owner", "is_up"), [("cache", True), ("another", False)])
def test_an_own_cluster_and_one_that_is_gone_are_removed(machine, tmp_path, monkeypatch, owner, is_up):
    monkeypatch.setattr(cgroups, "exists", lambda: is_up)
    own(machine, tmp_path / owner)
    refuse_others()


def test_what_nobody_can_remove_any_more_is_removed(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "exists", lambda: True)
    refuse_others()
    (own(machine, tmp_path / "another") / "testbed").rmdir()
    refuse_others()


def own(machine: Path, folder: Path) -> Path:
    """Let the cache folder have the cluster of the machine."""
    (folder / "testbed").mkdir(parents=True)
    machine.mkdir(exist_ok=True)
    (machine / "owner").write_text(str(folder / "testbed"))
    return folder
