"""A real API server with nothing else: no controllers, no scheduler, no kubelets. Objects stay as they were made."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from testbed import components
from testbed.kubectl import Kubectl
from testbed.pki import Authority
from testbed.shell import until

CRD = Path(__file__).parents[1] / "crds/elastictrainingjobs.yaml"


@contextlib.contextmanager
def apiserver(*flags: str) -> Iterator[Path]:
    """etcd and kube-apiserver as processes of this machine, with an empty store; yields the admin's kubeconfig.

    Args:
        flags: more of them, for kube-apiserver.
    """
    components.ensure()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        client, peer, secure = (_free_port() for _ in range(3))
        authority = Authority(folder / "pki")
        authority.issue("apiserver", common_name="kube-apiserver", server=True)
        config = folder / "admin.conf"
        server = f"https://127.0.0.1:{secure}"
        authority.kubeconfig(config, common_name="admin", organization="system:masters", server=server)
        stack.enter_context(_process(folder, "etcd", _etcd(folder, client, peer)))
        stack.enter_context(_process(folder, "kube-apiserver", [*_server(authority.folder, client, secure), *flags]))
        kubectl = Kubectl(config)
        until(lambda: kubectl.get("namespace", "kube-node-lease"), what="the API server")
        yield config


@contextlib.contextmanager
def apiserver_with_crd(*flags: str, crd: Path = CRD) -> Iterator[Kubectl]:
    """Start such a server with the kind ElasticTrainingJob; yields kubectl with the admin's kubeconfig."""
    with apiserver(*flags) as config:
        kubectl = Kubectl(config)
        kubectl.apply_crd(crd)
        yield kubectl


@contextlib.contextmanager
def _process(folder: Path, program: str, flags: list[str]) -> Iterator[None]:
    with open(folder / f"{program}.log", "wb") as log:
        # The kernel ends it with this process, also after SIGKILL.
        command = ["setpriv", "--pdeathsig", "KILL", str(components.bin_dir() / program), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=90)  # it lets open requests end, up to a minute


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _etcd(folder: Path, client: int, peer: int) -> list[str]:
    return [
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls=http://127.0.0.1:{client}",
        f"--advertise-client-urls=http://127.0.0.1:{client}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-cluster=default=http://127.0.0.1:{peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _server(pki: Path, etcd: int, secure: int) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={secure}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=RBAC",
        "--endpoint-reconciler-type=none",
        "--disable-admission-plugins=TaintNodesByCondition",  # nobody would take the taints away again
        "--max-requests-inflight=800",
        "--max-mutating-requests-inflight=400",
        "--profiling=false",
    ]
