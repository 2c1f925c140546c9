"""Descriptions of cut tensors and spread layers, from the client state or from COMMIT.json."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from reshard.api import reshard
from reshard.commits.commit import Commit, CommittedFile, read_commit, write_commit
from reshard.errors import UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.deepspeed.writing import carried_objects
from reshard.formats.pt.objects import Storage, Tensor
from reshard.formats.pt.reader import read
from reshard.topology import Topology
from tests.golden.files import MODEL, STEP, assemble, edit, golden

PIPELINE = {"num_layers": 5, "partition_method": "uniform", "parts": [0, 5], "tied": {"embed": [0, 4]}}


def strip(folder: Path, *keys: str) -> Path:
    """A copy's model files without some keys of the client state."""
    for path in folder.glob("*mp_rank_*_model_states.pt"):
        edit(folder, path.name, lambda value: [value.pop(key) for key in keys])
    return folder


def test_commit_describes_the_pipeline_where_the_files_do_not(tmp_path):
    folder = strip(Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source" / STEP)), "pipeline_layout")
    with pytest.raises(UnsupportedError, match="which layers each stage gets is not known"):
        reshard(folder, tmp_path / "refused" / STEP, Topology(pp=2))
    files = [CommittedFile(path=path.name, num_bytes=path.stat().st_size) for path in folder.glob("*.pt")]
    commit = Commit(
        format="deepspeed", step=2, samples=24, topology=Topology(dp=2), attempt=1, writer="trainer", files=files,
        model={"pipeline": PIPELINE},
    )  # fmt: skip
    write_commit(folder, commit)
    target = tmp_path / "target" / STEP
    reshard(folder, target, Topology(pp=2, tp=2))
    assert read_commit(target).model == {"pipeline": {**PIPELINE, "parts": [0, 3, 5]}}
    stages = [set(read(target / MODEL.format(2 * pp)).value["param_shapes"][0]) for pp in (0, 1)]
    assert "tied_modules.embed.weight" in stages[0] & stages[1]
    assert {name.partition(".")[0] for name in stages[0]} == {"tied_modules", "1", "2"}


def test_the_commit_has_the_stages_bounds_where_only_the_files_describe_the_pipeline(tmp_path):
    folder = golden("pipeline-dp2")
    assert read(folder / MODEL.format(0)).value["pipeline_layout"]["num_layers"] == 5
    assert not (folder / "COMMIT.json").exists()
    for topology, parts in ((Topology(pp=2), [0, 3, 5]), (Topology(dp=2), [0, 5])):
        target = tmp_path / str(topology) / STEP
        reshard(folder, target, topology)
        assert read_commit(target).model == {"pipeline": {**PIPELINE, "parts": parts}}
        note = read(target / MODEL.format(0)).value["pipeline_layout"]
        assert list(note["parts"]) == parts
    back = tmp_path / "back" / STEP  # the commit's description is one that can be read
    reshard(tmp_path / str(Topology(pp=2)) / STEP, back, Topology(dp=2))
    assert read_commit(back).model == {"pipeline": {**PIPELINE, "parts": [0, 5]}}


def test_one_tensor_named_many_times_is_not_multiplied_without_end(tmp_path, monkeypatch):
    """Views of one storage take no room in the source, and each takes its own in the target."""
    monkeypatch.setattr(carried_objects, "MAX_TOTAL_INLINE_BYTES", 64 << 10)
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    storage = Storage(dtype="float32", num_elements=1 << 12, location="cpu", data=bytes(4 << 12))
    view = Tensor(storage=storage, shape=(1 << 12,), stride=(1,), offset=0)
    edit(folder, MODEL.format(0), lambda value: value.update(views=[dataclasses.replace(view) for _ in range(3)]))
    assert reshard(folder, tmp_path / "few" / STEP, Topology(dp=2)).ok
    edit(folder, MODEL.format(0), lambda value: value.update(views=[dataclasses.replace(view) for _ in range(30)]))
    assert (folder / MODEL.format(0)).stat().st_size < 64 << 10
    with pytest.raises(UnsupportedError, match="take more than 65536 bytes"):
        reshard(folder, tmp_path / "many" / STEP, Topology(dp=2))


def test_tied_layers_must_be_told_before_a_pipeline_is_split(tmp_path):
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    untold = {**PIPELINE, "tied": None}
    edit(folder, MODEL.format(0), lambda value: value.update(pipeline_layout=untold))
    with pytest.raises(UnsupportedError, match=r"tied modules \['embed'\] stand"):
        reshard(folder, tmp_path / STEP, Topology(pp=2))


def test_layout_without_tensor_parallelism_needs_no_description(tmp_path):
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    strip(folder, "pipeline_layout", "universal_checkpoint_info")
    assert reshard(folder, tmp_path / STEP, Topology(dp=3)).ok
    with pytest.raises(UnsupportedError, match="nothing is said about how tensor parallelism cuts"):
        reshard(folder, tmp_path / "refused", Topology(tp=2))


def test_source_with_tensor_parallelism_and_no_description_is_refused(tmp_path):
    folder = Path(shutil.copytree(golden("pipeline-tp2-pp2"), tmp_path / "source"))
    strip(folder, "universal_checkpoint_info")
    with pytest.raises(UnsupportedError, match="says nothing about how tensors are cut"):
        read_checkpoint(folder, None)


def test_description_without_row_parallel_parameters_is_refused(tmp_path):
    """Megatron-DeepSpeed writes it at tp=1. A cut along dim 0 would fit in size, and the values would be wrong."""
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    key = "parameter_with_row_parallelism_patterns"
    edit(folder, MODEL.format(0), lambda value: value["universal_checkpoint_info"].update({key: []}))
    with pytest.raises(UnsupportedError, match="no row-parallel parameter"):
        reshard(folder, tmp_path / STEP, Topology(tp=2))


@pytest.mark.parametrize(("target", "rows"), [("tp=1", 14), ("tp=2", 16), ("tp=2,dp=2", 16)])
def test_vocabulary_is_padded_anew_with_zeros_where_its_multiple_is_told(tmp_path, target, rows):
    """13 true rows, padded to a multiple of 2 * tp."""
    folder = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source"))
    edit(folder, MODEL.format(0), lambda value: value["universal_checkpoint_info"].update(vocab_multiple=2))
    topology = Topology.parse(target)
    reshard(folder, tmp_path / STEP, topology)
    layer = "layer_00-model_{:02d}-model_states.pt"
    shards = []
    for tp in range(topology.tp):
        tensor = read(tmp_path / STEP / layer.format(tp)).value["weight"]
        data = (tmp_path / STEP / layer.format(tp)).read_bytes()[tensor.file_offset :][: 4 * tensor.num_elements]
        shards.append(np.frombuffer(data, np.uint32).reshape(tensor.shape))
    found = np.concatenate(shards)
    before = assemble(read_checkpoint(golden("pipeline-dp2"), None))
    assert found.shape == (rows, 8)
    assert (found[:13] == before["weight/tied_modules.embed.weight"]).all()
    padding = before["weight/tied_modules.embed.weight#padding"]
    assert (found[13:] == (padding if rows == 16 else 0)).all()
    after = assemble(read_checkpoint(tmp_path / STEP, None))  # the description is that of the new size
    assert (after["fp32/tied_modules.embed.weight"] == before["fp32/tied_modules.embed.weight"]).all()
    assert len(after["fp32/tied_modules.embed.weight#padding"]) == rows - 13


FLAT_INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": ["norm", "embed", "head", "scale", r"down\.bias"],
    "parameter_with_row_parallelism_patterns": [r"down\.weight"],
}


