"""Formats say themselves what the front door may ask of them."""

import dataclasses
from pathlib import Path

import pytest

from reshard.errors import UsageError
from reshard.formats import FORMATS, format_of, read_checkpoint

GOLDEN = Path(__file__).parents[3] / "golden"
ZERO2 = GOLDEN / "deepspeed-0.19.8/zero2-dp3/step-00000002"
ONE_OF_EACH = {
    "deepspeed": ZERO2,
    "universal": GOLDEN / "universal-0.19.8/zero2-dp3/step-00000002",
    "dcp": GOLDEN / "dcp-2.13/single-nested/step-00000002",
    "megatron": GOLDEN / "megatron-0.16.1/iter_0000003",
    "safetensors": GOLDEN / "safetensors/llama",
    "pytorch": GOLDEN / "pytorch-2.13/single",
}


def test_only_formats_of_deepspeed_take_patterns() -> None:
    assert {name for name in FORMATS if format_of(name).takes_patterns} == {"deepspeed", "universal"}


def test_only_native_checkpoints_of_deepspeed_keep_their_stage() -> None:
    assert {name for name in FORMATS if format_of(name).keeps_zero_stage} == {"deepspeed"}


def test_patterns_for_a_checkpoint_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"patterns are for DeepSpeed's checkpoints: no file .*model_states.pt"):
        read_checkpoint(tmp_path, None, tmp_path / "patterns.yaml")


def test_patterns_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "patterns.yaml").write_text("version: 7\n")
    with pytest.raises(UsageError, match="expected a mapping with version"):
        read_checkpoint(ZERO2, None, tmp_path / "patterns.yaml")


@pytest.mark.parametrize("name", FORMATS)
def test_the_facts_for_a_formats_writer_name_the_format_and_cannot_be_changed(name: str) -> None:
    index = read_checkpoint(ONE_OF_EACH[name], None)
    assert index.extra is not None
    assert index.extra.format_name == index.format == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(index.extra, dataclasses.fields(index.extra)[0].name, None)


def test_an_index_with_facts_of_another_format_is_refused() -> None:
    index = read_checkpoint(ZERO2, None)
    with pytest.raises(ValueError, match=r"Index\.extra is of the format 'deepspeed', expected 'dcp'"):
        dataclasses.replace(index, format="dcp")
