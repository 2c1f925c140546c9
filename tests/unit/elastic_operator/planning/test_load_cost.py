"""The estimate that decides whether a DCP commit is converted before it is loaded in another topology."""

from __future__ import annotations

import pytest

from elastic_operator.planning.load_cost import (
    CONVERSION_START_SECONDS,
    STORAGE_BYTES_PER_SECOND,
    count_chunks,
    estimate_load,
    read_amplification,
)
from reshard.topology import Topology

GB = 10**9


def read_chunks(num_saved: int, num_loaded: int) -> float:
    """Count what torch's reader reads of a tensor of `num_saved * num_loaded` rows: whole chunks, for every part."""
    rows = num_saved * num_loaded
    chunk, part = rows // num_saved, rows // num_loaded
    read = sum(
        chunk
        for at in range(num_loaded)
        for begin in range(0, rows, chunk)
        if begin < (at + 1) * part and begin + chunk > at * part
    )
    return read / rows


@pytest.mark.parametrize("num_saved", [1, 2, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("num_loaded", [1, 2, 3, 4, 6, 8, 48])
def test_the_closed_form_counts_whole_chunks(num_saved: int, num_loaded: int) -> None:
    assert read_amplification(num_saved, num_loaded) == pytest.approx(read_chunks(num_saved, num_loaded))


@pytest.mark.parametrize(
    ("topology", "chunks"),
    [("dp=4,zero=3", 4), ("tp=2,dp=4,zero=3", 8), ("tp=2,dp=4,zero=0", 2), ("pp=2,dp=4,zero=3", 4), ("pp=2", 1)],
)
def test_a_tensor_is_cut_by_the_ranks_of_its_pipeline_stage(topology: str, chunks: int) -> None:
    assert count_chunks(Topology.parse(topology)) == chunks


@pytest.mark.parametrize(
    ("num_bytes", "source", "target", "pays"),
    [
        (0, "dp=8,zero=3", "dp=64,zero=3", False),  # the size is not known
        (100 * GB, "dp=4,zero=3", "dp=3,zero=3", False),  # 1.5 times
        (100 * GB, "dp=2,zero=3", "dp=6,zero=3", False),  # 3 times: as much as the conversion moves
        (100 * GB, "dp=1,zero=3", "dp=4,zero=3", True),  # 4 times
        (5 * GB, "dp=1,zero=3", "dp=4,zero=3", False),  # the start of a pod takes longer
        (100 * GB, "dp=8,zero=3", "dp=64,zero=3", True),
        (100 * GB, "dp=64,zero=3", "dp=8,zero=3", False),
        (100 * GB, "dp=4,zero=3", "dp=8,zero=0", False),  # every replica reads everything, once
        (100 * GB, "dp=4,zero=3", "tp=3,dp=8,zero=0", True),  # every replica reads everything 1.5 times
        (100 * GB, "pp=2,dp=4,zero=3", "pp=4,dp=4,zero=3", False),
    ],
)
def test_a_conversion_pays_where_it_saves_more_than_it_moves(
    num_bytes: int, source: str, target: str, pays: bool
) -> None:
    found = estimate_load(num_bytes, Topology.parse(source), Topology.parse(target))
    assert found.is_conversion_faster is pays


def test_the_estimate_names_its_factors() -> None:
    found = estimate_load(100 * GB, Topology(dp=1, zero=3), Topology(dp=4, zero=3))
    assert str(found) == (
        "ranks read 4.00 times the bytes that they need, about 800 s for 100 GB, against about 610 s with a "
        "conversion first"
    )
    assert found.load_seconds == 4 * 100 * GB / STORAGE_BYTES_PER_SECOND
    assert found.convert_seconds == CONVERSION_START_SECONDS + 3 * 100 * GB / STORAGE_BYTES_PER_SECOND
    assert "size of the commit is not known" in str(estimate_load(0, Topology(), Topology(dp=2)))
