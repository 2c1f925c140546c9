"""`reshard verify` on real checkpoints: what agrees across formats, and what a difference is called."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from reshard import api
from reshard.contract import ExitCode
from tests.golden.command import BF16, HERE, PIPELINE, ZERO2, ZERO3, Answer
from tests.randomness import some


def test_verification_tells_its_progress(monkeypatch: pytest.MonkeyPatch, say: Answer) -> None:
    moved, expected = [], []
    monkeypatch.setattr("reshard.cli.commands.ProgressLine.expect", lambda _self, num_bytes: expected.append(num_bytes))
    monkeypatch.setattr("reshard.cli.commands.ProgressLine.__call__", lambda _self, num_bytes: moved.append(num_bytes))
    say("verify", ZERO2, ZERO3, "--states", "fp32")
    assert [sum(moved)] == expected == [2 * 596]


@pytest.mark.parametrize(
    ("words", "source"),
    some(
        itertools.product(
            (["dcp"], ["universal", "--to", "zero=1"], ["safetensors"], ["safetensors", "--dtype", "bfloat16"]),
            (PIPELINE, ZERO2, ZERO3, BF16),
        ),
        every=3,
    ),
)
def test_what_another_format_holds_agrees(source: Path, words: list[str], tmp_path: Path, say: Answer) -> None:
    target = tmp_path / "out"
    say("run", source, target, "--format", *words)
    value = say.json("verify", source, target)
    names = {tensor.key.name for tensor in api.index_of(source).tensors if "#" not in tensor.key.name}
    compared = 7 if source != PIPELINE else len(names)
    assert value["tensors"] >= compared
    assert value["different"] == []
    assert all("only in the" in note or "other types" in note for note in value["not_compared"])
    back = say.json("verify", target, source)
    assert len(back["not_compared"]) == len(value["not_compared"])


def test_one_wrong_element_in_another_format_is_found(tmp_path: Path, say: Answer) -> None:
    for name, words in (("same", []), ("rounded", ["--dtype", "bfloat16"])):
        target = tmp_path / name
        say("run", ZERO3, target, "--format", "safetensors", *words)
        index = api.index_of(target)
        (target / "COMMIT.json").unlink()
        number = next(at for at, tensor in enumerate(index.tensors) if tensor.key.name == "down.bias")
        row = index.shards.row(int(np.flatnonzero(index.shards.tensor == number)[0]), 1)
        victim = target / index.files[row.file].path
        content = bytearray(victim.read_bytes())
        content[row.byte_offset + 2] ^= 1
        victim.write_bytes(content)
        text = say("verify", ZERO3, target, code=ExitCode.VERIFICATION_FAILED)
        assert text.count("\n  - ") == 1
        assert "fp32/down.bias and weight/down.bias" in text
        assert "hint: verify each of the two alone" in text


def test_a_missing_tensor_is_no_agreement(tmp_path: Path, say: Answer) -> None:
    value = say.json("verify", ZERO2, ZERO3, "--states", "weight,fp32")
    assert value["states"] == ["fp32", "weight"]
    text = say("verify", ZERO2, BF16, "--states", "exp_avg", code=ExitCode.VERIFICATION_FAILED)
    assert "exp_avg/down.bias" in text
    nothing = say("verify", PIPELINE, HERE / "safetensors/llama", code=ExitCode.VERIFICATION_FAILED)
    assert "differ" in nothing or "no tensor in common" in nothing
    nothing = say("verify", ZERO3, HERE / "safetensors/llama", "--states", "fp32", code=ExitCode.VERIFICATION_FAILED)
    assert "no tensor in common" in nothing
    assert "no checkpoint holds momentum" in say("verify", ZERO2, ZERO3, "--states", "momentum", code=2)


def test_states_of_one_checkpoint(say: Answer) -> None:
    every, some = say.json("verify", ZERO2), say.json("verify", ZERO2, "--states", "fp32")
    assert (every["tensors"], some["tensors"], some["committed"]) == (29, 7, False)
