"""Docker: the daemon that runs on this machine, or one of unpacked Debian packages in namespaces of its own.

The own daemon has a network and mount namespace, control groups and folders of its own, so that its packet filter
rules and containers stay away from the machine's. One cable leads out of its network; through it the API server is
reached. It has no route to anywhere else, so it pulls nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from testbed import cgroups
from testbed.errors import CannotRunHereError, TestbedError
from testbed.kind.paths import build_dir, run_dir
from testbed.shell import run, until

LINK, PEER = "etk0", "etk1"
LINK_ADDRESS = "10.97.0.1"
DAEMON_ADDRESS = "10.97.0.2"
"""Of the own daemon's network, as this machine sees it."""

CGROUP = "etj-kind"
CAP_SYS_RESOURCE = 24
PACKAGES = (
    *("docker.io", "containerd", "runc", "tini", "iptables", "libip4tc2", "libip6tc2", "libxtables12", "libnftnl11"),
    *("libnfnetlink0", "libnetfilter-conntrack3", "containernetworking-plugins", "mmdebstrap"),
)
"""Debian packages of the own daemon, and of what builds the base image."""

_WRAPPER = "runc-without-capability"
_IPTABLES = ("iptables", "ip6tables")
_LIBRARIES = "root/usr/lib/x86_64-linux-gnu"


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """A Docker daemon that answers.

    Attributes:
        environment: variables for `docker` and `kind`.
        enter: words before a command that has to run in the daemon's network.
        api_address: address at which the daemon publishes ports for this machine; empty for the machine's own.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    enter: tuple[str, ...] = ()
    api_address: str = ""

    def __call__(self, *arguments: str | Path, check: bool = True, timeout_seconds: float = 600) -> str:
        """Run a command beside the daemon and return what it prints.

        Raises:
            TestbedError: it failed and `check` is set, or took too long.
        """
        words = [*self.enter, *(str(item) for item in arguments)]
        try:
            done = subprocess.run(
                words, env=self.variables(), capture_output=True, text=True, check=False, timeout=timeout_seconds
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TestbedError(f"`{' '.join(words)}`: {error}") from error
        if check and done.returncode:
            raise TestbedError(f"`{' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        return done.stdout

    def variables(self) -> dict[str, str]:
        """Environment of commands beside the daemon."""
        return {**os.environ, **self.environment}

    def answers(self) -> bool:
        """The daemon answers this user."""
        try:
            return bool(self("docker", "version", "--format", "{{.Server.Version}}", timeout_seconds=20).strip())
        except TestbedError:
            return False

    def has_image(self, reference: str) -> bool:
        """The daemon has the image."""
        return bool(self("docker", "image", "ls", "--quiet", reference, check=False).strip())

    def can_have_image(self, reference: str) -> bool:
        """The daemon has the image now, or has just pulled it."""
        return self.has_image(reference) or bool(self("docker", "pull", "--quiet", reference, check=False).strip())


def own() -> Engine:
    """The daemon of unpacked packages, whether or not it runs."""
    folder, state = build_dir(), run_dir()
    libraries = folder / _LIBRARIES
    path = [state / "shim", folder / "bin", folder / "root/usr/sbin", folder / "root/usr/bin"]
    environment = {
        "PATH": os.pathsep.join([*(str(item) for item in path), os.environ.get("PATH", "")]),
        "LD_LIBRARY_PATH": str(libraries),
        "XTABLES_LIBDIR": str(libraries / "xtables"),
        "DOCKER_HOST": f"unix://{state}/docker.sock",
        "DOCKER_CONFIG": str(state / "dockercfg"),
        **{name: "" for name in os.environ if name.lower().endswith("_proxy")},  # it reaches no proxy
    }
    pid = own_pid()
    enter = ("nsenter", f"--net=/proc/{pid}/ns/net", "--") if pid else ()
    return Engine(environment, enter, DAEMON_ADDRESS)


def own_pid() -> int:
    """PID of the own daemon; 0 if it does not run."""
    try:
        pid = int((run_dir() / "docker.pid").read_text())
        is_ours = "dockerd" in Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, ValueError):
        return 0
    return pid if is_ours else 0


def start_own() -> Engine:
    """Unpack the packages and start the daemon, unless it runs.

    Raises:
        CannotRunHereError: this is no Debian machine, or the user is not root.
        TestbedError: the packages cannot be had, or the daemon did not answer.
    """
    if own_pid() and own().answers():
        return own()
    if os.geteuid() != 0 or shutil.which("apt-get") is None or shutil.which("nsenter") is None:
        raise CannotRunHereError(
            "no Docker daemon answers, and only root on Debian can start one here: start Docker, or use the test bed"
        )
    unpack(PACKAGES)
    stop_own()
    state = run_dir()
    for name in ("shim", "run", "dockercfg"):
        (state / name).mkdir(parents=True, exist_ok=True)
    for name in (f"{program}{end}" for program in _IPTABLES for end in ("", "-save", "-restore")):
        link = state / "shim" / name
        link.unlink(missing_ok=True)
        link.symlink_to(build_dir() / "root/usr/sbin/xtables-nft-multi")
    if not Path("/lib/modules").exists():
        (state / "made-modules").touch()  # the daemon makes the folder, since kind mounts it into nodes
    daemon = own()
    with open(state / "dockerd.log", "ab") as log:
        subprocess.Popen(
            ["unshare", "--net", "--mount", "bash", "-c", f"ip link set lo up; exec {daemon_command(state)}"],
            env=daemon.variables(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until(lambda: own_pid() and own().answers(), what="the Docker daemon", timeout_seconds=90)
    _plug_in(own_pid())
    return own()


def daemon_command(state: Path) -> str:
    """Words that start the daemon, whose files are in `state`."""
    words = [
        f"dockerd --host unix://{state}/docker.sock --data-root {state}/docker --exec-root {state}/run/docker",
        f"--pidfile {state}/docker.pid --storage-driver overlay2 --exec-opt native.cgroupdriver=cgroupfs",
        f"--cgroup-parent /{CGROUP} --ip6tables=false",
    ]
    if not has_capability(CAP_SYS_RESOURCE):
        wrapper = state / _WRAPPER
        wrapper.write_text(runc_wrapper(build_dir() / "root/usr/sbin/runc"))
        wrapper.chmod(0o755)
        words.append(f"--add-runtime reduced={wrapper} --default-runtime reduced")
    return " ".join(words)


def has_capability(number: int, status: str | None = None) -> bool:
    """Return True if processes of this machine may have a capability: see capabilities(7), bounding set.

    Args:
        number: of the capability.
        status: text of /proc/self/status; by default this process's.
    """
    text = Path("/proc/self/status").read_text() if status is None else status
    bounding = next(line.split()[1] for line in text.splitlines() if line.startswith("CapBnd:"))
    return bool(int(bounding, 16) >> number & 1)


def runc_wrapper(runc: Path) -> str:
    """A runc for a machine without CAP_SYS_RESOURCE: Docker asks for every capability of a privileged container."""
    return f"""#!/bin/bash
