"""docs/reshard.md and the program say the same: verbs, options, exit codes."""

import argparse
import re
from pathlib import Path

import pytest

from reshard.cli.options import VERBS, build, parse
from reshard.contract import ExitCode
from reshard.errors import UsageError
from reshard.formats import TARGET_FORMATS
from reshard.formats.base import DEFAULT_FILE_BYTES
from reshard.system.limits import format_bytes, parse_bytes
from reshard.tensors.cast import FLOATS
from reshard.topology import DEGREES

PAGE = (Path(__file__).parents[4] / "docs/reshard.md").read_text(encoding="utf-8")


def verbs() -> dict[str, argparse.ArgumentParser]:
    (action,) = (item for item in build()._actions if isinstance(item, argparse._SubParsersAction))
    return dict(action.choices)


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def test_the_page_has_a_section_for_every_verb() -> None:
    assert tuple(verbs()) == VERBS
    titles = re.findall(r"^## (\w+)$", PAGE, flags=re.MULTILINE)
    assert [title for title in titles if title in VERBS] == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_lists_exactly_the_options_of_a_verb(verb: str) -> None:
    rows = [line for line in section(verb).splitlines() if line.startswith("| `--")]
    told = [name for row in rows for name in re.findall(r"`(--[a-z-]+)", row.split(" | ")[0])]
    real = {name for action in verbs()[verb]._actions for name in action.option_strings} - {"-h", "--help"}
    assert len(told) == len(set(told))
    assert set(told) == real


@pytest.mark.parametrize("verb", VERBS)
def test_the_synopsis_names_the_arguments_in_order(verb: str) -> None:
    found = re.search(rf"`reshard {verb} ([^`]+)`", section(verb))
    assert found is not None
    told = re.sub(r"[\[\]]", "", found[1]).split()
    real = [str(action.metavar) for action in verbs()[verb]._actions if not action.option_strings]
    assert told == real[: len(told)]


def test_the_defaults_on_the_page_are_those_of_the_program() -> None:
    run = verbs()["run"]
    for option in ("--memory", "--mode"):
        found = re.search(rf"\| `{option} (\S+)`", section("run"))
        assert found is not None
        assert run.get_default(option[2:].replace("-", "_")) == found[1]
    assert f"`--file-size {format_bytes(DEFAULT_FILE_BYTES)}`".replace(".00 ", "") in section("run")


def test_the_page_lists_the_values_of_options() -> None:
    rows = {row.split("`")[1].split()[0]: row for row in section("run").splitlines() if row.startswith("| `--")}
    for option, values in (("--format", TARGET_FORMATS), ("--dtype", FLOATS), ("--to", DEGREES)):
        assert set(values) <= set(re.findall(r"`(\w+)`", rows[option]))
    units = re.search(r"Sizes are (.*?) without a space", section("run"), flags=re.DOTALL)
    assert units is not None
    for unit in re.findall(r"`(\w+)`", units[1]):
        assert parse_bytes(f"3{unit}") % 3 == 0


def test_exit_codes() -> None:
    told = re.findall(r"^\| (\d+) \| (\w+) \|", section("Exit codes"), flags=re.MULTILINE)
    assert told == [(str(code.value), code.name) for code in ExitCode]


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_has_examples_that_can_be_parsed(verb: str) -> None:
    parser = verbs()[verb] if verb else build()
    text = parser.format_help()
    examples = re.findall(r"^  reshard (.*?)(?: \||  +\(|$)", text, flags=re.MULTILINE)
    assert examples
    for example in examples:
        assert parse([word.strip("'") for word in example.split()]).verb == (verb or example.split()[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "VERB"),
        (["frobnicate"], "frobnicate"),
        (["plan"], "SRC"),
        (["run", "a"], "DST"),
        (["run", "a", "b", "--threads", "many"], "--threads"),
        (["inspect", "a", "--tensor"], "--tensor"),
        (["plan", "a", "--mode", "magic"], "magic"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_said_so(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(words)
    assert "--help" in caught.value.hint
