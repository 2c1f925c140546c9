"""Inject faults into nodes: power loss, hangs, cut networks, failed GPUs."""

from __future__ import annotations

import os
import signal

from testbed import cgroups, cluster, extensions, machine, nodes
from testbed.errors import TestbedError
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


def _signal_kubelet(name: str, number: signal.Signals) -> None:
    for pid in machine.daemon_pids(node_named(name).name, "kubelet"):
        os.kill(pid, number)


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
