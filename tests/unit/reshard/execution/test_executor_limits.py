"""How many workers a plan may have: within the memory, and none beyond the plan's number for short or fixed runs."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from reshard.execution import executor
from reshard.execution.executor import limits_for
from reshard.planning.plan import Plan

MIB = 1 << 20


def plan(num_bytes: int = 1 << 30, *, units: int = 64, memory: int = 96 * MIB, remote: bool = False) -> Plan:
    threads: dict[str, Any] = {"num_threads": 8 if remote else 2, "tile_bytes": 8 * MIB}
    return cast(
        Plan,
        SimpleNamespace(
            bytes_to_read=num_bytes, units=range(units), memory_bytes=memory, is_remote=remote, **threads
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of", "adapts", "free", "most"),
    [
        (plan(), True, 1 << 40, 4),
        (plan(), True, 40 * MIB, 3),
        (plan(), True, 0, 2),
        (plan(), True, None, 2),
        (plan(), False, 1 << 40, 2),
        (plan(100 * MIB), True, 1 << 40, 2),
        (plan(units=5), True, 1 << 40, 2),
        (plan(remote=True), True, 1 << 40, 8),  # at the default the process stays below 256 MiB
        (plan(remote=True, memory=64 * MIB), True, 1 << 40, 8),
        (plan(remote=True, memory=288 * MIB), True, 1 << 40, 10),
        (plan(remote=True, memory=1024 * MIB), True, 1 << 40, 16),
    ],
)
def test_workers(of: Plan, adapts: bool, free: int | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "free_memory_bytes", lambda: free)
    limits = limits_for(of, adapts=adapts)
    assert (limits.start, limits.most) == (of.num_threads, most)
