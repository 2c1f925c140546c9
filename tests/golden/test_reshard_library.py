"""`reshard` as a library: the example of docs/reshard.md, as it stands there."""

import re
import shutil
from pathlib import Path

import pytest

from reshard.api import index_of, reshard
from reshard.commits.commit import read_commit
from reshard.errors import ReshardError
from reshard.topology import Topology
from tests.golden.command import PIPELINE, ROOT, ZERO3


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/reshard.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    shutil.copytree(PIPELINE, tmp_path / "ckpt/global_step1000")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert read_commit("out/global_step1000").topology == Topology.parse("tp=2,dp=3")
    assert re.fullmatch(r"\d+ [0-9a-f]{8}\n", capsys.readouterr().out)


@pytest.mark.parametrize(("to", "stage"), [("dp=2", 3), ("dp=2,zero=1", 1), (Topology(dp=2, zero=2), 2)])
def test_a_stage_that_a_text_does_not_name_stays(tmp_path: Path, to: Topology | str, stage: int) -> None:
    reshard(ZERO3, tmp_path / "out", to)
    assert index_of(tmp_path / "out").topology.zero == stage


def test_failures_are_those_of_the_command_line(tmp_path: Path) -> None:
    for source, to, code in ((PIPELINE, "tp=3", 11), (tmp_path / "gone", "dp=2", 11), (PIPELINE, "dp=x", 2)):
        with pytest.raises(ReshardError) as found:
            reshard(str(source), str(tmp_path / "out"), to)
        assert found.value.exit_code == code
    assert list(tmp_path.iterdir()) == []
