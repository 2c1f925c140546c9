"""Places of a command's text that are coloured on a terminal. Pure.

Colours follow from the place of a word, never from its spelling alone: a message of a pod that says `Running` stays
plain, so that no tenant can imitate a state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Span = tuple[int, int, str]
"""Begin, end and rich style of a part of a text."""

_PHASE_STYLES = {
    "Running": "green", "Complete": "green", "Failed": "bold red", "Waiting": "yellow", "Suspended": "yellow",
    "Unknown": "yellow",
}  # fmt: skip
_FIELD = re.compile(r"[A-Z][A-Za-z]*(?: [a-z]+)?:(?=\s|$)")
_PHASE_FIELD = re.compile(r"Phase:\s+(\w+)")
_HEADER = re.compile(r"[A-Z][A-Z/* -]*[A-Z](?:   [A-Z][A-Z/* -]*)*")
_HINT = re.compile(r" +hint: .*")
_RECOVERY = re.compile(r"\d+\. \d{4}-[^ ]+ [^ ]+")


def find_spans(text: str) -> Iterator[Span]:
    """Yield the coloured parts of the text of a command."""
    offset, phase_column = 0, -1
    for line in text.split("\n"):
        if _HEADER.fullmatch(line):
            phase_column = _column(line, "PHASE")
            yield offset, offset + len(line), "bold"
        elif not line:
            phase_column = -1
        elif phase_column >= 0:
            yield from _phase(line[phase_column:].split(" ", 1)[0], offset + phase_column)
        else:
            yield from _line(line, offset)
        offset += len(line) + 1


def _column(header: str, name: str) -> int:
    found = re.search(rf"(?:^|   ){name}(?:   |$)", header)
    return -1 if found is None else found.start() + (3 if header[found.start()] == " " else 0)


def _line(line: str, offset: int) -> Iterator[Span]:
    if field := _FIELD.match(line):
        yield offset, offset + field.end(), "bold"
        if phase := _PHASE_FIELD.match(line):
            yield from _phase(phase[1], offset + phase.start(1))
    elif _HINT.match(line):
        yield offset, offset + len(line), "cyan"
    elif number := _RECOVERY.match(line):
        yield offset, offset + number.end(), "bold"


def _phase(word: str, offset: int) -> Iterator[Span]:
    if word in _PHASE_STYLES:
        yield offset, offset + len(word), _PHASE_STYLES[word]
