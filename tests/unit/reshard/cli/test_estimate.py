"""Estimate of a conversion's time: sampling, rates and arithmetic."""

import dataclasses
import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest

from reshard.cli import estimate
from reshard.cli.estimate import Rate, Rates, count_requests, measure_check, measure_read, measure_write, sample
from reshard.planning.plan import Plan, make_plan
from reshard.storage.object_store import location
from reshard.tensors.geometry import Box
from reshard.tensors.layout import Index, LogicalTensor, SourceFile, TargetFile, TargetLayout, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology

MIB = 1 << 20


def plan_of(rows: int, columns: int, *, threads: int = 1, root: Path = Path("/nowhere")) -> Plan:
    """A float32 matrix in one file, cut along its columns into two files."""
    tensor = LogicalTensor(key=TensorKey("weight", "w"), shape=(rows, columns), dtype="float32")
    source, target = ShardTableBuilder(), ShardTableBuilder()
    source.add(tensor=0, box=Box((0, 0), (rows, columns)), file=0, byte_offset=0)
    half = columns // 2
    target.add(tensor=0, box=Box((0, 0), (rows, half)), file=0, byte_offset=0)
    target.add(tensor=0, box=Box((0, half), (rows, half)), file=0, byte_offset=half * 4, strides=(columns, 1))
    index = Index(
        root=root,
        format="deepspeed",
        topology=Topology(),
        step=1,
        samples=1,
        tensors=(tensor,),
        files=(SourceFile(path="one", num_bytes=tensor.num_bytes),),
        shards=source.build(),
    )
    layout = TargetLayout(
        format="deepspeed",
        topology=Topology(tp=2),
        files=(TargetFile(path="two", num_bytes=tensor.num_bytes),),
        shards=target.build(),
    )
    return make_plan(index, layout, memory_bytes=16 * MIB, num_threads=threads)


def rates(read: float, write: float, check: float) -> Rates:
    one = [Rate(bytes_per_second=value, measured=True, detail="") for value in (read, write, check)]
    return Rates(read=one[0], write=one[1], check=one[2])


def test_one_thread_reads_checks_and_writes_in_turn() -> None:
    plan = plan_of(1024, 1024)
    found = estimate.estimate(plan, rates(4 * MIB, 2 * MIB, 8 * MIB))
    assert (found.read_seconds, found.write_seconds, found.check_seconds) == (1.0, 2.0, 1.0)
    assert found.seconds == pytest.approx(4.3)


def test_with_threads_checks_hide_behind_storage_or_storage_behind_them() -> None:
    plan = plan_of(1024, 1024, threads=2)
    assert estimate.estimate(plan, rates(4 * MIB, 2 * MIB, 4 * MIB)).seconds == pytest.approx(3.3)
    assert estimate.estimate(plan, rates(4 * MIB, 2 * MIB, 1 * MIB)).seconds == pytest.approx(4.3)


def test_the_estimate_says_what_was_measured_and_what_assumed() -> None:
    told = Rates(
        read=Rate(bytes_per_second=4 * MIB, measured=True, detail="here"),
        write=Rate(bytes_per_second=2 * MIB, measured=False, detail="nowhere"),
        check=Rate(bytes_per_second=MIB, measured=True, detail="memory"),
    )
    lines = estimate.estimate(plan_of(1024, 1024), told).lines()
    assert lines[0] == "about 11 s"
    assert lines[1].endswith("1.0 s at 4.0 MiB/s (measured: here)")
    assert lines[2].endswith("2.0 s at 2.0 MiB/s (assumed: nowhere)")


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [10, 0, 30], [MIB] * 3, [5 * MIB, 1, 2 * MIB], [300 * MIB, 7, 200 * MIB]]
)
def test_a_sample_stays_inside_its_files_and_its_budget(sizes: list[int]) -> None:
    found = sample(sizes, 64 * MIB)
    assert sum(length for _, _, length in found) <= 64 * MIB
    assert all(length > 0 and position + length <= sizes[file] for file, position, length in found)
    assert bool(found) == bool(sum(sizes))
    ends = sorted((file, position, position + length) for file, position, length in found)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ends))


