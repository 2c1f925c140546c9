"""Bringing the cluster up and taking it down without a trace."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from testbed import (
    cgroups,
    components,
    controlplane,
    extensions,
    images,
    machine,
    nodes,
    oci,
    project,
    shellenv,
    storage,
)
from testbed.dns import Api
from testbed.errors import CannotRunHereError, TestbedError
from testbed.paths import (
    BRIDGE,
    CGROUP,
    CONTROL_PLANE,
    HOST_ADDRESS,
    MACHINE_DIR,
    NODE_NETWORK_BITS,
    kubeconfig,
    pod_network,
    run_dir,
    state_dir,
)
from testbed.pki import Authority
from testbed.provider import RESOURCES
from testbed.shell import run, say, until

_HOST_FOLDERS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers")
SYSCTLS = (
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""Settings below /proc/sys that kubelets change for the whole machine; `down` puts them back."""


def check_machine() -> None:
    """Refuse politely where a test bed cannot run.

    Raises:
        CannotRunHereError: with everything that is in the way.
    """
    problems = []
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        problems.append(f"it needs Linux on x86_64, this is {platform.system()} on {platform.machine()}")
    elif os.geteuid() != 0:
        problems.append("it needs root (namespaces, mounts, control groups)")
    else:
        packages = {"ip": "iproute2", "unshare": "util-linux", "mount": "mount", "bash": "bash"}
        absent = sorted({package for program, package in packages.items() if shutil.which(program) is None})
        if absent:
            problems.append(f"programs are missing: apt-get install {' '.join(absent)}")
    if problems:
        raise CannotRunHereError(
            f"the test bed cannot run here: {'; '.join(problems)}. "
            "Use any other cluster instead, for instance `kind create cluster`, and give --kubeconfig."
        )


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """One test bed a machine: commands that change it run one after the other.

    Raises:
        TestbedError: another command holds the lock.
    """
    MACHINE_DIR.mkdir(parents=True, exist_ok=True)
    with _held(MACHINE_DIR / "lock", "the test bed is being changed by process {}: wait for it"):
        yield


@contextlib.contextmanager
def reserved() -> Iterator[None]:
    """Reserve the test bed for one run of tests, which removes it at its end.

    Raises:
        TestbedError: another run has reserved it.
    """
    MACHINE_DIR.mkdir(parents=True, exist_ok=True)
    text = "tests of process {} use the test bed, and remove it at their end: wait for them, or give --kubeconfig"
    with _held(MACHINE_DIR / "reservation", text):
        yield


