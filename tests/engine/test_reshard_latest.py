"""`reshard run --latest`: unmodified DeepSpeed goes on from the converted checkpoint without being told its tag."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.cli.main import main
from reshard.contract import ExitCode
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

RUN = {"model": "flat", "topology": "dp=2,zero=1"}
FEWER = {"model": "flat", "topology": "dp=1,zero=1", "steps": 3, "untagged": True}
UNIVERSAL_RANK = Path(__file__).with_name("universal_rank.py")


def convert(source: Path, target: Path, *words: str) -> None:
    assert main(["run", str(source), str(target), "--to", "dp=1,zero=1", *words]) == ExitCode.OK


def test_a_run_that_names_no_tag_loads_what_was_converted_last(tmp_path: Path) -> None:
    """Beside the target lies its source, a later step, which DeepSpeed's own `latest` names."""
    source, later = tmp_path / "step-00000002", tmp_path / "step-00000004"
    (losses,) = launch([{"name": "all", **RUN, "steps": 5, "save_at": 2, "save": str(source)}]).values()
    launch([{"name": "later", **RUN, "load": str(source), "steps": 2, "save_at": 4, "save": str(later)}])
    assert (tmp_path / "latest").read_text() == later.name

    convert(source, tmp_path / "native", "--latest")
    assert (tmp_path / "latest").read_text() == "native"
    (found,) = launch([{"name": "native", **FEWER, "load": str(tmp_path / "native")}]).values()
    assert found == pytest.approx(losses[2:], abs=1e-6, rel=0)

    convert(source, tmp_path / "universal", "--format", "universal", "--latest")
    (found,) = launch([{"name": "universal", **FEWER, "load": str(tmp_path / "universal")}], UNIVERSAL_RANK).values()
    assert found == pytest.approx(losses[2:], abs=1e-6, rel=0)
