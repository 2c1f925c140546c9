"""AutoTP in universal checkpoints, with shards of different widths: its layers cut what they load by themselves."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

TOLERANCE = 1e-6
RANK = Path(__file__).with_name("universal_rank.py")
RUN = {"model": "cut", "inner": 45, "one_group": True}
SOURCES = ("tp=2,dp=1,zero=1", "tp=2,dp=1,zero=3")
TARGETS = ("tp=2,dp=1,zero=2", "tp=2,dp=1,zero=3", "tp=1,dp=2,zero=1", "tp=1,dp=2,zero=3")


def test_every_degree_and_stage_goes_on_with_the_losses_of_the_uninterrupted_run(tmp_path):
    sources = {layout: tmp_path / "native" / layout / "step-00000002" for layout in SOURCES}
    whole = [
        {**RUN, "name": layout, "topology": layout, "steps": 5, "save_at": 2, "save": str(folder)}
        for layout, folder in sources.items()
    ]
    expected = launch(whole, RANK)
    folders = {layout: tmp_path / "universal" / layout / "step-00000002" for layout in SOURCES}
    for layout, folder in folders.items():
        topology = Topology.parse("tp=1,zero=1")
        wanted = Conversion(source=sources[layout], target=folder, topology=topology, target_format="universal")
        convert(wanted, RunOptions(reread=True, sync=False))
    for tp in ("tp=2", "tp=1"):  # AutoTP leaves groups of processes behind
        runs = [
            {**RUN, "name": f"{layout} -> {target}", "topology": target, "steps": 3, "load": str(folder)}
            for layout, folder in folders.items()
            for target in TARGETS
            if target.startswith(tp)
        ]
        for name, losses in launch(runs, RANK).items():
            assert losses == pytest.approx(expected[name.split(" -> ")[0]][2:], abs=TOLERANCE, rel=0), name
