"""A reshard pod writes only below the checkpoint root of its own job."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from reshard.cli.main import main
from reshard.commits import root_owner
from reshard.commits.commit import read_commit
from reshard.commits.root_owner import claim_root, read_owner
from reshard.contract import OWNER_FILE, Env, ExitCode
from reshard.errors import UnsafePickleError
from reshard.formats.pt.objects import Global, Inert
from tests.golden.files import edit

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


def fail_to_read(path: Path, max_bytes: int) -> bytes | None:
    raise OSError(errno.ESTALE, "Stale file handle", str(path))


def test_a_root_whose_owner_cannot_be_read_now_is_not_called_another_jobs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_owner, "read_file", fail_to_read)
    assert convert(root / "a1/step-start") == ExitCode.SOURCE_UNAVAILABLE


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


def test_a_refusal_says_what_to_add_to_the_spec_before_what_a_report_loses(root: Path, tmp_path: Path) -> None:
    source = shutil.copytree(SOURCE, tmp_path / "in")
    kinds = [Inert("new", Global("mine", f"State{number}"), (), {"epoch": 3}) for number in range(9)]
    edit(source, "mp_rank_00_model_states.pt", lambda value: value.update(mine=kinds))
    words = ["run", str(source), str(root / "a1/step-1"), "--to", "dp=2", "--report", str(tmp_path / "report.json")]
    assert main([*words, "--allow-global", "mine.Old"]) == UnsafePickleError.exit_code
    message = json.loads((tmp_path / "report.json").read_text())["message"].splitlines()
    names = ", ".join(["mine.Old", *(f"mine.State{number}" for number in range(9))])
    assert f"set spec.checkpoint.allowedGlobals: [{names}]" in message[1]
    assert main([*words, *(word for name in names.split(", ") for word in ("--allow-global", name))]) == ExitCode.OK


def test_a_name_that_runs_code_is_refused_in_the_words_of_the_spec(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert convert(root / "a1/step-1", "--allow-global", "os.system") == ExitCode.USAGE
    report = json.loads((root.parent / "report.json").read_text())
    assert report["message"].startswith("spec.checkpoint.allowedGlobals os.system: can run what the file says")
    assert "spec.checkpoint.allowedGlobals os.system" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["os.system", "mine.Outer.Inner", "mine.Gr\u00f6\u00dfe"])
def test_what_cannot_be_allowed_is_no_advice(name: str, root: Path, tmp_path: Path) -> None:
    source = shutil.copytree(SOURCE, tmp_path / "in")
    module, _, attribute = name.partition(".")
    item = Inert("new", Global(module, attribute), (), {"epoch": 3})
    edit(source, "mp_rank_00_model_states.pt", lambda value: value.update(mine=item))
    words = ["run", str(source), str(root / "a1/step-1"), "--to", "dp=2", "--report", str(tmp_path / "report.json")]
    assert main(words) == UnsafePickleError.exit_code
    message = json.loads((tmp_path / "report.json").read_text())["message"]
    assert "allowedGlobals" not in message
    assert "--allow-global" not in message
