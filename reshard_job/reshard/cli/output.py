"""What a command says, and where: nothing that happens to the listener may decide what becomes of a conversion.

A terminal is closed, the reader of a pipe leaves, a log fills its disk: stderr is then no longer written. Data that
cannot be written to stdout is an error, unless its reader has seen enough (`| head`).

All that the program says leaves it here, line by line, through `printable`: names in a checkpoint are chosen by others.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from reshard.errors import TargetError

_LEGIBLE = "reshard.legible"
_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF  # what Python makes of bytes of a name that are no text (PEP 383)


def open_streams() -> None:
    """Have streams that take every text: a process may be started without (`>&-`), or with a narrow encoding."""
    codecs.register_error(_LEGIBLE, _legible)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_LEGIBLE)


def _legible(error: UnicodeError) -> tuple[str | bytes, int]:
    """Characters that the encoding lacks as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return codecs.backslashreplace_errors(error)


def printable(line: str) -> str:
    """Return one line of text with escapes for every character that a terminal, or the reader's eye, would obey.

    These are all that Unicode does not call printable: control characters (line breaks and tabs among them), marks that
    reverse the direction of text or have no width, separators of lines and paragraphs, and halves of surrogate pairs.
    A byte of a file's name that is no text becomes `\\xff`. Letters of all languages stay.
    """
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else _escape(ord(letter)) for letter in line)


def _escape(code: int) -> str:
    if _FIRST_BYTE <= code <= _LAST_BYTE:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def overwrites(stream: TextIO) -> bool:
    """It is a terminal on which a line can be written again."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def tell(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Write lines of a log, on stderr if no other stream is named; where they cannot be written, they are not."""
    _write("".join(f"{printable(line)}\n" for line in lines), sys.stderr if stream is None else stream)


def show(line: str, stream: TextIO) -> None:
    """Write a line over the one that a terminal shows."""
    _write(f"\r\x1b[K{printable(line)}", stream)


def _write(text: str, stream: TextIO) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _let_go(stream)


def say(lines: Iterable[str]) -> None:
    """Write lines of data, on stdout.

    Raises:
        TargetError: it cannot be written, and that is not because the reader has left.
    """
    try:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
        sys.stdout.flush()
    except BrokenPipeError:
        _let_go(sys.stdout)
    except OSError as error:
        _let_go(sys.stdout)
        raise TargetError(f"cannot be written: {error.strerror or error}", path="standard output") from error


def _let_go(stream: TextIO) -> None:
    """What is still in its buffer would fail again when the process ends, and change its exit code."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not one of the process
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