def test_a_sample_is_spread_over_all_files_and_quick_for_huge_ones() -> None:
    found = sample([100 * MIB] * 8, 64 * MIB)
    assert {file for file, _, _ in found} == set(range(8))
    assert max(position for _, position, _ in found) > 80 * MIB
    assert len(sample([1 << 45] * 4, 64 * MIB)) == 64


def test_reading_is_measured_on_the_files_themselves(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(3 * MIB))
    (tmp_path / "b").write_bytes(os.urandom(MIB))
    ticks = iter(float(number) for number in range(100))
    found = measure_read(tmp_path, [("a", 3 * MIB), ("b", MIB)], clock=lambda: next(ticks) * 0.01)
    assert found.measured
    assert found.bytes_per_second == pytest.approx(4 * MIB / 0.05)
    assert found.detail.startswith("4.0 MiB in 50 ms")


def test_a_slow_source_is_not_read_to_the_end_of_the_sample(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8 * MIB))
    ticks = iter(float(number) for number in range(100))
    found = measure_read(tmp_path, [("a", 8 * MIB)], clock=lambda: next(ticks))
    assert found.detail.startswith("2.0 MiB in 3.0 s")


def test_a_source_that_is_gone_is_assumed(tmp_path: Path) -> None:
    found = measure_read(tmp_path, [("gone", MIB)])
    assert not found.measured
    assert found.bytes_per_second > 0


def test_a_source_in_a_store_is_measured_too() -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/measured/a", bytes(2 * MIB))
    found = measure_read(location("memory://measured"), [("a", 2 * MIB)])
    assert found.measured
    assert "2.0 MiB in" in found.detail
    assert "one request at a time" in found.detail


def test_writing_is_measured_beside_the_target_and_leaves_nothing(tmp_path: Path) -> None:
    found = measure_write(tmp_path / "not/yet/there")
    assert found.measured
    assert "32.0 MiB synced" in found.detail or " synced in 1" in found.detail
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_assumed() -> None:
    found = measure_write(Path("/proc/nobody/out"))
    assert not found.measured
    assert "/proc cannot be written" in found.detail


@pytest.mark.parametrize("casting", [False, True])
def test_checking_is_measured(casting: bool) -> None:
    found = measure_check(casting=casting)
    assert found.measured
    assert math.isfinite(found.bytes_per_second)
    assert ("rounding" in found.detail) is casting


def test_plans_that_change_types_are_known() -> None:
    plan = plan_of(4, 4)
    assert not estimate.has_casts(plan)
    (tensor,) = plan.index.tensors
    layout = dataclasses.replace(plan.layout, tensors=(dataclasses.replace(tensor, dtype="bfloat16"),), origins=(0,))
    assert estimate.has_casts(make_plan(plan.index, layout))


def test_requests_are_runs_and_runs_are_cut_into_tiles() -> None:
    plan = plan_of(1024, 1024)
    assert plan.tile_bytes == 4 * MIB
    # The source is one run of 4 MiB. The first half of the target lies by itself, the second has a gap after each row.
    assert count_requests(plan) == (1, 1 + 1024)
    assert count_requests(plan_of(2048, 1024))[0] == 2


def test_requests_of_nothing() -> None:
    plan = plan_of(1024, 1024)
    empty = np.zeros(0, dtype=np.int64)
    nothing = Plan(
        index=plan.index,
        layout=plan.layout,
        source_rows=(empty,),
        target_rows=(empty,),
        bytes_to_read=0,
        bytes_to_write=0,
        memory_bytes=MIB,
        num_threads=1,
    )
    assert count_requests(nothing) == (0, 0)
