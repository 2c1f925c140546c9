"""The `reshard` command in this process: what it says, and the checkpoints that it is tried on."""

import json
from pathlib import Path

import pytest

from reshard.cli.main import main
from tests.golden.files import STEP

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEEPSPEED = HERE / "deepspeed-0.19.8"
PIPELINE, ZERO2, ZERO3, BF16 = (
    DEEPSPEED / name / STEP for name in ("pipeline-tp2-pp2", "zero2-dp3", "zero3-dp3", "bf16-dp2")
)
EVERY = sorted(path for path in HERE.glob("*/*/step-*") if path.is_dir())


class Answer:
    """The `reshard` command in this process, and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> str:
        """Text of a command that ends with `code`: stdout, or stderr if it fails."""
        assert main([str(word) for word in words]) == code
        found = self._capsys.readouterr()
        return found.err if code and not found.out else found.out

    def json(self, *words: object, code: int = 0) -> dict:
        """Its JSON."""
        assert main([*(str(word) for word in words), "--json"]) == code
        value = json.loads(self._capsys.readouterr().out)
        assert value["ok"] is (code == 0)
        return value
