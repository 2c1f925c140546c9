"""Numbers in files, in names of files and on command lines that promise more than there is: an error, at once."""

import json
import pickletools
import shutil
import struct
from pathlib import Path

import pytest

from reshard.api import index_of, plan_of
from reshard.cli.main import main
from reshard.commits.commit import read_commit
from reshard.contract import ExitCode
from reshard.errors import CorruptSourceError, ReshardError, TopologyError, UnsupportedError
from reshard.formats.deepspeed import pipeline
from reshard.formats.deepspeed.tensor_parallel import patterns
from reshard.formats.megatron.names import split_layers
from reshard.topology import MOST_RANKS, Topology
from tests.fuzz.guard import outcome_of
from tests.fuzz.mutate import pickle_ops, replace_pickle
from tests.fuzz.targets import GOLDEN, STEP, pickle_of
from tests.golden.files import edit, golden
from tests.golden.test_hostile_files import committed
from tests.golden.test_hostile_pickles import ENTRIES, START, build, tensor

MODEL = "mp_rank_00_model_states.pt"
HUGE = b"\x8a\x05" + (10**9).to_bytes(5, "little")


def changed(path: Path, values: dict[str, bytes]) -> None:
    """Another number behind each of these keys."""
    old = pickle_of(path)
    ops = pickle_ops(old)
    for key, number in values.items():
        at = next(at for at, item in enumerate(ops) if item[:1] in b"X\x8c" and item.endswith(key.encode()))
        at += 1
        while ops[at][:1] in b"qr\x94":
            at += 1
        assert ops[at][:1] in b"KMJ", ops[at]
        ops[at] = number
    new = b"".join(ops)
    assert list(pickletools.genops(new))
    path.write_bytes(replace_pickle(path.read_bytes(), old, new))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"dp_world_size": HUGE}, "are 1000000000 ranks, at most 1048576"),
        ({"dp_world_size": b"J\x00\x00\x10\x00"}, "zero_pp_rank_10_mp_rank_00_optim_states.pt is missing"),
        ({"dp_world_size": HUGE, "tp_degree": HUGE}, "are 1000000000 ranks"),
        ({"mp_world_size": HUGE, "tp_degree": HUGE}, "are 3000000000 ranks"),
        ({"mp_world_size": HUGE, "pp_degree": HUGE}, "3000000000 ranks|ZeRO-3 with a pipeline"),
    ],
)
def test_degrees_that_a_file_states_are_not_enumerated(values, told, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / f"deepspeed-0.19.8/zero2-dp3/{STEP}", tmp_path / "s"))
    changed(folder / MODEL, values)
    error = outcome_of(lambda: index_of(folder))
    assert isinstance(error, CorruptSourceError if "missing" in told else UnsupportedError)
    with pytest.raises(ReshardError, match=told):
        raise error
    assert len(error.problems) <= 50


def test_model_files_of_a_universal_checkpoint_that_are_promised_are_not_enumerated(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / f"universal-0.19.8/zero2-dp3/{STEP}", tmp_path / "s"))
    for path in folder.glob("*_model_states.pt"):
        changed(path, {"mp_world_size": HUGE})
    error = outcome_of(lambda: index_of(folder))
    assert isinstance(error, CorruptSourceError)
    assert "model files of the ranks [0], expected 1000000000" in str(error)