@pytest.mark.parametrize("target", ["tp=3,zero=2", "tp=3,dp=4"])
def test_model_without_pipeline_is_cut_for_tensor_parallelism(tmp_path, target):
    """No real run at tp > 1 stands behind this one: the description is added by hand, the shapes say what was cut."""
    folder = Path(shutil.copytree(golden("zero2-dp3"), tmp_path / "source"))
    edit(folder, MODEL.format(0), lambda value: value.update(universal_checkpoint_info=FLAT_INFO))
    there = tmp_path / "there" / STEP
    reshard(folder, there, Topology.parse(target))
    module = read(there / MODEL.format(2)).value["module"]
    shapes = {name: tensor.shape for name, tensor in module.items()}
    assert shapes["up.weight"] == (1, 7)
    assert shapes["down.weight"] == (7, 1)
    assert shapes["norm.weight"] == (3,)
    assert shapes["embed.weight"] == (13, 7)
    assert module["head.weight"].storage is module["embed.weight"].storage
    reshard(there, tmp_path / "back" / STEP, Topology.parse("dp=3,zero=2"))
    before = assemble(read_checkpoint(golden("zero2-dp3"), None))
    after = assemble(read_checkpoint(tmp_path / "back" / STEP, None))
    assert before.keys() == after.keys()
    assert all((value == after[key]).all() for key, value in before.items())


def test_buffer_that_no_pattern_names_is_refused_where_tensor_parallelism_changes(tmp_path):
    folder = Path(shutil.copytree(golden("zero2-dp3"), tmp_path / "source"))
    patterns = ["norm", "embed", "head", r"down\.bias"]
    info = {**FLAT_INFO, "tp_replicated_parameter_patterns": patterns}
    edit(folder, MODEL.format(0), lambda value: value.update(universal_checkpoint_info=info))
    with pytest.raises(UnsupportedError, match="cuts the buffers scale"):
        reshard(folder, tmp_path / "refused", Topology.parse("tp=3,zero=2"))
    assert reshard(folder, tmp_path / STEP, Topology.parse("dp=2,zero=2")).ok
