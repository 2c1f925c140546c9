"""Topology: reading, writing, refusing, and the rank map."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import TopologyError
from reshard.topology import Topology

degrees = st.integers(1, 6)
topologies = st.builds(Topology, tp=degrees, pp=degrees, dp=degrees, zero=st.sampled_from([0, 1]))


@given(topologies)
def test_every_written_form_reads_back(topology: Topology) -> None:
    assert Topology.parse(str(topology)) == topology
    assert Topology.from_json(topology.to_json()) == topology
    assert Topology.from_dict(topology.to_dict()) == topology


@given(topologies)
def test_ranks_and_coordinates_are_a_bijection(topology: Topology) -> None:
    seen = {topology.coordinate(rank) for rank in range(topology.world_size)}
    assert len(seen) == topology.world_size
    for rank in range(topology.world_size):
        assert topology.rank(**topology.coordinate(rank)._asdict()) == rank


def test_tensor_neighbours_are_adjacent_ranks_as_in_deepspeed() -> None:
    topology = Topology(tp=2, pp=2, dp=2)
    assert [topology.coordinate(rank) for rank in range(4)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert topology.coordinate(4) == (1, 0, 0)


def test_ranks_of_one_replica_are_neighbours_as_in_deepspeed() -> None:
    assert [Topology(dp=6, cp=2).replica(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert Topology(dp=6, cp=2).num_replicas == 3
    assert [Topology(tp=2, dp=2, cp=2).replica(rank) for rank in range(4)] == [0, 0, 0, 0]
    assert [Topology(dp=3).replica(rank) for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no degree"),
        ("tp=2,tp=4", "given twice"),
        ("tp=two", "cannot read 'tp=two'"),
        ("xp=2", "there is no degree 'xp'.*tp, pp, dp, ep, cp, zero"),
        ("tp=0", "at least 1"),
        ("dp=99999999999999999999", "the degree of .* is too large"),
        ("zero=4", "ZeRO stage"),
        ("dp=4,ep=3", "not divisible by ep\\*cp"),
    ],
)
def test_an_impossible_topology_is_refused_with_its_reason(text: str, complaint: str) -> None:
    with pytest.raises(TopologyError, match=complaint):
        Topology.parse(text)


def test_only_formats_whose_framework_refuses_them_refuse_partitioned_pipelines() -> None:
    for text in ("pp=2,zero=2", "pp=2,zero=3"):
        with pytest.raises(TopologyError, match=f"zero={text[-1]} with pp=2: DeepSpeed refuses ZeRO-2 and ZeRO-3"):
            Topology.parse(text).refuse_partitioned_pipeline()
    for text in ("pp=2,zero=1", "dp=2,zero=3"):
        Topology.parse(text).refuse_partitioned_pipeline()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tp": 2, "size": 3}', '{"tp": "2"}', '{"tp": true, "dp": 0}'])
def test_an_unreadable_wire_form_is_refused(text: str) -> None:
    with pytest.raises(TopologyError):
        Topology.from_json(text)
