"""docs/migration.md shows what `kubectl etj convert` prints for its examples."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from elastic_operator.plugin.convert.job import KINDS
from elastic_operator.plugin.errors import Exit
from elastic_operator.plugin.main import main
from elastic_operator.plugin.options import make_parser
from tests.pages import ROOT, blocks, rows, section

PAGE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", [kind for _, kind in KINDS])
def test_an_example_is_converted_as_the_page_shows(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, command, result, *notes = blocks(section(PAGE, title))
    arguments = shlex.split(command.text.removeprefix("$ kubectl etj "))
    files = re.findall(r"-f (\S+)", command.text)
    for name, document in zip(files, source.text.split("---\n"), strict=True):
        (tmp_path / name).write_text(document)
    monkeypatch.chdir(tmp_path)
    assert main(arguments, {}) == Exit.OK
    out, err = capsys.readouterr()
    assert result.text == out
    assert [block.text for block in notes] in ([], [err])


def test_every_option_of_the_page_exists_and_has_the_default_that_it_says() -> None:
    parser = make_parser()
    options = parser.parse_args(["convert", "-f", "x", "--global-samples", "1"])
    (verbs,) = [action for action in parser._actions if action.dest == "verb"]
    known = {text for action in verbs.choices["convert"]._actions for text in action.option_strings}  # type: ignore[index,call-overload]
    told = {name.strip("`").split()[0] for name, _ in rows(PAGE.split("the source does not hold:")[1].split("## ")[0])}
    common = {
        "-h",
        "--help",
        "-n",
        "--namespace",
        "--context",
        "--kubeconfig",
        "-o",
        "--output",
        "-f",
        "--filename",
        "--color",
    }
    assert told == known - common
    assert options.format == "DeepSpeed"


def test_the_sources_of_the_page_are_of_the_kinds_that_are_converted() -> None:
    kinds = {
        (item["apiVersion"], item["kind"])
        for title in (kind for _, kind in KINDS)
        for item in yaml.safe_load_all(next(blocks(section(PAGE, title))).text)
    }
    assert set(KINDS) <= kinds
