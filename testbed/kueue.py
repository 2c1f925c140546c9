"""Kueue on the test bed: built from its Go module, run as a process of the control plane's machine while a test asks.

Its manager has no binary release. It listens on 127.0.0.1 of that machine, and the API server calls its webhooks there.
Its rights are not tested: it runs as the cluster's admin.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from testbed import cgroups, components, helm, machine
from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from testbed.paths import CONTROL_PLANE, cache_dir, kubeconfig, run_dir
from testbed.pki import Authority
from testbed.shell import run, until

VERSION = components.KUEUE_VERSION
NAMESPACE = "kueue-system"
_MODULE = "sigs.k8s.io/kueue"
_URL = "https://127.0.0.1:9443"
_KEPT_KINDS = ("CustomResourceDefinition", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
_WEBHOOKS = ("job", "workload", "clusterqueue", "localqueue", "cohort", "resourceflavor")
"""Webhooks for batch Jobs and Kueue's own kinds; one for pods would stand in the way of every pod of the cluster."""

_launchers: list[subprocess.Popen[bytes]] = []
"""Managers that this process has started: its children, which have to be reaped."""


def folder() -> Path:
    """Return the folder in the cache with the program and the chart."""
    return cache_dir() / f"kueue-{VERSION}"


def program() -> Path:
    """Return the path of the manager."""
    return folder() / "kueue"


def ensure() -> None:
    """Bring the manager and its chart into the cache: built where there is no release.

    Raises:
        TestbedError: there is no Go to build it with, or the build failed.
    """
    if program().exists() and (folder() / "chart").exists():
        return
    folder().mkdir(parents=True, exist_ok=True)
    version = components.DEFAULT_KUBERNETES_VERSION
    module = components.build_go_programs({program(): components.KUEUE_PACKAGE}, {}, version=version)
    source = Path(run("go", "list", "-m", "-f", "{{.Dir}}", _MODULE, cwd=module).strip())
    shutil.copytree(source / "charts/kueue", folder() / "chart", dirs_exist_ok=True, copy_function=shutil.copyfile)


def start(**configuration: Any) -> None:
    """Install Kueue's kinds and webhooks on the test bed, and run the manager until `stop`.

    Args:
        configuration: fields of Kueue's Configuration, in the place of those of `_configure`.

    Raises:
        TestbedError: no test bed is up, or the manager did not start.
    """
    init = machine.init_pid(CONTROL_PLANE)
    if init is None:
        raise TestbedError("the control plane is not on: run `python -m testbed up`")
    ensure()
    stop()
    place = run_dir() / "kueue"
    hooks = _install(Kubectl(kubeconfig()), place, configuration)
    log = run_dir() / "log" / CONTROL_PLANE / "kueue.log"
    log.unlink(missing_ok=True)
    script = _write_script(place, kubeconfig())
    join = cgroups.join_command(machine.cgroups_path(CONTROL_PLANE))
    enter = f"nsenter --target {init} --net --mount --pid unshare --mount bash {script}"
    with open(log, "ab") as stream:
        launcher = subprocess.Popen(
            ["bash", "-c", f"{join} && exec {enter}"],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            cwd="/",
        )
    _launchers.append(launcher)
    _serve(Kubectl(kubeconfig()), hooks, log)


@contextlib.contextmanager
def beside(config: Path, place: Path, **configuration: Any) -> Iterator[None]:
    """Run Kueue beside a lone API server on this machine (`benchmarks.apiserver`), for the time of the context.

    Args:
        config: the admin's kubeconfig.
        place: folder for keys and the log.
        configuration: fields of Kueue's Configuration, in the place of those of `_configure`.

    Raises:
        TestbedError: there is no Kueue, or the manager did not start.
    """
    ensure()
    kubectl = Kubectl(config)
    hooks = _install(kubectl, place, configuration)
    log = place / "kueue.log"
    with open(log, "ab") as stream:
        # The kernel ends it with this process, also after SIGKILL.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "bash", str(_write_script(place, config))]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
        try:
            _serve(kubectl, hooks, log)
            yield
        finally:
            process.kill()
            process.wait(timeout=20)


