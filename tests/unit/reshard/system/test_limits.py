"""Memory and processors, from what real machines say about themselves."""

import pytest

from reshard.system import limits
from reshard.system.cgroups import (
    parse_available,
    parse_cpu_quota,
    parse_free_memory,
    parse_groups,
    parse_throttled_seconds,
)
from reshard.system.limits import DEFAULT_MEMORY_BYTES

# A pod of Kubernetes 1.33 on a node with cgroup v2; the container has a cgroup namespace.
V2_CGROUP = "0::/\n"
V2_MOUNTS = """\
1092 1091 0:31 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
1099 1095 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate,memory_recursiveprot
"""

# The same without a namespace: Docker with --cgroupns=host.
V2_HOST_CGROUP = "0::/system.slice/docker-4f1c.scope\n"

# Docker on cgroup v1: the mount's root is the container's own group.
V1_CGROUP = """\
12:memory:/docker/4f1c
11:cpu,cpuacct:/docker/4f1c
1:name=systemd:/docker/4f1c
0::/system.slice/containerd.service
"""
V1_MOUNTS = """\
731 727 0:30 /docker/4f1c /sys/fs/cgroup/systemd ro,nosuid master:11 - cgroup cgroup rw,xattr,name=systemd
736 727 0:35 /docker/4f1c /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:18 - cgroup cgroup rw,cpu,cpuacct
740 727 0:39 /docker/4f1c /sys/fs/cgroup/memory ro,nosuid master:22 - cgroup cgroup rw,memory
"""

# A process in a group of its own, below the mount's root (cgroup v1, no container).
V1_NESTED_CGROUP = "4:memory:/process_api/ead7\n1:cpu:/\n0::/\n"
V1_NESTED_MOUNTS = """\
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""

V2_STAT = (
    "anon 52428800\nfile 734003200\ninactive_anon 0\nactive_anon 52428800\ninactive_file 629145600\nactive_file 1\n"
)
V1_STAT = "cache 1310720\nrss 1925120\ninactive_file 81920\ntotal_cache 1310720\ntotal_inactive_file 104857600\n"


def test_a_pod_with_a_namespace_of_its_own_looks_at_the_mount() -> None:
    (group,) = parse_groups(V2_CGROUP, V2_MOUNTS)
    assert (group.version, group.controllers, group.folders) == (2, (), ("/sys/fs/cgroup",))


def test_without_a_namespace_every_parent_counts() -> None:
    (group,) = parse_groups(V2_HOST_CGROUP, V2_MOUNTS)
    assert group.folders == (
        "/sys/fs/cgroup/system.slice/docker-4f1c.scope",
        "/sys/fs/cgroup/system.slice",
        "/sys/fs/cgroup",
    )


def test_version_1_has_a_mount_for_each_controller() -> None:
    found = {group.controllers: group.folders for group in parse_groups(V1_CGROUP, V1_MOUNTS)}
    assert found["memory",] == ("/sys/fs/cgroup/memory",)
    assert found["cpu", "cpuacct"] == ("/sys/fs/cgroup/cpu,cpuacct",)


def test_version_1_below_the_mount() -> None:
    found = {group.controllers: group.folders for group in parse_groups(V1_NESTED_CGROUP, V1_NESTED_MOUNTS)}
    assert found["memory",][0] == "/sys/fs/cgroup/memory/process_api/ead7"
    assert found["memory",][-1] == found["cpu",][0].replace("cpu", "memory")


@pytest.mark.parametrize("text", ["", "garbage\n", "0::/\n1 2\n - \n", "a b c d - cgroup2\n"])
def test_what_cannot_be_read_is_no_limit(text: str) -> None:
    assert parse_groups(text, text) == ()


@pytest.mark.parametrize(
    ("version", "files", "processors"),
    [
        (2, {"cpu.max": "max 100000\n"}, None),
        (2, {"cpu.max": "150000 100000\n"}, 1.5),
        (2, {}, None),
        (1, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        (1, {"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4.0),
        (1, {"cpu.cfs_quota_us": "0\n", "cpu.cfs_period_us": "0\n"}, None),
    ],
)
def test_cpu_quotas(version: int, files: dict[str, str], processors: float | None) -> None:
    assert parse_cpu_quota(version, files) == processors


@pytest.mark.parametrize(
    ("version", "files", "free"),
    [
        (2, {"memory.max": "max\n", "memory.current": "1000\n"}, None),
        (2, {"memory.max": "1073741824\n", "memory.current": "786432000\n", "memory.stat": V2_STAT}, 916455424),
        (2, {"memory.max": "1000\n", "memory.current": "4000\n"}, 0),
        (1, {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "4628480\n"}, None),
        (
            1,
            {"memory.limit_in_bytes": "536870912\n", "memory.usage_in_bytes": "209715200\n", "memory.stat": V1_STAT},
            536870912 - 104857600,
        ),
        (1, {}, None),
    ],
)
def test_free_memory_of_a_group(version: int, files: dict[str, str], free: int | None) -> None:
    assert parse_free_memory(version, files) == free


def test_available_memory_of_the_machine() -> None:
    text = "MemTotal:       24684096 kB\nMemFree:        17930404 kB\nMemAvailable:   24060220 kB\n"
    assert parse_available(text) == 24060220 * 1024
    assert parse_available("MemTotal: 1 kB\n") is None


@pytest.mark.parametrize(
    ("free", "buffers"),
    [(None, DEFAULT_MEMORY_BYTES), (64 << 30, DEFAULT_MEMORY_BYTES), (128 << 20, 32 << 20), (1 << 20, 8 << 20)],
)
def test_buffers_fit_what_is_free(free: int | None, buffers: int) -> None:
    assert limits.buffers_for(free) == buffers


@pytest.mark.parametrize(
    ("processors", "quota", "threads"), [(64, None, 8), (64, 1.5, 2), (1, None, 1), (4, 0.1, 1), (2, 16.0, 2)]
)
def test_threads_fit_processors_and_quota(processors: int, quota: float | None, threads: int) -> None:
    assert limits.threads_for(processors, quota) == threads


def test_a_small_pod_gets_small_buffers(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Whole chain, on files of the real layout."""
    group = tmp_path / "cgroup"
    group.mkdir()
    for name, content in {
        "memory.max": "134217728\n",
        "memory.current": "67108864\n",
        "memory.stat": "inactive_file 0\n",
        "cpu.max": "100000 100000\n",
    }.items():
        (group / name).write_text(content, encoding="ascii")
    texts = {
        "/proc/self/cgroup": V2_CGROUP,
        "/proc/self/mountinfo": V2_MOUNTS.replace("/sys/fs/cgroup", str(group)),
        "/proc/meminfo": "MemAvailable: 24060220 kB\n",
    }
    real = limits._text
    monkeypatch.setattr(limits, "_text", lambda path: texts.get(path) or real(path))
    assert limits.buffer_bytes() == 16 << 20
    assert limits.default_num_threads() == 1


@pytest.mark.parametrize(
    ("stat", "seconds"),
    [
        ("usage_usec 9\nnr_periods 7\nnr_throttled 3\nthrottled_usec 1500000\n", 1.5),  # version 2
        ("nr_periods 7\nnr_throttled 3\nthrottled_time 2500000000\nnr_bursts 0\n", 2.5),  # version 1
        ("nr_periods 0\n", 0.0),
        ("throttled_usec -\nbroken", 0.0),
        ("", 0.0),
    ],
)
def test_time_without_processors(stat: str, seconds: float) -> None:
    assert parse_throttled_seconds({"cpu.stat": stat}) == seconds
    assert limits.throttled_seconds() >= 0
