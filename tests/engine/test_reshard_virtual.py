"""Real DeepSpeed goes on from a virtual commit exactly as from a converted checkpoint: equal losses to the last bit."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic_trainer.virtual import find_damage
from reshard.api import Conversion, reshard
from reshard.checksums.crc import CrcRange
from reshard.topology import Topology
from reshard.virtual.conversion import prepare
from reshard.virtual.manifest import decode
from tests.engine.reshard_run import launch
from tests.randomness import some

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

CASES = {
    "pipeline-tp-pp-to-dp": ("pipeline", "tp=2,pp=2,dp=1,zero=1", "tp=1,pp=1,dp=3,zero=1", [0, 2]),
    "pipeline-dp-to-tp-across-nodes": ("pipeline", "tp=1,pp=1,dp=2,zero=1", "tp=2,pp=1,dp=1,zero=1", [0, 1]),
    "zero3-4-to-3": ("flat", "dp=4,zero=3", "dp=3,zero=3", [0, 2]),
}


@pytest.mark.parametrize("case", some(CASES, every=2))
def test_losses_are_those_of_the_converted_checkpoint(case, tmp_path):
    model, source, target, nodes = CASES[case]
    wanted, step = Topology.parse(target), "step-00000002"
    common = {"name": "source", "model": model, "topology": source, "steps": 5, "save_at": 2}
    uninterrupted = launch([{**common, "save": str(tmp_path / "source" / step)}])["source"]
    reshard(tmp_path / "source" / step, tmp_path / "materialized" / step, wanted)
    prepare(Conversion(source=tmp_path / "source" / step, target=tmp_path / "virtual" / step, topology=wanted))
    # Two nodes: none holds all files, and ranks of one node share what one of them made.
    run = {"model": model, "topology": target, "steps": 3}
    virtual = {"virtual": str(tmp_path / "virtual" / step), "nodes": nodes, "scratch": str(tmp_path)}
    losses = launch(
        [
            {**run, "name": "materialized", "load": str(tmp_path / "materialized" / step)},
            {**run, "name": "virtual", **virtual},
        ],
        Path(__file__).with_name("virtual_rank.py"),
    )
    assert losses["virtual"] == losses["materialized"]
    assert losses["virtual"] == pytest.approx(uninterrupted[2:], abs=1e-6)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("node*/loaded-by-*.json"))]
    assert len(told) == 2  # one maker for each node
    assert all(node["read"] == node["needed"] > 0 for node in told)
    read = [{int(file): [CrcRange(*piece) for piece in own] for file, own in node["ranges"].items()} for node in told]
    assert find_damage(decode(tmp_path / "virtual" / step), read) == []
    assert not list(tmp_path.glob("node*/elastic-trainer-*/*"))  # memory is free again
