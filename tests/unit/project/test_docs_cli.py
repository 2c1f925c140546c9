"""docs/cli-reference.md is what the programs say."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib

import pytest

from docs import cli_reference
from tests.pages import ROOT


def test_the_page_is_the_one_that_the_generator_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.cli_reference", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_check_sees_an_edited_page(tmp_path, monkeypatch, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_text(cli_reference.render().replace("--threads", "--thread"))
    monkeypatch.setattr(cli_reference, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["cli_reference", "--check"])
    assert cli_reference.main() == 1
    assert "python -m docs.cli_reference" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["cli_reference"])
    cli_reference.main()
    assert page.read_text() == cli_reference.render()


def test_every_program_of_the_distribution_is_on_the_page() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    told = {program.build().prog.replace("kubectl etj", "kubectl-etj") for program in cli_reference.PROGRAMS}
    assert set(scripts) <= told


def test_arguments_options_choices_and_defaults_are_rendered() -> None:
    parser = argparse.ArgumentParser(prog="tool")
    commands = parser.add_subparsers()
    run = commands.add_parser("run", help="do it")
    run.add_argument("--kind", choices=("a", "b"), default="a", help="which (default: %(default)s)")
    run.add_argument("--secret", help=argparse.SUPPRESS)
    run.add_argument("name", nargs="?", help="of the thing")
    program = cli_reference.Program(build=lambda: parser, about="About.")
    assert "\n".join(cli_reference._program(program)).splitlines() == [
        "## tool", "", "About.", "", "### tool run", "", "`tool run [name]`: do it.", "",
        "| argument | default | meaning |", "|---|---|---|",
        "| `[name]` |  | of the thing |", "| `--kind a\\|b` | `a` | which |",
    ]  # fmt: skip


@pytest.mark.parametrize("variable", ["COLUMNS", "POD_NAMESPACE", "KUBECONFIG"])
def test_the_page_does_not_depend_on_the_environment(variable: str, monkeypatch) -> None:
    before = cli_reference.render()
    monkeypatch.setenv(variable, "33")
    assert cli_reference.render() == before
