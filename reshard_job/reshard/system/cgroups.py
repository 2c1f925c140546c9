"""Parse the files of Linux' control groups: which groups limit this process, and their limits. Pure.

Source: Linux Documentation/admin-guide/cgroup-v1/memory.rst, scheduler/sched-bwc.rst and admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MEMORY_FILES = (
    "memory.max",
    "memory.current",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.stat",
)
"""Files that `parse_free_memory` reads, of both versions of the interface."""

CPU_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
"""Files that `parse_cpu_quota` reads, of both versions of the interface."""

THROTTLE_FILES = ("cpu.stat",)
"""Files that `parse_throttled_seconds` reads, of both versions of the interface."""

_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number close to 2^63, rounded down to pages


class Group(NamedTuple):
    """A control group that this process is in.

    Attributes:
        version: version of the interface, 1 or 2.
        controllers: controllers that its folder serves; empty for version 2, whose folder serves all of them.
        folders: its own folder and the folders of its parents, up to the mount's root.
    """

    version: int
    controllers: tuple[str, ...]
    folders: tuple[str, ...]


def parse_groups(cgroup: str, mountinfo: str) -> tuple[Group, ...]:
    """Read which control groups a process is in and where they are mounted.

    Args:
        cgroup: content of /proc/self/cgroup.
        mountinfo: content of /proc/self/mountinfo.
    """
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    groups = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        served = ("",) if kind[0] == "cgroup2" else tuple(name for name in kind[2].split(",") if name in paths)
        if served and served[0] in paths:
            folders = _folders(fields[4], fields[3], paths[served[0]])
            groups.append(Group(1 if kind[0] == "cgroup" else 2, served if served != ("",) else (), folders))
    return tuple(groups)


def _folders(mount: str, root: str, path: str) -> tuple[str, ...]:
    """List the folders from a group up to its mount; in a container the mount's root is the container's own group."""
    inside = path[len(root) :] if f"{path}/".startswith(f"{root}/") else path
    names = [name for name in inside.split("/") if name and name != ".."]
    return tuple("/".join([mount.rstrip("/"), *names[:count]]) for count in range(len(names), -1, -1))


def parse_cpu_quota(version: int, files: Mapping[str, str]) -> float | None:
    """Return the number of processors that a group may keep busy, or None for no limit.

    Args:
        version: version of the control group interface.
        files: file name -> content: `cpu.max`, or `cpu.cfs_quota_us` and `cpu.cfs_period_us`.
    """
    if version == 2:
        quota, _, period = files.get("cpu.max", "max").strip().partition(" ")
    else:
        quota, period = files.get("cpu.cfs_quota_us", "-1").strip(), files.get("cpu.cfs_period_us", "100000").strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0 or int(quota) == 0:
        return None
    return int(quota) / int(period)


def parse_throttled_seconds(files: Mapping[str, str]) -> float:
    """Return the time in which a group had used up its processor time; 0 if it has no quota.

    Args:
        files: file name -> content: `cpu.stat`, with `throttled_usec` (version 2) or `throttled_time` in nanoseconds.
    """
    counters = dict(line.split(maxsplit=1) for line in files.get("cpu.stat", "").splitlines() if " " in line)
    for key, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
        if (value := counters.get(key, "")).isdigit():
            return int(value) * unit
    return 0.0


def parse_free_memory(version: int, files: Mapping[str, str]) -> int | None:
    """Return the bytes that a group may still allocate, or None for no limit.

    Cached pages of files that were not used lately count as free, because the kernel drops them first. The kubelet
    counts them the same way.

    Args:
        version: version of the control group interface.
        files: file name -> content: `memory.max`, `memory.current`, `memory.stat`, or the names of version 1.
    """
    limit_file, usage_file = MEMORY_FILES[:2] if version == 2 else MEMORY_FILES[2:4]
    limit, usage = files.get(limit_file, "max").strip(), files.get(usage_file, "0").strip()
    if not limit.isdigit() or int(limit) >= _NO_LIMIT:
        return None
    key = "inactive_file" if version == 2 else "total_inactive_file"
    idle = next((line.split()[1] for line in files.get("memory.stat", "").splitlines() if line.startswith(key)), "0")
    return max(0, int(limit) - max(0, int(usage or 0) - int(idle)))


def parse_available(meminfo: str) -> int | None:
    """Read MemAvailable from the content of /proc/meminfo, in bytes; None if it is not there."""
    for line in meminfo.splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) << 10
    return None
