"""The bytes that a rank needs, to which the benchmark of virtual mode compares."""

import pytest

from benchmarks.measure import Measurement
from benchmarks.virtual import Load, Way, compared, needs_of, together
from reshard.api import Conversion
from reshard.topology import Topology
from reshard.virtual.conversion import prepare
from reshard.virtual.load import load_files
from reshard.virtual.manifest import decode
from tests.golden.files import golden


def test_what_a_rank_needs_is_what_a_node_of_this_rank_alone_reads(tmp_path):
    target = Topology.parse("tp=1,pp=1,dp=3")
    prepare(Conversion(source=golden("pipeline-tp2-pp2"), target=tmp_path / "virtual", topology=target))
    read = []
    for rank in range(target.world_size):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        read.append(load_files(decode(tmp_path / "virtual"), [rank], folder).bytes_read)
    assert needs_of(tmp_path / "virtual") == read


def way(how, first=1.5, second=2.5):
    return Way(
        name=f"{how} way",
        how=how,
        prepared=[Measurement(seconds=2.0, bytes_read=0, bytes_written=0, peak_rss_bytes=0)],
        loads=[
            Load(seconds=1.0, processor_seconds=0.5, from_storage=300, from_memory=100, from_disk=40, weights=first),
            Load(seconds=4.0, processor_seconds=0.7, from_storage=300, from_memory=0, from_disk=10, weights=second),
        ],
    )


def test_bytes_are_multiples_of_what_all_ranks_need_and_seconds_those_of_the_slowest():
    row = together(way("native"), needs=[100, 100], source_bytes=50)
    assert row == "| native way | 3.00 x | 0.50 x | 1.00 x | 2.0 | 4.0 | 6.0 | 1.2 |"


def test_ranks_that_hold_something_else_are_an_error_of_ours_and_told_of_deepspeeds_converter():
    assert compared([way("virtual"), way("native"), way("universal")]).startswith("All ranks hold the same")
    told = compared([way("virtual"), way("native"), way("universal", second=2.0)])
    assert told == "universal way: other weights or moments in ranks [1].\n"
    with pytest.raises(RuntimeError, match=r"native way: ranks \[0\] hold other weights"):
        compared([way("virtual"), way("native", first=0.0), way("universal")])