def test_the_number_of_an_expert_in_a_name_is_no_number_of_files(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / f"deepspeed-0.19.8/experts-dp4-ep2/{STEP}", tmp_path / "s"))
    expert = next(folder.glob("layer_0_expert_0_*"))
    shutil.copy(expert, folder / expert.name.replace("expert_0", "expert_999999999"))
    error = outcome_of(lambda: index_of(folder))
    assert isinstance(error, CorruptSourceError)
    assert "is missing" in str(error) and len(error.problems) <= 50


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("count", ["999999999999", "9" * 200, "9" * 5000])
def test_the_number_of_files_in_a_name_is_not_counted_up_to(count, listed, tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    name = f"model-1-of-{count}.safetensors"
    if len(name) < 255:
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    if listed:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    outcome = outcome_of(lambda: index_of(tmp_path))
    if not listed and len(count) == 12:
        assert f"of {count} files number 2, 3, 4" in str(outcome)
    else:
        assert not isinstance(outcome, ReshardError) or isinstance(outcome, CorruptSourceError | ReshardError)


def test_layers_without_chunks_are_not_named():
    class Entry:
        key, shape = "layers.w", (10**12, 4)

    class Chunks:
        size = __import__("numpy").ones((3, 2), dtype=int)

    with pytest.raises(CorruptSourceError, match="3 chunks cannot hold 1000000000000 layers"):
        split_layers(Entry, "decoder.layers.mlp.w", Chunks, "here")


@pytest.mark.parametrize("field", ["topology", "model"])
def test_a_marker_that_promises_too_much_is_refused(field, tmp_path):
    folder = committed(Path(shutil.copytree(GOLDEN / f"deepspeed-0.19.8/pipeline-dp2/{STEP}", tmp_path / "s")))
    marker = folder / "COMMIT.json"
    value = json.loads(marker.read_text())
    value.pop("checksum", None)
    if field == "topology":
        value["topology"]["dp"] = 10**9
    else:
        value["model"] = {"pipeline": {"num_layers": 10**9}}
    marker.write_text(json.dumps(value))
    target = tmp_path / "out"
    code = outcome_of(lambda: main(["plan", str(folder), str(target), "--to", "pp=2", "--no-measure"]))
    assert code in (ExitCode.SOURCE_INVALID, ExitCode.UNSUPPORTED)


def test_a_source_in_a_marker_that_is_no_path_is_refused(tmp_path):
    folder = committed(Path(shutil.copytree(GOLDEN / f"deepspeed-0.19.8/pipeline-dp2/{STEP}", tmp_path / "s")))
    value = json.loads((folder / "COMMIT.json").read_text())
    value.pop("checksum", None)
    (folder / "COMMIT.json").write_text(json.dumps({**value, "source": "\0"}))
    with pytest.raises(CorruptSourceError, match="zero byte"):
        read_commit(folder)


@pytest.mark.parametrize(
    "text", ["dp=100000000", "tp=1000000000", "dp=2000,tp=2000", f"dp={MOST_RANKS + 1}", "dp=" + "9" * 5000]
)
def test_more_ranks_than_are_planned_are_refused_on_the_command_line(text, capsys):
    source = str(GOLDEN / f"deepspeed-0.19.8/zero2-dp3/{STEP}")
    assert outcome_of(lambda: main(["plan", source, "--to", text])) == ExitCode.USAGE
    assert len(capsys.readouterr().err) < 12_000
    with pytest.raises(TopologyError):
        Topology.parse(text)


def test_a_million_ranks_are_a_topology():
    assert Topology.parse("dp=1000000").world_size == 1_000_000
    assert Topology(pp=16, dp=8192, tp=8).world_size == MOST_RANKS


@pytest.mark.parametrize(
    "option",
    ["--worker=0/" + "9" * 5000, "--attempt=" + "9" * 30, "--memory=" + "9" * 5000, "--limit-rate=" + "9" * 100],
)
def test_numbers_of_any_length_are_refused_on_the_command_line(option, tmp_path, capsys):
    source = str(GOLDEN / f"deepspeed-0.19.8/zero2-dp3/{STEP}")
    assert main(["run", source, str(tmp_path / "out"), "--to", "dp=2", option]) == ExitCode.USAGE
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layers", [10**9, 1025, -1, 10**30])
def test_a_pipeline_of_any_number_of_layers_is_refused(layers):
    with pytest.raises(UnsupportedError, match="num_layers"):
        pipeline.parse({"num_layers": layers})


def test_a_multiple_that_the_vocabulary_is_none_of_is_refused():
    """It would be rounded up to a vocabulary of gigabytes."""
    info = {"original_vocab_size": 13, "padded_vocab_size": 16, "vocab_multiple": 10**9}
    with pytest.raises(UnsupportedError, match="no multiple of 1000000000"):
        patterns.parse(info).padded_rows(2)


def test_a_shape_that_repeats_one_element_is_held_against_its_storage(tmp_path):
    """Strides of zero let a tensor of any size stand on one element."""
    size = b"\x8a\x08" + struct.pack("<Q", 1 << 50) + b"\x85"
    error = outcome_of(lambda: build(START + tensor(size, b"K\x00\x85") + b".", ENTRIES, "the file"))
    assert isinstance(error, UnsupportedError) and "repeats a storage of 16 elements" in str(error)
    outcome = outcome_of(lambda: build(START + tensor(b"M\x00\x10\x85", b"K\x00\x85") + b".", ENTRIES, "the file"))
    assert outcome[0].shape == (4096,)


@pytest.mark.parametrize(
    ("name", "model", "key", "number"),
    [
        ("autoep-dp2-ep2", MODEL, "ep_size", 0),
        ("autoep-dp2-ep2", MODEL, "num_experts", 10**9),
        ("autoep-dp2-ep2", MODEL, "num_experts", True),
        ("autoep-tp3-dp2-ep2-zero3", "zero_pp_rank_*_model_states.pt", "ep_size", 0),
    ],
)
def test_impossible_numbers_of_experts_are_refused(tmp_path, name, model, key, number):
    folder = Path(shutil.copytree(golden(name), tmp_path / STEP))
    for path in folder.glob(model):
        edit(folder, path.name, lambda value: [layer.update({key: number}) for layer in value["ds_autoep_layers"]])
    with pytest.raises(UnsupportedError, match=f"{key}={number}"):
        index_of(folder)


@pytest.mark.parametrize("number", [3 * 10**7, 10**12])
def test_more_fused_tensors_than_rows_are_refused(tmp_path, number):
    folder = Path(shutil.copytree(golden("pipeline-tp2-pp2"), tmp_path / STEP))

    def change(value):
        value["universal_checkpoint_info"]["parameter_with_sub_params"][0]["shape"] = [number, 8]

    for path in folder.glob("mp_rank_*"):
        edit(folder, path.name, change)
    with pytest.raises(UnsupportedError, match=f"{number} fused tensors along dim 0"):
        plan_of(index_of(folder), Topology(dp=2))


@pytest.mark.parametrize(
    ("key", "number"),
    [("global_steps", -1), ("global_steps", 10**30), ("global_samples", -5), ("global_samples", True)],
)
def test_impossible_progress_is_refused_before_anything_is_written(tmp_path, key, number):
    folder = Path(shutil.copytree(golden("zero2-dp3"), tmp_path / STEP))
    edit(folder, MODEL, lambda value: value.update({key: number}))
    with pytest.raises(UnsupportedError, match=f"{key}: expected a whole number"):
        index_of(folder)
