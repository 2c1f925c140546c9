"""Native checkpoints from a universal folder alone: what the folder does not say in atoms, its other files do."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.commits.commit import read_commit
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.pt.objects import StatefulDict
from reshard.formats.universal.names import MADE_FOR, MODEL_FILES, OPTIMIZER_FILE, WEIGHTS, ZERO
from reshard.topology import Topology
from tests.golden.files import MODEL, PATTERNS, STEP, assemble, edit, golden
from tests.golden.universal_files import converted, universal, value_of
from tests.randomness import some

NATIVE = {
    "pipeline-tp2-pp2": ("tp=2,pp=2", "dp=3"),
    "pipeline-dp2": ("tp=2,pp=2", "dp=3,zero=0"),
    "zero2-dp3": ("dp=2,zero=0", "dp=2,zero=1", "dp=3,zero=2", "dp=2,zero=3"),
    "zero3-dp3": ("dp=2,zero=0", "dp=2,zero=1", "dp=2,zero=3"),
    "zero2-dp3-round-robin": ("dp=2,zero=2",),
    "bf16-dp2": ("dp=3,zero=0", "dp=3,zero=1", "dp=2,zero=3"),
    "bf16-optimizer-dp2": ("dp=3,zero=0", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3"),
    "zero0-dp2": ("zero=0", "dp=2,zero=1"),
    "zero0-bf16-dp2": ("dp=3,zero=0", "dp=3,zero=1"),
    "experts-dp4-ep2": ("dp=4,ep=2", "dp=2,zero=2"),
    "experts-pp2-dp2-ep2": ("pp=2,dp=2,ep=2", "pp=3,dp=1", "dp=2"),
    "autoep-dp2-ep2": ("dp=4,ep=2", "dp=2,zero=2"),
}
PAIRS = [(name, topology) for name, topologies in NATIVE.items() for topology in topologies]


def native(source: Path, target: Path, topology: str) -> Path:
    wanted = Conversion(source=source, target=target, topology=Topology.parse(topology), target_format="deepspeed")
    convert(wanted, RunOptions(reread=True, sync=False))
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.pt")}


@pytest.mark.parametrize(("name", "topology"), some(PAIRS, every=3))
def test_a_folder_of_ours_becomes_the_files_that_the_native_checkpoint_becomes(tmp_path, name, topology):
    """Not one byte is lost on the way: attributes, random states, types, order, padding rows."""
    layout = "tp=2,zero=1" if "pipeline" in name else "zero=1"
    over = native(universal(golden(name), tmp_path / "universal" / STEP, layout), tmp_path / "over" / STEP, topology)
    direct = native(golden(name), tmp_path / "direct" / STEP, topology)
    assert contents(over) == contents(direct)


@pytest.mark.parametrize(
    ("topology", "name"),
    some(
        itertools.product(["dp=2,zero=0", "dp=2,zero=1", "dp=3,zero=2", "dp=2,zero=3"], ["zero2-dp3", "zero3-dp3"]),
        every=3,
    ),
)
def test_a_folder_of_deepspeeds_converter_becomes_the_same_files(tmp_path, name, topology):
    over, direct = (
        native(path, tmp_path / str(at), topology) for at, path in enumerate((converted(name), golden(name)))
    )
    assert contents(over) == contents(direct)


@pytest.mark.parametrize("topology", ["dp=2,ep=2", "dp=4,ep=4", "dp=3,zero=2"])
def test_stacks_of_experts_of_deepspeeds_converter_become_a_file_for_each_expert(tmp_path, topology):
    over = native(converted("autoep-dp2-ep2"), tmp_path / "over", topology)
    direct = native(golden("autoep-dp2-ep2"), tmp_path / "direct", topology)
    assert contents(over).keys() == contents(direct).keys()
    assert len(list(over.glob("*expert*"))) == 8
    for path in contents(over):
        found, expected = value_of(over / path), value_of(direct / path)
        if path == MODEL.format(0):  # the converter writes a pattern of its own into it
            told = found["universal_checkpoint_info"]
            expected["universal_checkpoint_info"]["expert_parameter_patterns"] = told["expert_parameter_patterns"]
        assert found == expected, path
    assert read_commit(over).digests == read_commit(direct).digests


def test_native_experts_of_deepspeeds_converter_are_refused(tmp_path):
    """Its folders name neither the layers of experts nor their files; without the keys of ours, so do these."""
    folder = universal(golden("experts-dp4-ep2"), tmp_path / STEP, "zero=1")
    (folder / "COMMIT.json").unlink()
    edit(folder / ZERO, Path(OPTIMIZER_FILE).name, lambda value: [value.pop(key) for key in (MADE_FOR, WEIGHTS)])
    for name in MODEL_FILES:
        edit(folder, name, lambda value: value.update(module=StatefulDict()))
    with pytest.raises(UnsupportedError, match="which layers of experts"):
        native(folder, tmp_path / "native", "dp=2")


@pytest.mark.parametrize("topology", ["tp=2,pp=2", "dp=3"])
def test_a_pipeline_of_deepspeeds_converter_gets_files_for_its_layers_again(tmp_path, topology):
    """The converter strips padding rows and drops the files of layers: the loss layer gets one that nobody reads."""
    name = "pipeline-tp2-pp2"
    over, direct = (
        native(path, tmp_path / str(at), topology) for at, path in enumerate((converted(name), golden(name)))
    )
    files, expected = contents(over), contents(direct)
    assert {path.partition("-")[0] for path in files.keys() - expected.keys()} == {"layer_04"}
    assert expected.keys() <= files.keys()
    for path in (path for path in expected if path.startswith("mp_rank")):
        assert value_of(over / path) == value_of(direct / path)
    found, wanted = assemble(index_of(over)), assemble(index_of(direct))
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        assert (value == (0 * value if key.endswith("#padding") else wanted[key])).all(), key


def test_like_may_name_a_universal_folder(tmp_path):
    wanted = Conversion(
        source=golden("zero3-dp3"),
        target=tmp_path / "like",
        topology=Topology.parse("dp=2,zero=1"),
        target_format="deepspeed",
        like=converted("zero2-dp3"),
    )
    convert(wanted, RunOptions(reread=True, sync=False))
    found, expected = assemble(index_of(wanted.target)), assemble(index_of(golden("zero3-dp3")))
    assert {key for key in found if not key.startswith("weight/")} <= expected.keys()
    assert all((value == expected[key]).all() for key, value in found.items() if key in expected)


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (lambda value: value.pop("pipeline_layout"), "how many layers the pipeline has"),
        (lambda value: value["pipeline_layout"].pop("tied"), "at which layers the tied modules stand"),
        (lambda value: value.update(buffer_names=["1.rope"]), "1 buffers of the pipeline, such as 1.rope, are in none"),
    ],
)
def test_what_a_pipeline_does_not_say_is_refused_by_name(tmp_path, change, lacks):
    folder = Path(shutil.copytree(converted("pipeline-tp2-pp2"), tmp_path / STEP))
    for rank in range(4):
        edit(folder, f"mp_rank_{rank:02d}_model_states.pt", change)
    with pytest.raises(UnsupportedError, match=lacks):
        native(folder, tmp_path / "native", "dp=2")


def test_layers_need_no_commit(tmp_path):
    """Folders of ours say which layers there are in a file of their own."""
    folder = universal(golden("pipeline-dp2"), tmp_path / STEP)
    expected = contents(native(folder, tmp_path / "first", "dp=3"))
    (folder / "COMMIT.json").unlink()
    assert contents(native(folder, tmp_path / "second", "dp=3")) == expected


@pytest.mark.parametrize("target_format", ["deepspeed", "universal"])
def test_a_file_of_patterns_says_what_a_folder_does_not(tmp_path, target_format):
    """Told of a folder it has the same result as told of the native checkpoint that the folder was made of."""
    source = Path(shutil.copytree(golden("pipeline-dp2"), tmp_path / "source" / STEP))
    edit(source, "mp_rank_00_model_states.pt", lambda value: value.pop("universal_checkpoint_info"))
    (tmp_path / "patterns.yaml").write_text(PATTERNS)
    wanted = Conversion(
        source=universal(source, tmp_path / "universal" / STEP),
        target=tmp_path / "over",
        topology=Topology.parse("tp=2,pp=2" if target_format == "deepspeed" else "tp=2"),
        target_format=target_format,
    )
    with pytest.raises(UnsupportedError, match=r"(?s)how tensor parallelism cuts .*--patterns"):
        convert(wanted, RunOptions(sync=False))
    wanted = dataclasses.replace(wanted, patterns=tmp_path / "patterns.yaml")
    convert(wanted, RunOptions(reread=True, sync=False))
    direct = dataclasses.replace(wanted, source=source, target=tmp_path / "direct")
    convert(direct, RunOptions(reread=True, sync=False))
    found, expected = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.pt")}
        for folder in (wanted.target, direct.target)
    )
    assert found == expected


@pytest.mark.parametrize(
    "value",
    [
        {"dtypes": {"a": "float7"}, "layers": None, "experts": [], "attributes": {}, "model_axis": False},
        {"dtypes": {}, "layers": {0: ["a"]}, "experts": [], "attributes": {}, "model_axis": False},
        {"dtypes": {}, "layers": None, "experts": [["a", 0, []]], "attributes": {}, "model_axis": False},
        {"dtypes": 3},
        7,
    ],
)
def test_a_list_of_weights_that_nobody_wrote_is_said_to_be_that(tmp_path, value):
    folder = universal(golden("zero2-dp3"), tmp_path / STEP)
    (folder / "COMMIT.json").unlink()
    edit(folder / "zero", "optimizer_state.pt", lambda found: found.update(reshard_weights=value))
    with pytest.raises(CorruptSourceError, match="its list of weights"):
        index_of(folder)


def test_a_folder_of_an_earlier_version_is_to_be_converted_again(tmp_path):
    folder = universal(golden("bf16-dp2"), tmp_path / STEP)
    (folder / "COMMIT.json").unlink()
    edit(folder / "zero", "optimizer_state.pt", lambda found: found.pop("reshard_weights"))
    with pytest.raises(UnsupportedError, match="does not say of which types the weights are"):
        native(folder, tmp_path / "native", "dp=2")


def test_atoms_that_deepspeed_mixed_up_are_refused(tmp_path):
    """Its converter goes by positions that round-robin partitions have not, and nobody notices."""
    folder = Path(shutil.copytree(converted("zero2-dp3"), tmp_path / STEP))
    change = {"round_robin_gradients": True}
    edit(folder, "mp_rank_00_model_states.pt", lambda value: value["ds_config"]["zero_optimization"].update(change))
    with pytest.raises(UnsupportedError, match="round_robin_gradients"):
        index_of(folder)
