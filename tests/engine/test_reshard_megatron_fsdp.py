"""Checkpoints of Megatron-FSDP (`fsdp_dtensor`) are read as DCP, with their optimizer, and loaded by it again."""

import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.execution.verify import read_digests
from reshard.tensors.layout import Index
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


@pytest.fixture(scope="module")
def index(runs) -> Index:
    return index_of(runs[0] / "saved")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_tensor_is_what_torch_reads(runs, index):
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(runs[0] / "saved")
    described = reader.read_metadata().state_dict_metadata
    truth = {key: torch.empty(entry.size) for key, entry in described.items() if hasattr(entry, "size")}
    load(truth, storage_reader=reader, no_dist=True)

    def key_of(state: str, name: str) -> str:
        return f"model.{name}" if state == "weight" else f"optimizer.state.module.{name}.{state}"

    assert {key_of(*key.split("/")): value for key, value in read_digests(index).items()} == {
        key: f"{zlib.crc32(value.view(torch.uint8).numpy()):08x}"
        for key, value in truth.items()
        if not key.endswith(".step")
    }
    assert len(truth) == 16 * 4


def test_options_and_steps_are_those_of_the_parameters(index):
    decayed, others = index.groups
    assert decayed.scalars == others.scalars == {"step": 2.0}
    assert (decayed.options["wd_mult"], others.options["wd_mult"]) == (1.0, 0.0)
    halves = {f"module.decoder.layers.0.mlp.linear_fc1.weight_{half}" for half in ("w", "v")}
    assert halves < set(decayed.names)
    assert {*decayed.names, *others.names} == {tensor.key.name for tensor in index.tensors}


def test_it_goes_on_in_megatron_fsdp_with_its_losses(runs):
    _, losses = runs
    assert losses["from saved"] == pytest.approx(losses["saved"][2:], abs=1e-6, rel=0)
    assert losses["from out"] == losses["from saved"]


@pytest.mark.soak_only
def test_it_goes_on_at_another_degree_as_megatron_fsdp_itself_goes_on(runs):
    root, _ = runs
    loads = [{"name": name, "topology": "dp=1", "seed": 5, "load": str(root / name)} for name in ("saved", "out")]
    losses = launch(loads, RANK)
    assert losses["out"] == losses["saved"]


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 6}


def run_with_experts(topology: str, names: list[str], root: Path) -> dict[str, list[float]]:
    """Go on from these folders at other degrees."""
    model = {**EXPERTS, "expert_model_parallel_size": Topology.parse(topology).ep}
    loads = [
        {"name": name, "topology": topology, "seed": 5, "load": str(root / name), "model": model} for name in names
    ]  # fmt: skip
    return launch(loads, RANK)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> tuple[Path, list[float]]:
    root = tmp_path_factory.mktemp("experts")
    model = {**EXPERTS, "expert_model_parallel_size": 2}
    saved = {"name": "saved", "topology": "dp=2,ep=2", "seed": 3, "save": str(root / "saved"), "model": model}
    losses = launch([saved], RANK)["saved"]
    report = convert(
        Conversion(source=root / "saved", target=root / "out", topology=Topology.parse("dp=3")), RunOptions(reread=True)
    )
    assert report.verified
    assert report.witness["not_witnessed"] == 0
    return root, losses


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("dp=2,ep=2", marks=pytest.mark.soak_only),
        "dp=2,ep=1",
        *(pytest.param(topology, marks=pytest.mark.soak_only) for topology in ("dp=1,ep=1", "dp=4,ep=2", "dp=4,ep=4")),
    ],
)
def test_experts_go_on_at_any_degree_as_megatron_fsdp_itself_goes_on(experts, topology):
    root, saved = experts
    losses = run_with_experts(topology, ["saved", "out"], root)
    assert losses["out"] == losses["saved"]
    assert losses["out"][0] == pytest.approx(saved[2], abs=1e-5, rel=0)
    if topology == "dp=2,ep=2":
        assert losses["out"] == pytest.approx(saved[2:], abs=1e-5, rel=0)
