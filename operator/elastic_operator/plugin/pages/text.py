"""Formatting of values for people, and escaping of untrusted text. Pure."""

from __future__ import annotations

import dataclasses
import datetime
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from unicodedata import category

from elastic_operator.reconcile.notifications.recovery_summary import format_size, pluralize

__all__ = [
    "NONE", "WIDTH", "escape", "format_age", "format_clock", "format_fields", "format_seconds", "format_size",
    "format_table", "make_printable", "pluralize", "wrap",
]  # fmt: skip

_T = TypeVar("_T")

_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that control a terminal, are invisible, reverse text, or break a line."""

_JOINERS = "\u200c\u200d"
"""Characters of category Cf that are not escaped, because several scripts need them."""

_BREAKS = re.compile(r"[\t\n\r]+")

WIDTH = 110
"""Columns at which paragraphs are wrapped."""

NONE = "-"


def escape(text: str, *, keep: str = "") -> str:
    r"""Escape all characters of `text` that a terminal would interpret or hide, as `\x1b` or `\u202e`.

    Letters of all scripts stay unchanged. Escaping an escaped text changes nothing.

    Args:
        text: untrusted text.
        keep: control characters that stay, such as the line breaks of formatted text.
    """
    if text.isprintable():
        return text
    safe = keep + _JOINERS
    return "".join(item if item in safe or category(item) not in _UNSAFE else _escaped(item) for item in text)


def make_printable(value: _T) -> _T:
    """Copy a text, or data that contains texts, with every text escaped and on one line.

    Everything that comes from the cluster passes through this function before it is formatted, so that no text can
    imitate a line, a column or a colour of the program's own output.
    """
    changed: Any = value
    if isinstance(value, str):
        text = escape(_BREAKS.sub(" ", value))
        changed = value if text == value else text
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = dataclasses.replace(value, **{name: make_printable(getattr(value, name)) for name in names})
    elif isinstance(value, Mapping):
        changed = {make_printable(key): make_printable(item) for key, item in value.items()}
    elif isinstance(value, tuple | list):
        changed = type(value)(make_printable(item) for item in value)
    return changed  # type: ignore[no-any-return]


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows as aligned columns, three spaces apart, as kubectl does."""
    lines = [tuple(header), *(tuple(cell or NONE for cell in row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def format_fields(pairs: Iterable[tuple[str, str]]) -> str:
    """Format pairs as `Name:   value` lines, as `kubectl describe` does; wrap long values and omit empty ones."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0) + 1
    return "\n".join(f"{name + ':':<{width}}  {wrap(value, width + 2)}" for name, value in shown)


def wrap(value: str, indent: int) -> str:
    """Wrap `value` at WIDTH columns, and indent all lines but the first."""
    return textwrap.fill(
        " ".join(value.split()),
        width=max(40, WIDTH - indent),
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\n", "\n" + " " * indent)


def format_age(seconds: float | None) -> str:
    """Format a duration as kubectl formats ages: `45s`, `2m10s`, `3h5m`, `12d`."""
    if seconds is None:
        return NONE
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return _two(minutes, "m", whole % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _two(days, "d", hours % 24, "h")
    return f"{days}d" if days < 730 else f"{days // 365}y"


def format_seconds(value: float) -> str:
    """Format a measured duration: in tenths of a second below ten minutes, else as an age."""
    return f"{value:.1f} s" if value < 600 else format_age(value)


def format_clock(moment: float | None) -> str:
    """Format seconds since the epoch as date and time in UTC."""
    if moment is None:
        return NONE
    return datetime.datetime.fromtimestamp(moment, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"
