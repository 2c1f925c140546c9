"""A rank checks the files that it loads itself; together all ranks check every file once."""

from pathlib import Path

import pytest

from elastic_trainer.file_shares import share_of
from reshard.commits.commit import CommittedFile
from reshard.topology import Topology

GOLDEN = Path(__file__).parents[2] / "golden"


def shares(names, topology):
    files = [CommittedFile(path=name, num_bytes=1) for name in sorted(names)]
    return [
        [file.path for file in share_of(files, rank=rank, topology=topology)] for rank in range(topology.world_size)
    ]


@pytest.mark.parametrize(
    ("folder", "topology", "rank", "own"),
    [
        ("zero3-dp3", "dp=3,zero=3", 2, "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("zero2-dp4-cp2", "dp=4,cp=2,zero=2", 3, "zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ("pipeline-tp2-pp2", "tp=2,pp=2", 3, "zero_pp_rank_0_mp_rank_03_optim_states.pt"),
        ("pipeline-tp2-pp2", "tp=2,pp=2", 2, "mp_rank_02_model_states.pt"),
    ],
)
def test_a_rank_checks_its_own_files_of_deepspeed(folder, topology, rank, own):
    names = [path.name for path in (GOLDEN / "deepspeed-0.19.8" / folder / "step-00000002").iterdir()]
    found = shares(names, Topology.parse(topology))
    assert own in found[rank]
    assert sorted(name for share in found for name in share) == sorted(names)


def test_a_rank_checks_its_own_files_of_dcp_and_any_topology_checks_all():
    names = [".metadata", *(f"__{rank}_{part}.distcp" for rank in range(4) for part in range(2))]
    assert set(shares(names, Topology(dp=4))[3]) == {"__3_0.distcp", "__3_1.distcp"}
    for size in (1, 2, 3, 8):
        assert sorted(name for share in shares(names, Topology(dp=size)) for name in share) == sorted(names)


def test_names_that_say_nothing_are_spread_over_all_ranks():
    found = shares([f"model-{part:05d}.safetensors" for part in range(6)], Topology(dp=3))
    assert [len(share) for share in found] == [2, 2, 2]


def test_names_of_another_topology_are_checked_too():
    names = ["zero_pp_rank_7_mp_rank_09_optim_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert sorted(name for share in shares(names, Topology(dp=2)) for name in share) == sorted(names)
