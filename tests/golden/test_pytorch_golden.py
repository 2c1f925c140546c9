"""Weights in files of torch.save: found, indexed, converted, and refused where it is not clear what they are."""

import json
import shutil
from pathlib import Path

import pytest

from reshard.api import index_of
from reshard.cli.locate import find_newest
from reshard.contract import ExitCode
from reshard.execution.verify import read_digests
from tests.golden.command import HERE, ZERO2, Answer

ROOT = HERE / "pytorch-2.13"
FOLDERS = ("single", "nested", "sharded")
NAMES = {"embed.weight", "layer.weight", "layer.turned", "layer.part", "scale", "nothing"}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_form_holds_the_same_weights(name: str) -> None:
    index = index_of(ROOT / name)
    assert index.format == "pytorch"
    assert {tensor.key.name for tensor in index.tensors} == NAMES
    assert {tensor.key.state for tensor in index.tensors} == {"weight"}
    assert index.aliases == {"head.weight": "embed.weight"}
    assert read_digests(index) == read_digests(index_of(ROOT / "single"))


def test_what_lies_beside_the_weights_is_told(tmp_path: Path, say: Answer) -> None:
    notes = say.json("plan", ROOT / "nested", tmp_path / "out", "--format", "safetensors")["notes"]
    assert "model.pt: the weights are under model.module; not converted besides: optimizer, epoch" in notes


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("target", ["safetensors", "dcp"])
def test_it_becomes_weights_of_other_formats(tmp_path: Path, say: Answer, name: str, target: str) -> None:
    more = ("--to", "dp=2,zero=3") if target == "dcp" else ()
    say("run", ROOT / name, tmp_path / "out", "--format", target, "--reread", *more)
    say("verify", ROOT / name, tmp_path / "out")
    found = read_digests(index_of(tmp_path / "out"))
    if target == "dcp":  # torch loads by name: both names of a tied weight are there
        assert found.pop("weight/head.weight") == found["weight/embed.weight"]
    assert found == read_digests(index_of(ROOT / "single"))


@pytest.mark.parametrize("target", ["deepspeed", "universal"])
def test_a_checkpoint_with_an_optimizer_cannot_be_made_of_it(tmp_path: Path, say: Answer, target: str) -> None:
    words = ("run", ROOT / "single", tmp_path / "out", "--format", target, "--to", "dp=2")
    say(*words, code=ExitCode.UNSUPPORTED)
    say(*words, "--like", ZERO2, code=ExitCode.UNSUPPORTED)


def test_it_is_not_written(tmp_path: Path, say: Answer) -> None:
    found = say.json("run", ROOT / "single", tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
    assert "is read and not written" in found["message"]
    say("run", ROOT / "single", tmp_path / "out", "--format", "pytorch", code=ExitCode.USAGE)


def test_files_with_other_content_are_no_weights(tmp_path: Path) -> None:
    for name in ("optimizer.bin", "scheduler.pt", "training_args.bin", "random_states_0.pkl", "rng_state.pth"):
        shutil.copy(ROOT / "single" / "pytorch_model.bin", tmp_path / name)
    shutil.copy(ROOT / "single" / "pytorch_model.bin", tmp_path)
    assert len(index_of(tmp_path).files) == 1
    for old, new in (("pytorch_model.bin", "pytorch_model_fsdp.bin"), ("pytorch_model_fsdp.bin", "weights.pt")):
        (tmp_path / old).rename(tmp_path / new)
        assert [file.path for file in index_of(tmp_path).files] == [new]


def test_a_file_among_checkpoints_is_not_taken_for_weights(tmp_path: Path, say: Answer) -> None:
    shutil.copytree(ZERO2, tmp_path / "run" / "global_step2")
    (tmp_path / "run" / "latest").write_text("global_step2")
    shutil.copy(ROOT / "nested" / "model.pt", tmp_path / "run" / "notes.pt")
    assert find_newest(tmp_path / "run") == tmp_path / "run" / "global_step2"
    found = say.json("run", tmp_path / "run", tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
    assert "holds 1 checkpoint, and is none itself" in found["message"]


def test_weights_beside_a_training_are_not_taken_for_it(tmp_path: Path, say: Answer) -> None:
    folder = tmp_path / "run"
    shutil.copytree(ROOT / "single", folder)
    shutil.copytree(ZERO2, folder / "global_step2")
    found = say.json("run", folder, tmp_path / "out", "--to", "dp=2", code=ExitCode.UNSUPPORTED)["error"]
    assert "holds weights, and the state of the training in a folder beside them" in found["message"]
    say("run", folder, tmp_path / "out", "--format", "safetensors")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.pt", "b.pt"), "several: a.pt, b.pt"),
        (("pytorch_model.bin", "adapter_model.bin"), "several: adapter_model.bin, pytorch_model.bin"),
        (("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"), "no file *.bin.index.json beside"),
    ],
)
def test_several_files_are_not_chosen_from(tmp_path: Path, say: Answer, names: tuple[str, ...], message: str) -> None:
    for name in names:
        shutil.copy(ROOT / "single" / "pytorch_model.bin", tmp_path / name)
    found = say.json("inspect", tmp_path, code=ExitCode.UNSUPPORTED)["error"]
    assert message in "\n".join(found["problems"])


def test_files_that_contradict_the_index_are_refused(tmp_path: Path, say: Answer) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "sharded", folder)
    path = folder / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["scale"], index["weight_map"]["more"] = (
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model-00001-of-00002.bin",
    )
    path.write_text(json.dumps(index))
    error = say.json("verify", folder, code=ExitCode.SOURCE_INVALID)["error"]
    assert len(error["problems"]) == 2
    for text in ("[]", "{", json.dumps({"weight_map": {"scale": "../../secret.bin"}})):
        path.write_text(text)
        say.json("verify", folder, code=ExitCode.SOURCE_INVALID if text == "{" else ExitCode.UNSUPPORTED)
    shutil.copy(ROOT / "sharded" / path.name, path)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    say.json("verify", folder, code=ExitCode.SOURCE_INVALID)


def test_damage_is_found(tmp_path: Path, say: Answer) -> None:
    shutil.copytree(ROOT / "single", tmp_path / "model")
    path = tmp_path / "model" / "pytorch_model.bin"
    content = bytearray(path.read_bytes())
    tensor = index_of(tmp_path / "model").shards
    content[int(tensor.byte_offset[0])] ^= 1
    path.write_bytes(content)
    say("run", tmp_path / "model", tmp_path / "out", "--format", "safetensors", code=ExitCode.SOURCE_INVALID)
    path.write_bytes(content[: len(content) // 2])
    say("inspect", tmp_path / "model", code=ExitCode.SOURCE_INVALID)
