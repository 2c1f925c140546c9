"""`--mode auto` on real checkpoints: `plan` says what `run` then does, and why."""

from pathlib import Path
from typing import Any

import pytest

from reshard import api
from reshard.commits.commit import read_commit
from reshard.contract import ExitCode
from reshard.virtual import auto_mode
from tests.golden.command import ZERO2, Answer

LOADER = "elastic_trainer,ranks-per-node=1,node-memory=1GiB"


@pytest.fixture
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any saving counts: the checkpoints here are of kilobytes."""
    monkeypatch.setattr(auto_mode, "LEAST_SAVING_SECONDS", 0.0)


@pytest.mark.usefixtures("however_small")
def test_auto_writes_a_manifest_where_it_pays_and_says_why(tmp_path: Path, say: Answer) -> None:
    words = [ZERO2, tmp_path / "v", "--to", "dp=2", "--loader", LOADER]
    planned, done = say.json("plan", *words, "--no-measure"), say.json("run", *words)
    assert planned["mode"] == done["mode"] == read_commit(tmp_path / "v").format == "virtual"
    assert planned["mode_reason"] == done["mode_reason"]
    assert "to load virtually" in done["mode_reason"]
    assert say.json("run", *words)["message"] == "already prepared and committed"


def test_auto_writes_files_where_it_does_not_and_says_why(tmp_path: Path, say: Answer) -> None:
    words = [ZERO2, tmp_path / "m", "--to", "dp=2", "--loader", LOADER]
    planned, done = say.json("plan", *words, "--no-measure"), say.json("run", *words)
    assert planned["mode"] == done["mode"] == "materialize"
    assert planned["mode_reason"] == done["mode_reason"]
    assert "less than 5.0 s are saved" in done["mode_reason"]
    assert (read_commit(tmp_path / "m").format, done["verified"]) == ("deepspeed", True)


@pytest.mark.parametrize("mode", [[], ["--loader", LOADER], ["--mode", "virtual"]])
def test_a_run_plans_once_however_its_mode_is_chosen(
    mode: list[str], tmp_path: Path, say: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[object] = []
    plan = api.plan_conversion

    def counted(*wanted: Any, **how: Any) -> Any:
        plans.append(wanted)
        return plan(*wanted, **how)

    monkeypatch.setattr(api, "plan_conversion", counted)
    say.json("run", ZERO2, tmp_path / "out", "--to", "dp=2", *mode)
    assert len(plans) == 1


@pytest.mark.usefixtures("however_small")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--loader", "elastic_trainer,ranks-per-node=1,node-memory=1KiB"], "of a node's memory"),
        (["--loader", LOADER, "--format", "dcp"], "virtual is refused"),
        ([], "any unmodified framework loads the files"),
    ],
)
def test_auto_writes_files_where_nobody_could_load_a_manifest(words: list[str], reason: str, say: Answer) -> None:
    planned = say.json("plan", ZERO2, "--to", "dp=2", "--no-measure", *words)
    assert planned["mode"] == "materialize"
    assert reason in planned["mode_reason"]


@pytest.mark.parametrize("mode", ["materialize", "virtual"])
def test_a_loader_is_asked_for_by_auto_alone(mode: str, tmp_path: Path, say: Answer) -> None:
    words = [ZERO2, tmp_path / "x", "--to", "dp=2", "--mode", mode, "--loader", LOADER]
    assert "--loader: only --mode auto asks for it" in say("run", *words, code=ExitCode.USAGE)


@pytest.mark.parametrize("option", [["--resume"], ["--worker", "0/2"], ["--latest"], ["--reread"]])
def test_what_a_manifest_knows_nothing_of_is_refused_beside_a_loader(
    option: list[str], tmp_path: Path, say: Answer
) -> None:
    words = [ZERO2, tmp_path / "x", "--to", "dp=2", "--loader", LOADER, *option]
    assert f"{option[0]}: with --loader a manifest may be written" in say("run", *words, code=ExitCode.USAGE)
    assert not (tmp_path / "x").exists()
