"""Safetensors of torch's own writer, HuggingFaceStorageWriter: whole tensors are read, shards are refused."""

from importlib.util import find_spec

import pytest

from reshard.api import index_of
from reshard.errors import UnsupportedError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make setup"),
    pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors: make setup"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
SHAPES = {"embed.weight": (13, 8), "layers.0.weight": (6, 8), "layers.0.bias": (6,), "scale": ()}


def save(folder, **options):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), **options), no_dist=True)
    return folder


@pytest.mark.parametrize("files", [None, {name: 1 + (name == "scale") for name in SHAPES}])
def test_whole_tensors_are_read(tmp_path, files):
    index = index_of(save(tmp_path / "saved", fqn_to_index_mapping=files))
    assert {tensor.key.name: tensor.shape for tensor in index.tensors} == SHAPES
    assert len(index.files) == (1 if files is None else 2)


def test_put_together_by_torch_they_are_read_and_before_it_refused(tmp_path):
    whole = save(tmp_path / "saved", save_distributed=True, enable_consolidation=True)
    assert {tensor.key.name: tensor.shape for tensor in index_of(whole).tensors} == SHAPES
    with pytest.raises(UnsupportedError, match="holds shards of tensors"):
        index_of(whole / "sharded")
