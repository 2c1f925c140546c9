"""One machine of the cluster: a set of Linux namespaces with an init process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

from testbed import cgroups
from testbed.paths import BRIDGE, run_dir
from testbed.shell import run, until

_INIT = Path(__file__).with_name("machine-init.sh")
_launchers: list[subprocess.Popen[bytes]] = []
"""Machines that this process has started. They outlive it; until then they are its children and have to be reaped."""


def start(name: str, *, address: str, script: str) -> None:
    """Start a machine and plug it into the bridge.

    Args:
        name: host name, cgroup and log prefix.
        address: IPv4 address on the bridge.
        script: shell text that starts the daemons; `keep LABEL COMMAND` runs one for ever.
    """
    logs = run_dir() / "log" / name
    logs.mkdir(parents=True, exist_ok=True)
    script_file = run_dir() / "machine" / f"{name}.sh"
    script_file.parent.mkdir(parents=True, exist_ok=True)
    script_file.write_text(script)
    cgroups.create(f"{name}/sys")
    launch = (
        f"{cgroups.join_command(cgroups_path(name))} && exec unshare --mount --pid --fork --mount-proc --net --uts "
        f"--kill-child bash {_INIT} {name} {address} {script_file}"
    )
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    with open(logs / "init.log", "ab") as log:
        launcher = subprocess.Popen(
            ["bash", "-c", launch],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**environment, "LOGS": str(logs)},
        )
    _launchers[:] = [other for other in _launchers if other.poll() is None] + [launcher]
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    init = until(
        lambda: [int(word) for word in children.read_text().split()], what=f"{name}'s init", timeout_seconds=10
    )[0]
    _write_identity(name, init)
    host_network = Path("/proc/self/ns/net").readlink()
    until(
        lambda: Path(f"/proc/{init}/ns/net").readlink() != host_network,
        what=f"{name}'s network namespace",
        timeout_seconds=10,
    )
    link = link_name(address)
    run("ip", "link", "del", link, check=False)
    run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(init))
    run("ip", "link", "set", link, "master", BRIDGE, "up")


def cgroups_path(name: str) -> str:
    """Group of the machine's daemons."""
    return f"{name}/sys"


def link_name(address: str) -> str:
    """Host end of the machine's cable."""
    return f"etj{address.rsplit('.', 1)[1]}"


def power_off(name: str) -> None:
    """SIGKILL everything of the machine at once; returns when nothing of it is left."""
    init = init_pid(name)
    if init is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(init, signal.SIGKILL)
    with contextlib.suppress(OSError):
        cgroups.freeze(name, frozen=False)
    for pid in cgroups.processes(name) if init is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not _living(name), what=f"the end of {name}'s processes", timeout_seconds=20)
    with contextlib.suppress(OSError):
        cgroups.remove(name)
    (run_dir() / "machine" / f"{name}.json").unlink(missing_ok=True)


def _living(name: str) -> list[int]:
    return [pid for pid in cgroups.processes(name) if _state(pid) not in ("Z", "X", "")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def is_running(name: str) -> bool:
    """The machine's init lives."""
    return init_pid(name) is not None


def init_pid(name: str) -> int | None:
    """PID of the machine's init, or None; a number that now belongs to another process does not count."""
    try:
        identity = json.loads((run_dir() / "machine" / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return identity["pid"] if _start_time(identity["pid"]) == identity["started"] else None


def _write_identity(name: str, pid: int) -> None:
    path = run_dir() / "machine" / f"{name}.json"
    path.write_text(json.dumps({"pid": pid, "started": _start_time(pid)}))


def _start_time(pid: int) -> str:
    """Start time in clock ticks since boot (proc(5), field 22): with the PID it identifies a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def hold_file(name: str, label: str) -> Path:
    """File that keeps a daemon, by its label in the machine's script, from being started again."""
    return run_dir() / "log" / name / f"{label}.hold"


def daemon_pids(name: str, program: str) -> list[int]:
    """PIDs of one daemon of the machine, for instance `kubelet`."""
    found = []
    for pid in cgroups.processes(cgroups_path(name)):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == program[:15]:
                found.append(pid)
    return found


def shim_pids(name: str, uid: str) -> list[int]:
    """PIDs of the runtime's processes on the machine that run containers of the pod with this UID."""
    marks = (uid, uid.replace("-", "_"))  # as the drivers cgroupfs and systemd write it
    pods = {pid for pid in cgroups.processes(name) if any(mark in _cgroup(pid) for mark in marks)}
    return sorted({parent for pid in pods if _name(parent := _parent(pid)).startswith("containerd-shim")})


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _cgroup(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
