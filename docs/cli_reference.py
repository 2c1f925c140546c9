"""Generates docs/cli-reference.md from the programs' parsers: `python -m docs.cli_reference`; `--check` only compares.

The generator reads the parsers' actions and not their help texts, because help texts differ between versions of Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from elastic_operator.plugin.options import make_parser as kubectl_etj
from elastic_operator.settings import _parser as elastic_operator
from reshard.cli.options import build as reshard
from testbed.__main__ import _parser as testbed

PAGE = Path(__file__).with_name("cli-reference.md")

_HEAD = """\
# Command line reference

`python -m docs.cli_reference` generates this page from the programs; edit the programs, not this page.
`PROGRAM --help` and `PROGRAM COMMAND --help` print the same texts.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One command line.

    Attributes:
        build: returns the program's parser; must not depend on the environment.
        about: Markdown text: the program's purpose, and a link to its page.
    """

    build: Callable[[], argparse.ArgumentParser]
    about: str


PROGRAMS = (
    Program(
        build=reshard,
        about="Converts checkpoints, alone or in a reshard pod."
        " [Its page](reshard.md) explains every option and exit code.",
    ),
    Program(
        build=lambda: elastic_operator({}),
        about="Runs the operator. The chart sets these options ([install](install.md));"
        " [operations](operations.md) explains the times.",
    ),
    Program(
        build=kubectl_etj,
        about="Shows what happened to a job, and what would happen. [Its page](kubectl-etj.md) has examples.",
    ),
    Program(
        build=testbed,
        about="Runs a Kubernetes cluster on one machine, for trials and tests."
        " [Its page](testbed.md) says what is real.",
    ),
)


def render() -> str:
    """Return the page as Markdown."""
    return "\n".join([_HEAD, *(line for program in PROGRAMS for line in _program(program))]).rstrip("\n") + "\n"


def _program(program: Program) -> Iterator[str]:
    parser = program.build()
    common = {tuple(action.option_strings) for action in _actions(parser)}
    yield from (f"## {parser.prog}", "", program.about, "")
    yield from _table(parser)
    for name, command, text in _commands(parser):
        arguments = "".join(f" {_shown(action)}" for action in _actions(command) if not action.option_strings)
        yield from (f"### {parser.prog} {name}", "", f"`{parser.prog} {name}{arguments}`: {_cell(text)}.", "")
        yield from _table(command, without=common)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield name, command, texts[name].rstrip(".")


def _table(parser: argparse.ArgumentParser, without: Container[tuple[str, ...]] = ()) -> Iterator[str]:
    """Yield the table's lines for all arguments except those that the program's own table lists."""
    shown = [action for action in _actions(parser) if tuple(action.option_strings) not in without]
    rows = [(_names(action), _default(action), _help(action, parser.prog)) for action in shown]
    # If the command's own sentence explains its arguments, a table would only repeat them.
    if any(default or text for _, default, text in rows):
        yield from ("| argument | default | meaning |", "|---|---|---|")
        yield from (f"| `{name}` | {default} | {text} |" for name, default, text in rows)
        yield ""


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the visible actions, arguments before options."""
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    shown = [item for item in parser._actions if not isinstance(item, hidden) and item.help != argparse.SUPPRESS]
    return sorted(shown, key=lambda action: bool(action.option_strings))


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return _cell(_shown(action))
    return _cell(", ".join(name if action.nargs == 0 else f"{name} {_value(action)}" for name in action.option_strings))


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _shown(action: argparse.Action) -> str:
    """Return a positional argument as it appears in a synopsis."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return {"?": f"[{name}]", "*": f"[{name}...]", "+": f"{name}..."}.get(str(action.nargs), name)


def _default(action: argparse.Action) -> str:
    value = action.default
    if action.required and action.option_strings:
        return "required"
    if value is None or value is argparse.SUPPRESS or isinstance(value, bool) or value in ("", [], ()):
        return ""
    return f"`{f'{value:g}' if isinstance(value, float) else value}`"


def _help(action: argparse.Action, prog: str) -> str:
    if isinstance(action, argparse._VersionAction):
        return "print the version"
    text = (action.help or "") % {**vars(action), "prog": prog}
    if _default(action):  # The default has a column of its own.
        text = re.sub(r"[,;]? ?\(?default:? [^\s)]+\)?$", "", text)
    return _cell(text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Write the page, or with --check return 1 if the page differs from the generated one."""
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == render():
            return 0
        sys.stderr.write(f"{PAGE} differs from the programs' parsers: run `python -m docs.cli_reference`\n")
        return 1
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
