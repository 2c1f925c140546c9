"""Reads CHANGELOG.md strictly in the form of Keep a Changelog 1.1.0: versions, newest first, with kinds of changes.

`python -m release.changelog VERSION` prints what the page says about one; it needs the standard library only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
UNRELEASED = "Unreleased"

_VERSION = re.compile(r"\[(?P<version>\d+\.\d+\.\d+)\] - (?P<date>\d{4}-\d{2}-\d{2})")
_ENTRY = re.compile(r"- \S.*")
_CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


class ChangelogError(ValueError):
    """The page has another form; the text names the line."""


Versions = dict[str, dict[str, list[str]]]
"""Entries by version and kind, in the order of the page."""


def read_changelog(text: str) -> Versions:
    """Return the entries of the page, each with its line breaks.

    Raises:
        ChangelogError: a line does not fit the form, a kind is there twice, or versions are not in falling order.
    """
    versions: Versions = {}
    version, kind = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("## "):
            version, kind = _read_version(line, number), ""
            _check(version not in versions, number, "each version once", line)
            versions[version] = {}
        elif line.startswith("### "):
            kind = line.removeprefix("### ")
            _check(bool(version), number, "a version before the first kind", line)
            _check(kind in KINDS and kind not in versions[version], number, f"one of {', '.join(KINDS)}, once", line)
            versions[version][kind] = []
        elif line.startswith("#"):
            _check(number == 1, number, "no heading but versions and kinds", line)
        elif line.startswith("- "):
            _check(bool(kind), number, "a kind before the first entry", line)
            _check(_ENTRY.fullmatch(line) is not None, number, "an entry with a text", line)
            versions[version][kind].append(line.removeprefix("- "))
        elif version and line.strip():
            _check(bool(kind and versions[version][kind]) and line.startswith("  "), number, "an entry: - TEXT", line)
            versions[version][kind][-1] += f"\n{line[2:]}"
    _check_order(list(versions))
    return versions


def format_notes(changes: dict[str, list[str]]) -> str:
    """Return the changes of a version as Markdown."""
    parts = []
    for kind, entries in changes.items():
        lines = ["- " + entry.replace("\n", "\n  ") for entry in entries]
        parts.append(f"### {kind}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _read_version(line: str, number: int) -> str:
    title = line.removeprefix("## ")
    if title == f"[{UNRELEASED}]":
        return UNRELEASED
    found = _VERSION.fullmatch(title)
    _check(found is not None, number, "[Unreleased] or [VERSION] - YYYY-MM-DD", line)
    assert found is not None
    return found["version"]


def _check_order(names: list[str]) -> None:
    released = [tuple(map(int, name.split("."))) for name in names if name != UNRELEASED]
    if names[:1] != [UNRELEASED] or released != sorted(released, reverse=True):
        raise ChangelogError(
            f"expected {UNRELEASED} first and then versions in falling order, found {', '.join(names)}"
        )


def _check(is_right: bool, number: int, expected: str, found: str) -> None:
    if not is_right:
        raise ChangelogError(f"CHANGELOG.md:{number}: expected {expected}, found {found[:80]!r}")


def main() -> int:
    """Print the changes of the version that the command line names; return the exit code."""
    if len(sys.argv) != 2:
        print("usage: python -m release.changelog VERSION", file=sys.stderr)
        return 2
    try:
        versions = read_changelog(_CHANGELOG.read_text(encoding="utf-8"))
        changes = versions.get(sys.argv[1])
        if not changes:
            raise ChangelogError(f"expected changes of {sys.argv[1]}, found {', '.join(versions)}")
    except ChangelogError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(format_notes(changes), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
