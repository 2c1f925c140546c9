"""Formats say themselves what the front door may ask of them."""

from pathlib import Path

import pytest

from reshard.errors import UsageError
from reshard.formats import FORMATS, format_of, read_checkpoint

GOLDEN = Path(__file__).parents[3] / "golden"
ZERO2 = GOLDEN / "deepspeed-0.19.8/zero2-dp3/step-00000002"


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