file=
arguments=("$@")
for ((i = 0; i < $#; i++)); do
  case "${{arguments[i]}}" in
    --bundle|-b) file=${{arguments[i+1]}}/config.json ;;
    --process|-p) file=${{arguments[i+1]}} ;;
  esac
done
if [ -n "$file" ] && [ -f "$file" ]; then
  sed -i -e 's/"CAP_SYS_RESOURCE",//g' -e 's/,"CAP_SYS_RESOURCE"//g' "$file"
fi
exec {runc} "$@"
"""


def unpack(packages: tuple[str, ...]) -> None:
    """Unpack Debian packages below `build_dir()`, once. Nothing is installed into the machine."""
    folder = build_dir()
    mark = folder / "root/unpacked"
    if mark.exists() and mark.read_text() == " ".join(packages):
        return
    (folder / "root").mkdir(parents=True, exist_ok=True)
    for package in download(packages, folder / "deb"):
        run("dpkg", "-x", package, folder / "root")
    mark.write_text(" ".join(packages))


def download(packages: tuple[str, ...], folder: Path) -> list[Path]:
    """Download Debian packages into `folder`, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    absent = [name for name in packages if not list(folder.glob(f"{name}_*.deb"))]
    if absent:
        run("apt-get", "-q", "-oAPT::Sandbox::User=root", "download", *absent, cwd=folder)
    return [next(folder.glob(f"{name}_*.deb")) for name in packages]


def stop_own() -> None:
    """Stop the own daemon with all its containers, and remove its cable, control groups and files."""
    pid = own_pid()
    if pid:
        names = own()("docker", "ps", "--quiet", check=False, timeout_seconds=60).split()
        if names:
            own()("docker", "kill", *names, check=False, timeout_seconds=120)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        until(lambda: not own_pid(), what="the end of the Docker daemon", timeout_seconds=60)
    run("ip", "link", "del", LINK, check=False)
    for hierarchy in (*cgroups.hierarchies(), cgroups.ROOT / "unified"):
        for group in sorted((hierarchy / CGROUP).rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()
        with contextlib.suppress(OSError):
            (hierarchy / CGROUP).rmdir()
    if (run_dir() / "made-modules").exists():
        with contextlib.suppress(OSError):
            Path("/lib/modules").rmdir()
    for name in ("docker", "run", "shim", "dockercfg"):
        shutil.rmtree(run_dir() / name, ignore_errors=True)
    for name in ("made-modules", "dockerd.log", _WRAPPER):
        (run_dir() / name).unlink(missing_ok=True)


def _plug_in(pid: int) -> None:
    run("ip", "link", "del", LINK, check=False)
    run("ip", "link", "add", LINK, "type", "veth", "peer", "name", PEER, "netns", str(pid))
    run("ip", "addr", "add", f"{LINK_ADDRESS}/30", "dev", LINK)
    run("ip", "link", "set", LINK, "up")
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net", "--", "ip")
    run(*inside, "addr", "add", f"{DAEMON_ADDRESS}/30", "dev", PEER)
    run(*inside, "link", "set", PEER, "up")
