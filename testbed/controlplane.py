"""The control plane: one machine with etcd, API server, controller manager, scheduler and DNS."""

from __future__ import annotations

import sys
from pathlib import Path

from testbed import machine
from testbed.components import bin_dir
from testbed.nodes import Node
from testbed.paths import (
    CONTROL_PLANE,
    CONTROL_PLANE_ADDRESS,
    KUBERNETES_SERVICE_ADDRESS,
    SERVICE_NETWORK,
    kubeconfig,
    pod_network,
    run_dir,
)
from testbed.pki import Authority

FAST_GRACE_SECONDS = 6
"""Node monitor grace period of the fast clocks; 2 and 3 work too, but give false alarms on a loaded machine."""


def prepare(authority: Authority) -> None:
    """Issue what the control plane needs."""
    authority.issue("apiserver", common_name="kube-apiserver", server=True)
    authority.issue("admin", common_name="admin", organization="system:masters")
    authority.kubeconfig(kubeconfig(), common_name="admin", organization="system:masters")
    # system:masters, and no per-controller credentials: saves 4.5 s at every start and gives up nothing that is tested.
    authority.kubeconfig(
        run_dir() / "controller-manager.conf",
        common_name="system:kube-controller-manager",
        organization="system:masters",
    )
    authority.kubeconfig(run_dir() / "scheduler.conf", common_name="system:kube-scheduler")


def start(authority: Authority, nodes: tuple[Node, ...], *, fast_clocks: bool) -> None:
    """Switch the control plane on."""
    daemons = {
        "etcd": _etcd(),
        "kube-apiserver": _apiserver(authority.folder, fast_clocks),
        "kube-controller-manager": _controller_manager(authority.folder, fast_clocks),
        "kube-scheduler": _scheduler(),
    }
    lines = [
        f"export PATH={bin_dir()}:$PATH",
        f"ip addr add {KUBERNETES_SERVICE_ADDRESS}/32 dev lo",  # the kubernetes Service, without any kube-proxy
        *(f"ip route add {pod_network(node.index)} via {node.address}" for node in nodes),
        *(f"keep {name} {' '.join([name, *flags])}" for name, flags in daemons.items()),
        f"cd {Path(__file__).parents[1]}",
        f"keep dns {sys.executable} -m testbed.dns {kubeconfig()} {CONTROL_PLANE_ADDRESS}",
    ]
    machine.start(CONTROL_PLANE, address=CONTROL_PLANE_ADDRESS, script="\n".join(lines) + "\n")


def _etcd() -> list[str]:
    return [
        f"--data-dir={run_dir()}/etcd",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=default=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _apiserver(pki: Path, fast_clocks: bool) -> list[str]:
    tolerations = ("not-ready", "unreachable") if fast_clocks else ()
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        f"--advertise-address={CONTROL_PLANE_ADDRESS}",
        "--secure-port=443",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki}/admin.crt",
        f"--kubelet-client-key={pki}/admin.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--profiling=false",
        *(f"--default-{name}-toleration-seconds=5" for name in tolerations),
    ]


def _controller_manager(pki: Path, fast_clocks: bool) -> list[str]:
    config = run_dir() / "controller-manager.conf"
    fast = [f"--node-monitor-grace-period={FAST_GRACE_SECONDS}s", "--node-monitor-period=1s"] if fast_clocks else []
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        "--profiling=false",
        *fast,
    ]


def _scheduler() -> list[str]:
    config = run_dir() / "scheduler.conf"
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--profiling=false",
    ]
