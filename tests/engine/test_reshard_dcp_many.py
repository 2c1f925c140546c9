"""Unmodified torch loads what was cut for hundreds of ranks."""

from importlib.util import find_spec

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.topology import Topology

pytestmark = [pytest.mark.engine, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make setup")]
WORLD = 300


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_weights_cut_for_hundreds_of_ranks_load_with_the_values_that_torch_saved(tmp_path):
    import torch
    from torch.distributed import checkpoint

    torch.manual_seed(5)
    shapes = {"even": (2 * WORLD, 3), "uneven": (5 * WORLD - 7, 2), "few": (WORLD - 1,), "one": ()}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    checkpoint.save({"model": weights}, checkpoint_id=tmp_path / "saved", no_dist=True)
    topology = Topology(dp=WORLD, zero=3)
    convert(Conversion(source=tmp_path / "saved", target=tmp_path / "cut", topology=topology), RunOptions(sync=False))
    metadata = checkpoint.FileSystemReader(tmp_path / "cut").read_metadata()
    found = {key: len(value.chunks) for key, value in metadata.state_dict_metadata.items()}
    assert found == {"model.even": 300, "model.uneven": 299, "model.few": 299, "model.one": 1}
    loaded = {"model": {name: torch.zeros(shape) for name, shape in shapes.items()}}
    checkpoint.load(loaded, checkpoint_id=tmp_path / "cut", no_dist=True)
    assert all(torch.equal(loaded["model"][name], value) for name, value in weights.items())
