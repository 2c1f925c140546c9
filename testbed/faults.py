"""Inject faults into nodes: power loss, hangs, cut networks, failed GPUs, pods that nobody can stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from testbed import cgroups, cluster, extensions, machine, nodes
from testbed.errors import TestbedError
from testbed.paths import CONTROL_PLANE
from testbed.shell import run


def node_named(name: str) -> nodes.Node:
    """Find a node of the running cluster.

    Raises:
        TestbedError: there is no such node.
    """
    for node in cluster.members():
        if node.name == name:
            return node
    raise TestbedError(f"no node {name!r}: there are {', '.join(node.name for node in cluster.members())}")


def kill_node(name: str) -> None:
    """Power loss: every process of the node ends at once, nothing says goodbye."""
    machine.power_off(node_named(name).name)
    extensions.remove_abandoned_locks(extensions.folder())  # every pod of the test bed shares these


def heal_node(name: str) -> None:
    """Switch the node on again (its disk is as it was) or continue it, with its cable in and its GPUs healthy."""
    node = node_named(name)
    if machine.is_running(name):
        cgroups.freeze(name, frozen=False)
        resume_kubelet(name)
        plug(name)
    else:
        nodes.start(node, cluster.members())
    for path in node.gpu_control.glob("*"):
        path.unlink()


def hang_kubelet(name: str) -> None:
    """The kubelet stops; its containers go on, and go on writing."""
    _signal_kubelet(name, signal.SIGSTOP)


def resume_kubelet(name: str) -> None:
    """The kubelet goes on."""
    _signal_kubelet(name, signal.SIGCONT)


def restart_kubelet(name: str) -> None:
    """The kubelet is killed and started again; its containers go on."""
    _signal_kubelet(name, signal.SIGKILL)


@contextlib.contextmanager
def memory_pressure(name: str) -> Iterator[None]:
    """Let the kubelet report MemoryPressure for the duration of the block, without evictions; restarts it twice.

    A soft threshold that is always exceeded sets the condition at once, and evicts pods only after its grace period.
    """
    path = node_named(name).folder / "kubelet.json"
    before = path.read_text()
    soft = {
        "evictionSoft": {"memory.available": "100Ti"},
        "evictionSoftGracePeriod": {"memory.available": "10h"},
    }
    try:
        path.write_text(json.dumps({**json.loads(before), **soft}, indent=1))
        restart_kubelet(name)
        yield
    finally:
        path.write_text(before)
        restart_kubelet(name)


def _signal_kubelet(name: str, number: signal.Signals) -> None:
    for pid in machine.daemon_pids(node_named(name).name, "kubelet"):
        os.kill(pid, number)


def hang_pod(name: str, uid: str) -> None:
    """The runtime's process above a pod stops: the pod's processes go on, and nobody can stop them.

    Raises:
        TestbedError: the pod does not run on the node.
    """
    if not _signal_shim(name, uid, signal.SIGSTOP):
        raise TestbedError(f"no containerd-shim runs a container of pod {uid} on {name}")


def resume_pod(name: str, uid: str) -> None:
    """The runtime's process goes on, and does what it was told meanwhile; nothing if the pod has ended."""
    _signal_shim(name, uid, signal.SIGCONT)


def _signal_shim(name: str, uid: str, number: signal.Signals) -> bool:
    pids = machine.shim_pids(node_named(name).name, uid)
    for pid in pids:
        os.kill(pid, number)
    return bool(pids)


def unplug(name: str) -> None:
    """Network partition: the node and its pods go on, nobody hears them."""
    run("ip", "link", "set", machine.link_name(node_named(name).address), "down")


def plug(name: str) -> None:
    """End of the partition."""
    run("ip", "link", "set", machine.link_name(node_named(name).address), "up")


def freeze_node(name: str) -> None:
    """The whole node is paused, as by a hypervisor."""
    cgroups.freeze(node_named(name).name, frozen=True)


def thaw_node(name: str) -> None:
    """End of the pause."""
    cgroups.freeze(node_named(name).name, frozen=False)


def fail_gpu(name: str, device: str) -> None:
    """The device plugin reports the device as Unhealthy."""
    node = node_named(name)
    if device not in (valid := [f"gpu{index}" for index in range(node.num_gpus)]):
        raise TestbedError(f"no device {device!r} on {name}: there are {', '.join(valid) or 'none'}")
    (node.gpu_control / device).touch()


def heal_gpu(name: str, device: str) -> None:
    """The device is Healthy again."""
    (node_named(name).gpu_control / device).unlink(missing_ok=True)


@contextlib.contextmanager
def control_plane_stopped(*programs: str) -> Iterator[None]:
    """Stop programs of the control plane, such as `etcd`, for the duration of the block."""
    with _stopped(CONTROL_PLANE, {program: (program,) for program in programs}):
        yield


@contextlib.contextmanager
def device_plugins_stopped(name: str) -> Iterator[None]:
    """Stop the device plugins of a node for the duration of the block, as a rollout of a new version does."""
    plugins = {
        f"device-plugin-{resource.partition('.')[0]}": ("testbed.device_plugin", resource)
        for resource in node_named(name).resources
    }
    with _stopped(name, plugins):
        yield


@contextlib.contextmanager
def _stopped(machine_name: str, daemons: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
    """Stop daemons of a machine, and keep them from being started again.

    Args:
        machine_name: the machine.
        daemons: words that stand one after another in a daemon's command line, by its label.
    """
    holds = [machine.hold_file(machine_name, label) for label in daemons]
    try:
        for hold in holds:
            hold.touch()
        for pid in cgroups.processes(machine.cgroups_path(machine_name)):
            with contextlib.suppress(OSError):
                words = [Path(word).name for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
                if any(_contains(words, [Path(word).name for word in wanted]) for wanted in daemons.values()):
                    os.kill(pid, signal.SIGKILL)
        yield
    finally:
        for hold in holds:
            hold.unlink(missing_ok=True)


def _contains(words: list[str], wanted: list[str]) -> bool:
    """Return whether a command line begins with `wanted`, or has it after its interpreter and options."""
    if len(wanted) == 1:
        return words[0] == wanted[0]
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words)))
