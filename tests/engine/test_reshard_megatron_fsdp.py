"""Weights that Megatron-FSDP saved (`fsdp_dtensor`) are read as DCP, and load back in Megatron-FSDP."""

import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.execution.verify import read_digests
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core"),
]

RANK = Path(__file__).with_name("megatron_fsdp_rank.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("fsdp")
    saved = {"name": "saved", "topology": "dp=2", "seed": 3, "save": str(root / "saved")}
    losses = launch([saved], RANK)
    wanted = Conversion(source=root / "saved", target=root / "out", topology=Topology.parse("dp=3"))
    report = convert(wanted, RunOptions(reread=True))
    assert report.verified
    assert report.witness["not_witnessed"] == 0
    loads = [
        {"name": name, "topology": "dp=2", "seed": 5, "load": str(root / name)} for name in ("saved", "out")
    ]  # fmt: skip
    for run in loads:
        run["name"] = f"from {run['name']}"
    return root, losses | launch(loads, RANK)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_weight_is_what_torch_reads(runs):
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(runs[0] / "saved")
    described = reader.read_metadata().state_dict_metadata
    truth = {key: torch.empty(entry.size) for key, entry in described.items()}
    load(truth, storage_reader=reader, no_dist=True)
    assert {
        f"model.{key.removeprefix('weight/')}": value
        for key, value in read_digests(index_of(runs[0] / "saved")).items()
    } == {key: f"{zlib.crc32(value.view(torch.uint8).numpy()):08x}" for key, value in truth.items()}
    assert len(truth) == 14


def test_it_loads_in_megatron_fsdp_like_its_own(runs):
    _, losses = runs
    assert losses["from saved"] == pytest.approx(losses["saved"][2:], abs=1e-6, rel=0)
    assert losses["from out"] == losses["from saved"]
