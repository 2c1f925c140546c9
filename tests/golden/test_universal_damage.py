"""Universal folders that lack something, mix two saves, or are damaged: each is refused by name, all at once."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from reshard.api import index_of
from reshard.errors import CorruptSourceError, NotACheckpointError, UnsafePickleError, UnsupportedError
from reshard.execution.verify import read_digests
from reshard.formats import format_of, read_checkpoint
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.formats.pt.objects import new_tensor as tensor
from tests.golden.files import STEP, any_name, edit, golden
from tests.golden.universal_files import converted, universal

PARAMETER = "zero/up.weight"
OPTIMIZER = "zero/optimizer_state.pt"
MODEL = "mp_rank_00_model_states.pt"
TWIN = f"zero_pp_rank_0_{MODEL}"


@pytest.fixture(params=["ours", "theirs"])
def folder(request, tmp_path) -> Path:
    """A sound folder of either maker, to be damaged."""
    if request.param == "ours":
        return universal(golden("zero2-dp3"), tmp_path / STEP)
    return Path(shutil.copytree(converted("zero2-dp3"), tmp_path / STEP))


def uncommitted(folder: Path) -> Path:
    (folder / "COMMIT.json").unlink(missing_ok=True)
    return folder


def refused(folder: Path, kind: type[Exception] = CorruptSourceError) -> str:
    with pytest.raises(kind) as caught:
        read_checkpoint(uncommitted(folder), None)
    assert type(caught.value) is kind
    return str(caught.value)


def float32(value: float):
    return tensor("float32", (), np.float32(value).tobytes())


@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq", "step"])
def test_missing_atom(folder, state):
    (folder / PARAMETER / f"{state}.pt").unlink()
    assert f"{PARAMETER}/{state}.pt is missing" in refused(folder)


def test_missing_parameter_and_missing_buffer_are_both_named_where_we_made_them(folder, request):
    shutil.rmtree(folder / "zero/norm.bias")
    shutil.rmtree(folder / "zero/scale")
    message = refused(folder)
    assert "zero/norm.bias/fp32.pt is missing" in message
    assert ("zero/scale/fp32.pt is missing" in message) is ("theirs" not in request.node.name)


def test_a_buffer_that_converters_before_0_19_make_no_atoms_of_is_in_the_model_file(folder, request):
    before = read_digests(read_checkpoint(folder, None))
    shutil.rmtree(folder / "zero/scale")
    if "theirs" in request.node.name:
        assert read_digests(read_checkpoint(folder, None)) == before
    else:
        assert "zero/scale/fp32.pt is missing" in refused(folder)


@pytest.mark.parametrize("length", [0, 3, 400, -1])
@pytest.mark.parametrize("state", ["fp32", "exp_avg", "step"])
def test_truncated_atom(folder, state, length):
    path = folder / PARAMETER / f"{state}.pt"
    path.write_bytes(path.read_bytes()[:length])
    assert f"{PARAMETER}/{state}.pt: " in refused(folder)


def test_step_of_another_save(folder):
    edit(folder / PARAMETER, "step.pt", lambda _: None)  # as it was
    read_checkpoint(uncommitted(folder), None)
    replace(folder / PARAMETER / "step.pt", float32(3))
    assert f"{PARAMETER}/step.pt is of another step than that of 2 others of group 0" in refused(folder)


def replace(path: Path, value) -> None:
    from reshard.formats.pt.writer import lay_out_pt

    with any_name():
        layout = lay_out_pt(path.stem, value)
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data
    path.write_bytes(content)


def test_folder_of_another_model(folder):
    shutil.copytree(folder / PARAMETER, folder / "zero/up2.weight")
    assert "zero/up2.weight belongs to no parameter that the model files know" in refused(folder)


@pytest.mark.parametrize("state", ["fp32", "exp_avg"])
def test_atom_of_another_shape(folder, state):
    shutil.copy(folder / "zero/embed.weight" / f"{state}.pt", folder / PARAMETER)
    assert f"{PARAMETER}/{state}.pt: has the shape [13, 7], " in refused(folder)


def test_everything_wrong_is_said_at_once(folder):
    (folder / "zero/down.bias/exp_avg.pt").unlink()
    shutil.copy(folder / "zero/embed.weight/fp32.pt", folder / PARAMETER)
    replace(folder / "zero/norm.bias/step.pt", float32(9))
    message = refused(folder)
    assert "3 things are wrong with its atoms" in message
    assert all(name in message for name in ("down.bias/exp_avg.pt", "up.weight/fp32.pt", "norm.bias/step.pt"))


def test_flipped_bit_in_a_tensor(folder):
    index = read_checkpoint(uncommitted(folder), None)
    number = next(at for at, file in enumerate(index.files) if file.path == f"{PARAMETER}/exp_avg.pt")
    (row,) = np.flatnonzero(index.shards.file == number)
    path = folder / index.files[number].path
    content = bytearray(path.read_bytes())
    content[int(index.shards.byte_offset[row]) + 5] ^= 4
    path.write_bytes(content)
    with pytest.raises(CorruptSourceError, match=r"up\.weight/exp_avg\.pt: bytes .* have CRC-32"):
        read_digests(read_checkpoint(folder, None))


def test_atom_with_a_key_of_a_newer_version(folder):
    edit(folder / PARAMETER, "fp32.pt", lambda value: value.update(rotated_by=90))
    message = refused(folder, UnsupportedError)
    assert "rotated_by" in message
    assert "up.weight/fp32.pt" in message


@pytest.mark.parametrize("value", [[1, 2], {"param": 3}, {"weights": None}])
def test_file_that_is_no_atom(folder, value):
    replace(folder / PARAMETER / "fp32.pt", value)
    assert f"{PARAMETER}/fp32.pt: is " in refused(folder, UnsupportedError)


def test_hint_of_another_type(folder):
    edit(folder / PARAMETER, "fp32.pt", lambda value: value.update(cat_dim="0"))
    assert f"{PARAMETER}/fp32.pt: says " in refused(folder, UnsupportedError)


def test_sub_param_shape_of_another_class(folder):
    shape = Inert("new", Global("argparse", "Namespace"), (), {})
    edit(folder / PARAMETER, "fp32.pt", lambda value: value.update(sub_param_shape=shape))
    assert f"{PARAMETER}/fp32.pt: says " in refused(folder, UnsupportedError)


def test_hostile_pickle_is_not_run(folder, tmp_path):
    mark = tmp_path / "executed"
    command = Inert("reduce", Global("posix", "system"), (f"touch {mark}",))
    replace(folder / PARAMETER / "fp32.pt", {"param": command})
    assert "posix" in refused(folder, UnsafePickleError)
    assert not mark.exists()


def test_model_file_is_missing(folder):
    for name in (MODEL, TWIN):
        (folder / name).unlink(missing_ok=True)
    assert "has neither mp_rank_00_model_states.pt nor" in refused(folder)


def test_optimizer_file_is_missing(folder):
    (folder / OPTIMIZER).unlink()
    assert format_of("universal").sniff(folder) == f"no file {OPTIMIZER}"
    shutil.rmtree(folder)
    assert format_of("universal").sniff(folder) == "not a folder"
    with pytest.raises(NotACheckpointError, match=f"universal: no file {OPTIMIZER}"):
        index_of(folder.parent)


def test_model_file_of_another_step(tmp_path):
    folder = universal(golden("zero2-dp3"), tmp_path / STEP)
    edit(folder, TWIN, lambda value: value.update(global_steps=3))
    assert f"{TWIN}: another global_steps than the 2 of {MODEL}" in refused(folder)


def test_model_file_of_a_rank_is_missing(tmp_path):
    folder = Path(shutil.copytree(converted("pipeline-tp2-pp2"), tmp_path / STEP))
    (folder / "mp_rank_02_model_states.pt").unlink()
    assert "model files of the ranks [0, 1, 3], expected 4" in refused(folder)


def test_ranks_of_one_stage_with_other_names(tmp_path):
    folder = Path(shutil.copytree(converted("pipeline-tp2-pp2"), tmp_path / STEP))
    edit(folder, "mp_rank_01_model_states.pt", lambda value: value["param_shapes"][0].pop("1.qkv"))
    assert "tensor-parallel ranks hold parameters of different names" in refused(folder)


def test_optimizer_with_other_groups_than_the_model_file(folder):
    edit(folder / "zero", "optimizer_state.pt", lambda value: value["param_groups"].pop())
    assert "cannot tell which parameter groups a pipeline stage holds" in refused(folder, UnsupportedError)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (MODEL, {"param_shapes": None}, "has no list param_shapes"),
        (MODEL, {"global_steps": "2"}, "no global_steps"),
        (OPTIMIZER, {"param_groups": None}, "has no list param_groups"),
        (OPTIMIZER, {"reshard_topology": {"tp": 0}}, "its reshard_topology is"),
    ],
)
def test_files_without_what_they_must_say(folder, name, change, expected):
    path = folder / name
    edit(path.parent, path.name, lambda value: value.update(change))
    assert expected in refused(folder, UnsupportedError)


def test_name_that_leads_out_of_the_folder(folder):
    edit(folder, MODEL, lambda value: value["param_shapes"][0].update({"../../escape": Size((2,))}))
    assert "'../../escape'" in refused(folder, UnsupportedError)


def test_frozen_parameters_of_zero3_are_not_lost_silently(tmp_path):
    folder = Path(shutil.copytree(converted("zero3-dp3"), tmp_path / STEP))
    edit(folder, TWIN, lambda value: value.update(frozen_param_shapes={"adapter": Size((2,))}))
    assert "1 frozen parameters, such as adapter, have neither atoms nor pieces" in refused(folder, UnsupportedError)


def test_buffers_of_tensor_parallel_ranks_are_not_taken_for_whole_ones(tmp_path):
    folder = Path(shutil.copytree(converted("pipeline-tp2-pp2"), tmp_path / STEP))
    for rank in range(4):
        name = f"mp_rank_{rank:02d}_model_states.pt"
        edit(folder, name, lambda value: value.update(module={"scale": tensor("float32", (1,), bytes(4))}))
    (folder / "zero/scale").mkdir()
    replace(folder / "zero/scale/fp32.pt", {"param": tensor("float32", (1,), bytes(4))})
    assert "keeps only the shard of the first" in refused(folder, UnsupportedError)
