"""A reshard pod writes only below the checkpoint root of its own job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.cli.main import main
from reshard.commits.commit import read_commit
from reshard.commits.root_owner import claim_root, read_owner
from reshard.contract import OWNER_FILE, Env, ExitCode

SOURCE = Path(__file__).parents[3] / "golden/deepspeed-0.19.8/zero2-dp3/step-00000002"
UID, OTHER = "6f0e0a4e-0001", "6f0e0a4e-0002"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    environment = {Env.JOB: "gpt", Env.NAMESPACE: "team", Env.JOB_UID: UID, Env.CHECKPOINT_ROOT: str(tmp_path / "gpt")}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    return tmp_path / "gpt"


def convert(target: Path, *words: str) -> int:
    report = target.parent.parent.parent / "report.json"
    return main(["run", str(SOURCE), str(target), "--to", "dp=2,zero=2", "--report", str(report), *words])


@pytest.mark.parametrize("mode", ["materialize", "virtual"])
def test_a_conversion_claims_the_root_of_its_job_and_names_the_owner_in_the_commit(root: Path, mode: str) -> None:
    assert convert(root / "a1/step-start", "--mode", mode) == ExitCode.OK
    owner = read_owner(root)
    assert owner is not None
    assert (owner.uid, owner.job) == (UID, "team/gpt")
    assert read_commit(root / "a1/step-start").owner == UID


def test_a_conversion_into_the_root_of_another_job_is_refused_with_a_code_of_its_own(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    claim_root(root, uid=OTHER, job="team/old")
    assert convert(root / "a1/step-start") == ExitCode.NOT_OWNER
    assert [path.name for path in root.iterdir()] == [OWNER_FILE]
    assert "belongs to job team/old" in capfd.readouterr().err
    assert json.loads((root.parent / "report.json").read_text())["exit_code"] == ExitCode.NOT_OWNER


def test_a_target_outside_of_the_jobs_root_is_no_ones(root: Path, tmp_path: Path) -> None:
    assert convert(tmp_path / "elsewhere/a1/out") == ExitCode.OK
    assert not root.exists()
    assert read_commit(tmp_path / "elsewhere/a1/out").owner == ""
