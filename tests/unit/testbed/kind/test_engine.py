"""The Docker daemon of unpacked packages: what it is started with, and what runs containers without a capability."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from testbed.errors import TestbedError
from testbed.kind import engine
from testbed.paths import BRIDGE, CGROUP, HOST_ADDRESS

FULL = "Name:\tx\nCapBnd:\t000001ffffffffff\n"
REDUCED = "Name:\tx\nCapBnd:\t000001fffeffffff\n"


def test_the_bounding_set_says_which_capabilities_there_are() -> None:
    assert engine.has_capability(engine.CAP_SYS_RESOURCE, FULL)
    assert not engine.has_capability(engine.CAP_SYS_RESOURCE, REDUCED)
    assert engine.has_capability(engine.CAP_SYS_RESOURCE - 1, REDUCED)


@pytest.mark.parametrize("words", [("create", "--bundle", "."), ("exec", "--process", "config.json")])
def test_runc_is_given_no_capability_that_nobody_has(tmp_path: Path, words: tuple[str, ...]) -> None:
    real, wrapper, given = tmp_path / "runc", tmp_path / "wrapper", tmp_path / "config.json"
    real.write_text('#!/bin/sh\necho "$@"\n')
    wrapper.write_text(engine.runc_wrapper(real))
    for path in (real, wrapper):
        path.chmod(0o755)
    for names in (["CAP_CHOWN", "CAP_SYS_RESOURCE"], ["CAP_SYS_RESOURCE", "CAP_KILL"], ["CAP_KILL"]):
        given.write_text(json.dumps({"bounding": names}, separators=(",", ":")))
        done = subprocess.run([wrapper, *words, "id"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [*words, "id"]
        assert json.loads(given.read_text())["bounding"] == [name for name in names if name != "CAP_SYS_RESOURCE"]


def test_the_own_daemon_lies_beside_the_test_bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETJ_CACHE_DIR", str(tmp_path / "cache"))
    command = engine.daemon_command(tmp_path)
    assert f"--cgroup-parent /{engine.CGROUP}" in command
    assert engine.CGROUP != CGROUP
    # `testbed down` removes every interface whose name begins like its own.
    assert not any(link.startswith(BRIDGE.rstrip("0")) for link in (engine.LINK, engine.PEER))
    assert HOST_ADDRESS.rsplit(".", 1)[0] != engine.LINK_ADDRESS.rsplit(".", 1)[0]
    assert engine.own().environment["DOCKER_HOST"].startswith(f"unix://{tmp_path}/cache/kind/")


def test_a_number_of_another_process_is_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETJ_CACHE_DIR", str(tmp_path))
    assert engine.own_pid() == 0
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind/docker.pid").write_text("1")
    assert engine.own_pid() == 0
    assert engine.own().enter == ()


def test_a_command_that_fails_says_which_and_why() -> None:
    daemon = engine.Engine()
    with pytest.raises(TestbedError, match=r"`ls /nowhere-etj` ended with 2: .*No such file"):
        daemon("ls", "/nowhere-etj")
    with pytest.raises(TestbedError, match="no-such-program-etj"):
        daemon("no-such-program-etj")
    assert not engine.Engine({"DOCKER_HOST": "unix:///nowhere-etj.sock"}).answers()