@contextlib.contextmanager
def _held(path: Path, refusal: str) -> Iterator[None]:
    with open(path, "a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.seek(0)
            raise TestbedError(refusal.format(stream.read() or "?")) from error
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


def refuse_others() -> None:
    """Refuse to change a test bed that was started with another cache folder: this command would end its processes.

    Raises:
        TestbedError: such a test bed is up, and its cache folder is still there to remove it with.
    """
    try:
        owner = Path((MACHINE_DIR / "owner").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    if cgroups.exists() and owner != state_dir().resolve() and owner.exists():
        raise TestbedError(
            f"a test bed of the cache folder {owner.parent} is up, and a machine has room for one: remove it with "
            f"`ETJ_CACHE_DIR={owner.parent} python -m testbed down`, or give --kubeconfig"
        )


def up(
    *,
    num_gpu_nodes: int = 3,
    gpus_per_node: int = 2,
    resources: tuple[str, ...] = RESOURCES,
    fast_clocks: bool = True,
) -> None:
    """Bring a fresh cluster up; an equal one that runs already is kept, anything else is taken down first.

    Raises:
        CannotRunHereError: not on this machine.
        TestbedError: a program could not be had, or the cluster did not become ready.
    """
    check_machine()
    wanted = {
        "num_gpu_nodes": num_gpu_nodes,
        "gpus_per_node": gpus_per_node,
        "resources": list(resources),
        "fast_clocks": fast_clocks,
    }
    with lock():
        kept = settings().get("wanted") == wanted and is_ready()
        if not kept:
            refuse_others()
            _make(wanted, nodes.layout(num_gpu_nodes=num_gpu_nodes, gpus_per_node=gpus_per_node, resources=resources))
    if kept:
        ensure_images()
    say(f"{'already ' if kept else ''}up; kubectl, helm and kubectl etj for this shell: {shellenv.command()}")


def _make(wanted: dict[str, object], members: tuple[nodes.Node, ...]) -> None:
    """Remove what there is and bring a fresh cluster up."""
    remove_everything()
    MACHINE_DIR.mkdir(parents=True, exist_ok=True)
    (MACHINE_DIR / "owner").write_text(str(state_dir().resolve()), encoding="utf-8")
    components.ensure()
    images.write_all(state_dir() / "images")
    with project.lock():
        project.ensure_built()
    _remember(wanted)
    _make_bridge(members)
    storage.make_volume(storage.LIMITED, limit_mebibytes=storage.LIMITED_MEBIBYTES)
    authority = Authority(run_dir() / "pki")
    controlplane.prepare(authority)
    for node in members:
        nodes.prepare(node, authority, fast_clocks=bool(wanted["fast_clocks"]))
    say("starting the control plane and the nodes")
    controlplane.start(authority, members, fast_clocks=bool(wanted["fast_clocks"]))
    for node in members:
        nodes.start(node, members)
    api = Api(kubeconfig())
    until(lambda: api.get("/api/v1/namespaces/kube-system"), what="the API server")
    (run_dir() / "apiserver.ready").touch()
    wait_ready(members)
    (run_dir() / "ready").touch()


def ensure_images() -> tuple[oci.Image, ...]:
    """Build the project's images as far as sources have changed, and bring them onto every node that is on.

    Nodes that are off import them when they are switched on.

    Raises:
        TestbedError: no test bed is up, a program failed, or a node did not answer.
    """
    with project.lock():
        built = project.ensure_built()
        running = [(node, init) for node in members() if (init := machine.init_pid(node.name)) is not None]
        for node, init in running:
            enter = ("nsenter", "--target", str(init), "--mount", "--pid", "--net")
            run("timeout", "120", *enter, "bash", "-ec", nodes.import_images(node))
    return built


def wait_ready(members: tuple[nodes.Node, ...]) -> None:
    """Wait until every node is Ready with its GPUs and pods can be created."""
    api = Api(kubeconfig())

    def ready(node: nodes.Node) -> bool:
        status = (api.get(f"/api/v1/nodes/{node.name}") or {}).get("status", {})
        conditions = {item["type"]: item["status"] for item in status.get("conditions", [])}
        offered = status.get("allocatable", {})
        devices = all(int(offered.get(name, 0)) >= node.num_gpus for name in node.resources)
        return conditions.get("Ready") == "True" and devices

    for node in members:
        until(lambda node=node: ready(node), what=f"node {node.name}", timeout_seconds=120)  # type: ignore[misc]
    until(lambda: api.get("/api/v1/namespaces/default/serviceaccounts/default"), what="the default ServiceAccount")


def settings() -> dict[str, object]:
    """Read the settings of the running cluster, and the settings of this machine that its end restores."""
    try:
        value: dict[str, object] = json.loads((run_dir() / "settings.json").read_text())
    except (OSError, ValueError):
        return {}
    return value


def members() -> tuple[nodes.Node, ...]:
    """Nodes of the running cluster.

    Raises:
        TestbedError: there is none.
    """
    wanted = settings().get("wanted")
    if not isinstance(wanted, dict):
        raise TestbedError("no test bed is up: run `python -m testbed up`")
    return nodes.layout(
        num_gpu_nodes=wanted["num_gpu_nodes"],
        gpus_per_node=wanted["gpus_per_node"],
        resources=tuple(wanted["resources"]),
    )


def is_ready() -> bool:
    """A complete cluster is up and all its machines live."""
    if not (run_dir() / "ready").exists():
        return False
    return all(machine.is_running(name) for name in (CONTROL_PLANE, *(node.name for node in members())))


def down() -> None:
    """Remove the cluster: processes, mounts, interfaces, routes, control groups, folders and settings.

    Raises:
        TestbedError: the cluster that is up belongs to another cache folder.
    """
    with lock():
        refuse_others()
        remove_everything()
    say("down")


def remove_everything() -> None:
    """Remove whatever an `up` may have left, complete or not. Safe to call when there is nothing."""
    if cgroups.exists():
        for pid in cgroups.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        names = {path.name for hierarchy in cgroups.hierarchies() for path in _children(hierarchy / CGROUP)}
        for name in names:
            machine.power_off(name)
        until(_cgroups_are_gone, what="the end of all processes of the test bed", timeout_seconds=20)
        extensions.remove_abandoned_locks(extensions.folder())
    for link in sorted(path.name for path in Path("/sys/class/net").glob("etj*")):
        run("ip", "link", "del", link, check=False)
    saved = settings()
    restore_sysctls(saved.get("sysctls"))
    for folder in saved.get("made_folders") or []:  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
    for volume in sorted((state_dir() / "volumes").glob("*")):
        if volume.is_mount():
            run("umount", volume)
    if run_dir().exists():
        shutil.rmtree(run_dir())
    shutil.rmtree(state_dir() / "volumes", ignore_errors=True)


def read_sysctls() -> dict[str, str]:
    """Read the settings that kubelets change."""
    return {name: (Path("/proc/sys") / name).read_text().strip() for name in SYSCTLS}


def restore_sysctls(values: object) -> None:
    """Write settings back that `read_sysctls` has read; nothing if there are none."""
    for name, value in values.items() if isinstance(values, dict) else ():
        (Path("/proc/sys") / name).write_text(value)


def _children(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _cgroups_are_gone() -> bool:
    with contextlib.suppress(OSError):
        cgroups.remove()
    return not cgroups.exists()


def _remember(wanted: dict[str, object]) -> None:
    """Record, before anything is changed, how the machine was."""
    run_dir().mkdir(parents=True)
    made = [folder for folder in _HOST_FOLDERS if not Path(folder).is_dir()]
    (run_dir() / "settings.json").write_text(
        json.dumps({"wanted": wanted, "made_folders": made, "sysctls": read_sysctls()}, indent=1)
    )
    for folder in made:
        Path(folder).mkdir(parents=True)


def _make_bridge(members: tuple[nodes.Node, ...]) -> None:
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{HOST_ADDRESS}/{NODE_NETWORK_BITS}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for node in members:
        run("ip", "route", "add", pod_network(node.index), "via", node.address, "dev", BRIDGE)
