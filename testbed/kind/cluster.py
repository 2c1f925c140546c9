"""The cluster on kind as a provider: up, down, images, and what can happen to its nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from testbed import cgroups, extensions, images, podenv, project, shellenv
from testbed import cluster as testbed
from testbed.errors import TestbedError
from testbed.kind import build, devices, engine
from testbed.kind.configuration import NAME, Route, configuration, node_names, on_node, route
from testbed.kind.engine import Engine
from testbed.kind.paths import kubeconfig, run_dir, volumes_dir
from testbed.kubectl import Kubectl
from testbed.paths import run_dir as testbed_run_dir
from testbed.provider import Size
from testbed.shell import say, until

PUBLISHED_IMAGE = "kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5"
"""The default of kind v0.33.0."""

_SETTINGS = "settings.json"
_READY_SECONDS = 240


class KindCluster:
    """`testbed.provider.Provider` whose nodes are containers of Docker."""

    def up(self, size: Size) -> None:
        """Bring a fresh cluster up; an equal one that runs already is kept, anything else is removed first.

        Raises:
            CannotRunHereError: there is no Docker, and none can be started.
            TestbedError: kind failed, or the cluster did not become ready.
        """
        with _lock():
            if _settings().get("size") == _plain(size) and self._is_on():
                self.load_images()
                _wait_ready(size)
                say(f"already up; kubectl, helm and kubectl etj for this shell: {shellenv.command('kind')}")
                return
            _remove()
            _make(size)
            self.load_images()
            kubectl = Kubectl(kubeconfig())
            kubectl.apply(devices.daemon_set(size.resources, size.gpus_per_node))
            _wait_ready(size)
        say(f"up; kubectl, helm and kubectl etj for this shell: {shellenv.command('kind')}")

    def down(self) -> None:
        """Remove the cluster, and the Docker daemon if it is our own."""
        with _lock():
            _remove()
        say("down")

    def machines(self) -> dict[str, bool]:
        """Containers of all nodes, and whether they run. Empty without a cluster."""
        if not _settings():
            return {}
        label = f"label=io.x-k8s.kind.cluster={NAME}"
        form = "{{.Names}} {{.State}}"
        text = _engine()("docker", "ps", "--all", "--filter", label, "--format", form)
        return {name: state == "running" for name, state in sorted(line.split() for line in text.splitlines())}

    def _is_on(self) -> bool:
        """All nodes run; not if the daemon does not answer."""
        try:
            machines = self.machines()
        except TestbedError:
            return False
        return len(machines) > _size().num_gpu_nodes and all(machines.values())

    def kubeconfig(self) -> Path:
        """Credentials of the cluster that is up.

        Raises:
            TestbedError: there is none.
        """
        _size()
        return kubeconfig()

    def load_images(self) -> None:
        """Build this checkout's images as far as sources have changed, and `kind load` them."""
        _size()
        folder = run_dir() / "images"
        with project.lock():
            archive = project.archive(project.ensure_built(folder), folder)
            images.write_all(folder)
            for path in (folder / "hostpy.tar", archive):
                mark = folder / f"{path.name}.loaded"
                if not mark.exists():
                    say(f"kind load {path.name}")
                    _engine()(build.kind_program(), "load", "image-archive", path, "--name", NAME)
                    mark.touch()

    def kill_node(self, node: str) -> None:
        """`docker kill`: SIGKILL of everything in the container."""
        _engine()("docker", "kill", _node(node))
        extensions.remove_abandoned_locks(extensions.folder())  # every pod shares these

    def heal_node(self, node: str) -> None:
        """`docker start`, with all GPUs of the node healthy."""
        _engine()("docker", "start", _node(node))
        _engine()("docker", "exec", node, "sh", "-c", f"rm -f {devices.CONTROL}/*")

    def fail_gpu(self, node: str, device: str) -> None:
        """Let the device plugin report the device as Unhealthy."""
        _engine()("docker", "exec", _node(node), "touch", str(devices.CONTROL / _device(device)))

    def heal_gpu(self, node: str, device: str) -> None:
        """Let the device plugin report the device as Healthy."""
        _engine()("docker", "exec", _node(node), "rm", "-f", str(devices.CONTROL / _device(device)))

    def make_volume(self, name: str) -> Path:
        """Make a folder that all nodes see."""
        folder = volumes_dir() / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def on_node(self, path: Path) -> Path:
        """Return where a node sees a folder of this machine."""
        return on_node(path)


