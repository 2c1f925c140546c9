"""How values are written for people. Pure."""

from __future__ import annotations

import dataclasses
import datetime
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from unicodedata import category

_T = TypeVar("_T")

_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of what commands a terminal, hides, turns the direction of text, or breaks a line."""

_JOINERS = "\u200c\u200d"
"""Also of category Cf; several scripts cannot be written without them."""

_BREAKS = re.compile(r"[\t\n\r]+")

WIDTH = 110
"""Columns that running text is wrapped at."""

NONE = "-"


def escape(text: str, *, keep: str = "") -> str:
    """Return `text` with everything that a terminal would obey or hide written as `\\x1b` or `\\u202e`.

    Letters of all scripts stay as they are. Escaping twice is escaping once.

    Args:
        keep: characters that stay although they control the terminal: the line breaks of text that was laid out here.
    """
    if text.isprintable():
        return text
    safe = keep + _JOINERS
    return "".join(item if item in safe or category(item) not in _UNSAFE else _escaped(item) for item in text)


def printable(value: _T) -> _T:
    """Return a copy of text, or of data with text anywhere in it, in which every text is one line and escaped.

    Whatever comes from the cluster passes through this before it is laid out: no text can pretend to be a line, a
    column or a colour of the program's own.
    """
    changed: Any = value
    if isinstance(value, str):
        text = escape(_BREAKS.sub(" ", value))
        changed = value if text == value else text
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = dataclasses.replace(value, **{name: printable(getattr(value, name)) for name in names})
    elif isinstance(value, Mapping):
        changed = {printable(key): printable(item) for key, item in value.items()}
    elif isinstance(value, tuple | list):
        changed = type(value)(printable(item) for item in value)
    return changed  # type: ignore[no-any-return]


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns, three spaces apart, as kubectl prints them."""
    lines = [tuple(header), *(tuple(cell or NONE for cell in row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """`Name:   value` lines, as in `kubectl describe`; long values are wrapped, empty ones left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0) + 1
    return "\n".join(f"{name + ':':<{width}}  {wrapped(value, width + 2)}" for name, value in shown)


def wrapped(value: str, indent: int) -> str:
    """`value` in lines of WIDTH columns, all but the first indented."""
    return textwrap.fill(
        " ".join(value.split()),
        width=max(40, WIDTH - indent),
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\n", "\n" + " " * indent)


def age(seconds: float | None) -> str:
    """A duration as kubectl writes ages: `45s`, `2m10s`, `3h5m`, `12d`."""
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


def seconds(value: float) -> str:
    """A measured duration: tenths below ten minutes, then as an age."""
    return f"{value:.1f} s" if value < 600 else age(value)


def size(num_bytes: float) -> str:
    """Bytes in decimal units, as disks and networks are sold."""
    value, units = float(num_bytes), ("B", "kB", "MB", "GB", "TB", "PB")
    for unit in units:
        if value < 999.5 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes everything")


def clock(moment: float | None) -> str:
    """Date and time in UTC."""
    if moment is None:
        return NONE
    return datetime.datetime.fromtimestamp(moment, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def count(number: int, what: str) -> str:
    """`1 step`, `3 steps`, `2 losses`."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"
