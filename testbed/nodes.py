"""Configure a node's processes: containerd, kubelet and, on GPU nodes, the device plugin."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from testbed import machine
from testbed.components import bin_dir, cni_dir
from testbed.images import PAUSE
from testbed.paths import CGROUP, CONTROL_PLANE_ADDRESS, node_address, pod_network, run_dir, state_dir
from testbed.pki import Authority

_PRESENT = {
    "amd.com/gpu": "feature.node.kubernetes.io/amd-gpu",
    "nvidia.com/gpu": "nvidia.com/gpu.present",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the cluster.

    Attributes:
        name: node and host name.
        index: from 1; decides the addresses.
        num_gpus: simulated devices, 0 for a CPU node.
        resources: extended resource names under which the devices are offered, each by a device plugin of its own. They
            are the same devices: one that is made unhealthy is unhealthy under every name.
    """

    name: str
    index: int
    num_gpus: int = 0
    resources: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Address on the bridge."""
        return node_address(self.index)

    @property
    def folder(self) -> Path:
        """State of the node that survives its power loss."""
        return run_dir() / "nodes" / self.name

    @property
    def gpu_control(self) -> Path:
        """A file here named like a device makes that device unhealthy."""
        return self.folder / "gpu-control"

    @property
    def labels(self) -> dict[str, str]:
        """Node labels, as the vendors' tools would set them."""
        role = {"etj-testbed/role": "gpu" if self.num_gpus else "cpu"}
        return role | {_PRESENT[name]: "true" for name in self.resources if name in _PRESENT}


def layout(*, num_gpu_nodes: int, gpus_per_node: int, resources: tuple[str, ...]) -> tuple[Node, ...]:
    """One CPU node, then the GPU nodes."""
    gpu = (
        Node(name=f"gpu-{number}", index=number + 1, num_gpus=gpus_per_node, resources=resources)
        for number in range(1, num_gpu_nodes + 1)
    )
    return (Node(name="cpu-1", index=1), *gpu)


def prepare(node: Node, authority: Authority, *, fast_clocks: bool) -> None:
    """Write the node's configuration."""
    authority.kubeconfig(
        node.folder / "kubeconfig", common_name=f"system:node:{node.name}", organization="system:nodes"
    )
    (node.folder / "resolv.conf").write_text(f"nameserver {CONTROL_PLANE_ADDRESS}\n")
    (node.folder / "containerd.toml").write_text(_containerd_config(node))
    (node.folder / "kubelet.json").write_text(json.dumps(_kubelet_config(node, authority, fast_clocks), indent=1))
    network = node.folder / "cni"
    network.mkdir(exist_ok=True)
    (network / "10-pods.conflist").write_text(json.dumps(_cni_config(node), indent=1))


def start(node: Node, others: tuple[Node, ...]) -> None:
    """Switch the node on."""
    machine.start(node.name, address=node.address, script=_script(node, others))


def import_images(node: Node) -> str:
    """A shell command, run on the node: import each archive once. Archives are named by their contents.

    It fails where an archive has just been replaced by a newer one, and may be repeated.
    """
    done = node.folder / "imported"
    return f"""(
mkdir -p {done}
for image in {state_dir()}/images/*.tar; do
  mark={done}/$(basename "$image")
  [ -e "$mark" ] && continue
  {bin_dir()}/ctr -n k8s.io images import --local "$image" >/dev/null && touch "$mark" || exit 1
done
)"""


def _script(node: Node, others: tuple[Node, ...]) -> str:
    folders = {"kubelet": "/var/lib/kubelet", "pods": "/var/log/pods", "containers": "/var/log/containers"}
    lines = [f"export PATH={bin_dir()}:$PATH", f"ip route add default via {CONTROL_PLANE_ADDRESS}"]
    for name, target in folders.items():
        lines += [f"mkdir -p {node.folder}/{name}", f"mount --bind {node.folder}/{name} {target}"]
    lines += ["mkdir -p /run/cni-state", "mount --bind /run/cni-state /var/lib/cni"]
    lines += [
        f"ip route add {pod_network(other.index)} via {other.address}" for other in others if other.name != node.name
    ]
    lines += [
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        f"keep containerd containerd -c {node.folder}/containerd.toml",
        "until ctr -n k8s.io version >/dev/null 2>&1; do sleep 0.05; done",
        f"until {import_images(node)}; do sleep 0.5; done",
        f"until [ -e {run_dir()}/apiserver.ready ]; do sleep 0.05; done",
        f"keep kubelet kubelet --config={node.folder}/kubelet.json --kubeconfig={node.folder}/kubeconfig "
        f"--hostname-override={node.name} --node-ip={node.address} --node-labels="
        + ",".join(f"{key}={value}" for key, value in node.labels.items()),
    ]
    if node.num_gpus:
        lines.append(f"cd {Path(__file__).parents[1]}")
        lines += [
            f"keep device-plugin-{name.partition('.')[0]} {sys.executable} -m testbed.device_plugin "
            f"{name} {node.num_gpus} {node.gpu_control}"
            for name in node.resources
        ]
    return "\n".join(lines) + "\n"


def _containerd_config(node: Node) -> str:
    disabled = (
        "io.containerd.snapshotter.v1.btrfs",
        "io.containerd.snapshotter.v1.zfs",
        "io.containerd.snapshotter.v1.devmapper",
        "io.containerd.snapshotter.v1.erofs",
        "io.containerd.snapshotter.v1.blockfile",
        "io.containerd.tracing.processor.v1.otlp",
        "io.containerd.internal.v1.tracing",
        "io.containerd.nri.v1.nri",
    )
    return f"""version = 3
root = "{node.folder}/containerd"
state = "/run/containerd"
disabled_plugins = {json.dumps(disabled)}
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{cni_dir()}"]
    conf_dir = "{node.folder}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "{bin_dir()}/runc"
      SystemdCgroup = false
"""


def _cni_config(node: Node) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "isDefaultGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": pod_network(node.index)}]]},
    }
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def _kubelet_config(node: Node, authority: Authority, fast_clocks: bool) -> dict[str, object]:
    fast = {"nodeLeaseDurationSeconds": 4, "nodeStatusUpdateFrequency": "2s"} if fast_clocks else {}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "port": 10250,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority.folder / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}/{node.name}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["pods"],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "maxOpenFiles": 20000,
        "clusterDomain": "cluster.local",
        "clusterDNS": [CONTROL_PLANE_ADDRESS],
        "resolvConf": str(node.folder / "resolv.conf"),
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "serializeImagePulls": False,
        **fast,
    }
