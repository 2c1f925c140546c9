"""Control groups of the test bed's machines, version 1 and version 2.

Every machine gets `/<CGROUP>/<name>`; its daemons run in `.../sys`, its pods in `.../kubepods`. All processes of a
machine can therefore be found, frozen and counted without knowing their PIDs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from testbed.paths import CGROUP

ROOT = Path("/sys/fs/cgroup")
_V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids", "hugetlb")


def is_v2() -> bool:
    """The unified hierarchy is mounted at the root."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """Mount points below which a group has to be made."""
    if is_v2():
        return [ROOT]
    return sorted(
        path for path in ROOT.iterdir() if path.is_dir() and (path / "tasks").exists() and not path.is_symlink()
    )


def create(name: str) -> None:
    """Make the group `name` (relative to the test bed's own) in every hierarchy, with usable controllers."""
    for hierarchy in hierarchies():
        path = hierarchy
        for part in (CGROUP, *name.split("/")):
            parent, path = path, path / part
            if is_v2() and parent.name != "sys":
                _delegate(parent)
            path.mkdir(exist_ok=True)
            if hierarchy.name == "cpuset":
                _inherit(path, parent, "cpuset.cpus")
                _inherit(path, parent, "cpuset.mems")


def _delegate(path: Path) -> None:
    """Version 2: children get every controller that the parent has."""
    available = (path / "cgroup.controllers").read_text().split()
    for controller in _V2_CONTROLLERS:
        if controller in available:
            with contextlib.suppress(OSError):
                (path / "cgroup.subtree_control").write_text(f"+{controller}")


def _inherit(path: Path, parent: Path, file: str) -> None:
    """Version 1: a new cpuset is empty and holds no process until it names processors and memory."""
    if not (path / file).read_text().strip():
        (path / file).write_text((parent / file).read_text())


def join_command(name: str) -> str:
    """Shell words that move the calling shell into the group, in every hierarchy."""
    return " && ".join(f"echo $$ > {hierarchy / CGROUP / name}/cgroup.procs" for hierarchy in hierarchies())


def processes(name: str = "") -> list[int]:
    """PIDs of everything in the group and below."""
    found: set[int] = set()
    for hierarchy in hierarchies():
        for folder in _walk(hierarchy / CGROUP / name):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
    return sorted(found)


def freeze(name: str, frozen: bool) -> None:
    """Stop or continue every process of the group, as a hypervisor pauses a virtual machine."""
    if is_v2():
        (ROOT / CGROUP / name / "cgroup.freeze").write_text("1" if frozen else "0")
    else:
        (ROOT / "freezer" / CGROUP / name / "freezer.state").write_text("FROZEN" if frozen else "THAWED")


def remove(name: str = "") -> None:
    """Remove the group and all below it; processes must be gone."""
    for hierarchy in [*hierarchies(), ROOT / "unified"]:
        for folder in reversed(list(_walk(hierarchy / CGROUP / name))):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


def exists() -> bool:
    """Anything of the test bed is left in any hierarchy."""
    return any((hierarchy / CGROUP).exists() for hierarchy in hierarchies())


def _walk(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    yield folder
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink():
            yield from _walk(child)
