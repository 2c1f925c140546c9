"""A state of Accelerate with FSDP in its own shape for other ranks: two DCP folders, and the files beside them."""

import shutil
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of, plan_conversion, reshard
from reshard.commits.commit import read_commit
from reshard.commits.staging import Sharing
from reshard.contract import ExitCode
from reshard.errors import UnsupportedError, UsageError
from reshard.execution.verify import read_digests
from reshard.formats.dcp.metadata import read_metadata
from reshard.topology import Topology
from tests.golden.command import HERE, Answer

SOURCE = HERE / "accelerate-1.15" / "fsdp2"
PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "step-2"


def test_the_result_has_the_shape_and_the_tensors_of_the_source(target):
    report = reshard(SOURCE, target, "dp=3")
    assert (report.witness["not_witnessed"], report.step) == (0, 2)
    assert {path.name for path in target.iterdir()} == {*PARTS, "scheduler.bin", "COMMIT.json"}
    for part in PARTS:
        names = {".metadata", *(f"__{rank}_0.distcp" for rank in range(3))}
        assert {path.name for path in (target / part).iterdir()} == names
    source, made = index_of(SOURCE), index_of(target)
    assert read_digests(made) == read_digests(source)
    assert (made.groups, made.step, made.topology.dp) == (source.groups, 2, 3)
    for part in PARTS:
        first, second = ([(e.key, e.shape, e.path) for e in read_metadata(root / part)] for root in (SOURCE, target))
        assert first == second
    assert (target / "scheduler.bin").read_bytes() == (SOURCE / "scheduler.bin").read_bytes()


def test_notes_say_what_becomes_of_the_files_of_single_ranks(target):
    plan = plan_conversion(Conversion(source=SOURCE, target=target, topology=Topology(dp=3)))
    assert any("random_states_0.pkl, random_states_1.pkl: left out" in note for note in plan.layout.notes)
    assert any("scheduler.bin: carried unchanged" in note for note in plan.layout.notes)
    same = plan_conversion(Conversion(source=SOURCE, target=target, topology=Topology(dp=2)))
    assert {file.path for file in same.layout.files} >= {"random_states_0.pkl", "random_states_1.pkl"}
    assert not [note for note in same.layout.notes if "left out" in note]


def test_back_and_forth_changes_no_bit(target, tmp_path):
    reshard(SOURCE, target, "dp=5")
    reshard(target, tmp_path / "back", "dp=2")
    assert read_digests(index_of(tmp_path / "back")) == read_digests(index_of(SOURCE))


def test_workers_share_it_and_a_second_run_finds_it(target):
    conversion = Conversion(source=SOURCE, target=target, topology=Topology(dp=4))
    convert(conversion, RunOptions(sharing=Sharing.TOGETHER, worker=(0, 2)))
    assert "already converted" in convert(conversion, RunOptions(reread=True)).message
    assert read_commit(target).format == "dcp"


def test_weights_alone_stay_a_folder_of_this_kind(tmp_path, target):
    source = tmp_path / "source"
    shutil.copytree(SOURCE / PARTS[0], source / PARTS[0])
    reshard(source, target, "dp=3")
    assert {path.name for path in target.iterdir()} == {PARTS[0], "COMMIT.json"}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"states": ("weight",)}, UnsupportedError, "is converted with all its states, names and types"),
        ({"weight_dtype": "bfloat16"}, UnsupportedError, "is converted with all its states, names and types"),
        ({"like": SOURCE}, UsageError, "holds nothing that a source could not tell"),
    ],
)
def test_what_accelerate_would_not_load_is_refused(target, options, error, said):
    with pytest.raises(error, match=said):
        plan_conversion(Conversion(source=SOURCE, target=target, topology=Topology(dp=3), **options))


def test_virtual_and_latest_are_refused(target, capsys):
    say = Answer(capsys)
    words = ("run", SOURCE, target, "--to", "dp=3")
    assert "whole training folder" in say(*words, "--mode", "virtual", code=ExitCode.UNSUPPORTED)
    assert say(*words, "--latest", code=ExitCode.USAGE)


def test_a_full_state_dict_is_refused_with_what_to_do(tmp_path, target, capsys):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(HERE / "pytorch-2.13" / "single" / "pytorch_model.bin", source / "pytorch_model_fsdp.bin")
    (source / "optimizer.bin").write_bytes(b"")
    text = Answer(capsys)("run", source, target, "--to", "dp=3", code=ExitCode.UNSUPPORTED)
    assert "the format pytorch is read and not written" in text