def _install(kubectl: Kubectl, place: Path, configuration: dict[str, Any]) -> list[dict[str, Any]]:
    """Create Kueue's kinds, keys and configuration; return the webhooks, for when somebody answers them."""
    authority = Authority(place / "pki")
    authority.issue("tls", common_name="kueue", server=True)
    kubectl("create", "namespace", NAMESPACE, check=False)
    objects = _objects((place / "pki/ca.crt").read_bytes())
    kinds = [item for item in objects if item["kind"] == "CustomResourceDefinition"]
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(kinds))
    for item in kinds:
        kubectl.wait_established(item["metadata"]["name"])
    (place / "config.yaml").write_text(yaml.safe_dump({**_configure(place / "pki"), **configuration}))
    return [item for item in objects if item["kind"] != "CustomResourceDefinition"]


def _write_script(place: Path, config: Path) -> Path:
    """Write what runs the manager in a mount namespace of its own."""
    script = place / "run.sh"
    # Without certificates of its own it insists on a folder in /etc: it gets a private one.
    script.write_text(
        f"set -e\nmount -t tmpfs tmpfs /etc\nmkdir -p /etc/kueue/metrics\ncp -r {place}/pki /etc/kueue/metrics/certs\n"
        f"export KUBECONFIG={config} POD_NAMESPACE={NAMESPACE}\n"
        f"exec {program()} --config={place}/config.yaml --zap-log-level=2\n"
    )
    return script


def _serve(kubectl: Kubectl, hooks: list[dict[str, Any]], log: Path) -> None:
    """Wait until the manager answers, then send it the webhooks: the API server refuses what nobody answers for."""
    until(lambda: "Serving webhook server" in log.read_text(), what=f"Kueue's webhooks; see {log}", timeout_seconds=60)
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(hooks))


def stop() -> None:
    """End the manager and remove its webhooks and kinds, with every object of these kinds."""
    for pid in machine.daemon_pids(CONTROL_PLANE, "kueue"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not machine.daemon_pids(CONTROL_PLANE, "kueue"), what="the end of Kueue", timeout_seconds=20)
    while _launchers:
        _launchers.pop().wait(timeout=20)
    remove(Kubectl(kubeconfig()))


def remove(kubectl: Kubectl) -> None:
    """Remove Kueue's webhooks and kinds, with every object of these kinds, once the manager has ended."""
    hooks = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
    kubectl("delete", hooks, "-l", "app.kubernetes.io/name=kueue", "--ignore-not-found")
    text = kubectl("get", "crd", "-l", "app.kubernetes.io/name=kueue", "-o", "json")
    for kind in json.loads(text)["items"]:
        _remove_kind(kubectl, kind)


def _remove_kind(kubectl: Kubectl, kind: dict[str, Any]) -> None:
    """Remove a kind; nobody is there to remove the finalizers of its objects."""
    name = kind["metadata"]["name"]
    for item in kubectl.get(name, "-A").get("items", []):
        if item["metadata"].get("finalizers"):
            meta = item["metadata"]
            place = ("-n", meta["namespace"]) if "namespace" in meta else ()
            patch = '{"metadata": {"finalizers": null}}'
            kubectl("patch", name, meta["name"], *place, "--type=merge", "-p", patch, check=False)
    kubectl("delete", "crd", name, "--ignore-not-found", "--wait=true")


def _configure(pki: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "127.0.0.1:8081"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": 9443, "certDir": str(pki)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": 300, "burst": 500},
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": ["batch/job"]},
    }


def _objects(authority: bytes) -> list[dict[str, Any]]:
    """Return the chart's kinds and webhooks, sent to the process instead of to a Service."""
    text = helm.run("template", "kueue", folder() / "chart", "--include-crds", namespace=NAMESPACE)
    bundle = base64.b64encode(authority).decode()
    found = []
    for item in yaml.safe_load_all(text):
        if not item or item["kind"] not in _KEPT_KINDS:
            continue
        item["metadata"].setdefault("labels", {})["app.kubernetes.io/name"] = "kueue"
        if "webhooks" in item:
            item["webhooks"] = [hook for hook in item["webhooks"] if hook["name"][1:].split(".")[0] in _WEBHOOKS]
            for hook in item["webhooks"]:
                _send_to_process(hook["clientConfig"], bundle)
        conversion = item["spec"].get("conversion", {}).get("webhook") if "spec" in item else None
        if conversion:
            _send_to_process(conversion["clientConfig"], bundle)
            item["metadata"].get("annotations", {}).pop("cert-manager.io/inject-ca-from", None)
        found.append(item)
    return found


def _send_to_process(config: dict[str, Any], bundle: str) -> None:
    service = config.pop("service")
    config |= {"url": _URL + service.get("path", "/convert"), "caBundle": bundle}