def _make(size: Size) -> None:
    run_dir().mkdir(parents=True, exist_ok=True)
    daemon, chosen = _choose()
    saved: dict[str, Any] = {"size": _plain(size), "own_daemon": chosen.own_daemon}
    if chosen.own_daemon:  # kubelets of the test bed have changed them already, if it is up
        saved["sysctls"] = testbed.settings().get("sysctls") or testbed.read_sysctls()
    (run_dir() / _SETTINGS).write_text(json.dumps(saved))
    image = build.ensure_node_image(daemon) if chosen.own_image else PUBLISHED_IMAGE
    mounts = {Path(path): read_only for path, read_only in podenv.machine_folders().values()}
    mounts[volumes_dir()] = False
    for path in mounts:
        path.mkdir(parents=True, exist_ok=True)
    written = configuration(size, mounts, cgroup_v1=not cgroups.is_v2(), api_address=daemon.api_address)
    file = run_dir() / "cluster.yaml"
    file.write_text(yaml.safe_dump(written, sort_keys=False))
    say(f"kind create cluster --config {file} --image {image}")
    options = ("--config", file, "--image", image, "--kubeconfig", kubeconfig(), "--wait", f"{_READY_SECONDS}s")
    daemon(build.kind_program(), "create", "cluster", *options, timeout_seconds=900)


def _choose() -> tuple[Engine, Route]:
    """Return a daemon that answers, and how the cluster is made with it."""
    machine = Engine()
    answers = machine.answers()
    chosen = route(daemon_answers=answers, image_arrives=answers and machine.can_have_image(PUBLISHED_IMAGE))
    return (engine.start_own() if chosen.own_daemon else machine), chosen


def _remove() -> None:
    """Remove whatever an `up` may have left, complete or not."""
    saved = _settings()
    if saved.get("own_daemon") or engine.own_pid():
        engine.stop_own()
        if not testbed_is_up():
            testbed.restore_sysctls(saved.get("sysctls"))
    elif saved:
        _engine()(build.kind_program(), "delete", "cluster", "--name", NAME)
    shutil.rmtree(run_dir() / "images", ignore_errors=True)
    shutil.rmtree(volumes_dir(), ignore_errors=True)
    for file in (run_dir() / _SETTINGS, run_dir() / "cluster.yaml", kubeconfig()):
        file.unlink(missing_ok=True)


def testbed_is_up() -> bool:
    """Kubelets of the test bed run, which want the machine's settings as they are and put them back at their end."""
    return testbed_run_dir().exists()


def _wait_ready(size: Size) -> None:
    """Wait until every node is Ready and offers its GPUs; kind itself waits for the control plane only."""
    kubectl = Kubectl(kubeconfig())

    def ready() -> bool:
        items = {item["metadata"]["name"]: item["status"] for item in kubectl.get("nodes").get("items", [])}
        return all(is_ready(items[name], size) for name in node_names(size.num_gpu_nodes))

    until(ready, what="the nodes with their GPUs", timeout_seconds=_READY_SECONDS, every_seconds=1)


def is_ready(status: dict[str, Any], size: Size) -> bool:
    """A node with this status is Ready and offers all its simulated GPUs."""
    conditions = {item["type"]: item["status"] for item in status.get("conditions", [])}
    offered = status.get("allocatable", {})
    return conditions.get("Ready") == "True" and all(
        int(offered.get(name, 0)) >= size.gpus_per_node for name in size.resources
    )


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    run_dir().mkdir(parents=True, exist_ok=True)
    with open(run_dir() / "lock", "w", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TestbedError("the cluster on kind is being changed by another process: wait for it") from error
        yield


def _settings() -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads((run_dir() / _SETTINGS).read_text())
    except (OSError, ValueError):
        return {}
    return value


def _engine() -> Engine:
    return engine.own() if _settings().get("own_daemon") else Engine()


def _plain(size: Size) -> dict[str, Any]:
    return {**dataclasses.asdict(size), "resources": list(size.resources)}


def _size() -> Size:
    saved = _settings().get("size")
    if saved is None:
        raise TestbedError("no cluster on kind is up: run `python -m testbed kind up`")
    return Size(**{**saved, "resources": tuple(saved["resources"])})


def _node(name: str) -> str:
    names = node_names(_size().num_gpu_nodes)
    if name not in names:
        raise TestbedError(f"no node {name!r}: there are {', '.join(names)}")
    return name


def _device(name: str) -> str:
    valid = [f"gpu{index}" for index in range(_size().gpus_per_node)]
    if name not in valid:
        raise TestbedError(f"no device {name!r}: there are {', '.join(valid)}")
    return name
