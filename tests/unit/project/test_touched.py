"""`make test-touched` runs what a change needs: its table names what exists and leaves nothing out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import touched
from tests.touched import ALWAYS, PRODUCTS, ROOT, TABLE, changed_paths, commands, expand, find_base, run, select
from tests.unit.project.test_repository import tracked


@pytest.mark.parametrize(
    ("path", "selected"),
    [
        ("reshard_job/reshard/witness/read_back.py", {"tests/golden", "tests/property/test_witness_mutants.py",
         "tests/unit/reshard/witness", "tests/engine/test_reshard_matrix.py"}),
        ("reshard_job/reshard/formats/dcp/writing/x.py", {"tests/golden", "tests/unit/reshard/formats",
         "tests/engine/test_reshard_dcp_types.py"}),
        ("operator/elastic_operator/reconcile/failures/x.py", {"tests/property/test_decide_world.py",
         "tests/property/test_protocol_search.py", "tests/unit/elastic_operator/reconcile/failures"}),
        ("trainer/elastic_trainer/saving/copying.py", {"tests/property/test_protocol_search.py",
         "tests/unit/elastic_trainer/saving", "tests/engine/test_trainer_asynchronous.py"}),
        ("charts/elastic-training-operator/values.yaml", {"tests/cluster/test_helm_templates.py"}),
        ("docs/tour.md", {"tests/golden/test_tour.py"}),
        ("tests/golden/make_dcp.py", {"tests/golden"}),
        ("tests/engine/test_reshard_s3.py", {"tests/engine/test_reshard_s3.py"}),
        ("Makefile", set()),
    ],
)  # fmt: skip
def test_a_change_needs_these_tests(path: str, selected: set[str]) -> None:
    found = set(select([path]))
    assert selected | set(ALWAYS) <= found
    assert all((ROOT / name).exists() for name in found)
    assert ("tests/golden" in found) is ("tests/golden" in selected), "no more than is needed"


def test_every_row_is_of_something_that_is_there_and_names_tests_that_exist() -> None:
    assert [prefix for prefix, _ in TABLE if not (ROOT / prefix).exists()] == []
    assert [pattern for _, patterns in TABLE for pattern in patterns if not list(ROOT.glob(pattern))] == []


def test_every_folder_and_package_of_the_checkout_has_a_row() -> None:
    folders = {f"{name.split('/')[0]}/" for name in tracked() if "/" in name and not name.startswith(".")}
    packages = [path.parent for product in PRODUCTS for path in (ROOT / product).glob("*/__init__.py")]
    folders |= {f"{package.relative_to(ROOT)}/" for package in packages}
    rows = [prefix for prefix, _ in TABLE]
    assert [name for name in folders if not any(row.startswith(name) for row in rows)] == []


def test_every_test_of_properties_and_of_frameworks_is_in_a_row() -> None:
    named = {name for _, patterns in TABLE for name in expand(patterns)}
    tests = expand(f"tests/{tier}/test_*.py" for tier in ("property", "engine"))
    assert [name for name in tests if name not in named] == []


def test_a_change_of_a_module_runs_the_folder_that_mirrors_it_or_the_next_one_above() -> None:
    packages = [path.parent for product in PRODUCTS for path in (ROOT / product).rglob("__init__.py")]
    for package in packages:
        found = select([f"{package.relative_to(ROOT)}/x.py"])
        product = f"tests/unit/{package.relative_to(ROOT).parts[1]}"
        assert any(name.startswith(product) for name in found), package


def test_tiers_run_apart_and_a_file_is_not_run_beside_its_folder() -> None:
    found = select(["tests/golden/make.py", "tests/golden/test_tour.py", "tests/engine/test_reshard_s3.py"])
    assert found.count("tests/golden") == 1
    assert "tests/golden/test_tour.py" not in found
    fast, engine = commands(found)
    assert fast[1:5] == ["-m", "pytest", "-n", "auto"]
    assert "tests/golden" in fast
    assert engine[1:3] == ["-m", "pytest"]
    assert "tests/engine/test_reshard_s3.py" in engine
    assert "-n" not in engine


def git(root: Path, *arguments: str) -> None:
    identity = {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *arguments], cwd=root, env={**os.environ, **identity}, capture_output=True, check=True)


def test_changes_are_those_since_the_branch_left_main_and_those_not_committed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "main")
    for name in ("kept", "moved", "edited"):
        (tmp_path / name).write_text(f"{name}\n" * 9)
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "-m", name)
    assert find_base(tmp_path) == "HEAD~1"
    assert changed_paths("HEAD~1", tmp_path) == ["edited"]
    git(tmp_path, "switch", "-c", "topic")
    git(tmp_path, "mv", "moved", "there")
    git(tmp_path, "commit", "-m", "move")
    (tmp_path / "edited").write_text("otherwise\n")
    (tmp_path / "new").write_text("new\n")
    assert changed_paths(find_base(tmp_path), tmp_path) == ["edited", "moved", "new", "there"]
    with pytest.raises(SystemExit, match="git diff --name-only --no-renames nowhere failed"):
        changed_paths("nowhere", tmp_path)


def test_all_commands_run_and_the_first_failure_is_the_exit_code(tmp_path: Path, capfd) -> None:
    program = "import os, sys; print('soak', os.environ['ETJ_SOAK']); sys.exit(int(sys.argv[1]))"
    todo = [[sys.executable, "-c", program, code] for code in ("0", "3", "4", "0")]
    assert run(todo) == 3
    assert run(todo[:1]) == 0
    assert capfd.readouterr().out.count("soak 1") == 5


def test_the_program_selects_by_what_differs_from_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(touched, "run", lambda todo: started.extend(todo) or 5)
    assert touched.main(["--base", "HEAD"]) == 5
    assert started[0][5:] == [name for name in select(changed_paths("HEAD")) if name.split("/")[1] in touched.SHARED]
