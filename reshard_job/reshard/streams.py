"""What a command says, and where: nothing that happens to the listener may decide what becomes of a conversion.

A terminal is closed, the reader of a pipe leaves, a log fills its disk: stderr is then no longer written. Data that
cannot be written to stdout is an error, unless its reader has seen enough (`| head`).
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import TextIO

from reshard.errors import TargetError

_LEGIBLE = "reshard.legible"
_CODES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


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
    """Names that are no text as the bytes that they are, characters that the encoding lacks as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    try:
        return error.object[error.start : error.end].encode("ascii", "surrogateescape"), error.end
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


def harmless(text: str) -> str:
    """Text without what a terminal obeys: names in a checkpoint are chosen by others."""
    return text.translate(_CODES)


def overwrites(stream: TextIO) -> bool:
    """It is a terminal on which a line can be written again."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def tell(text: str, stream: TextIO | None = None) -> None:
    """Log or progress, on stderr if no other stream is named; where it cannot be written, it is not."""
    stream = sys.stderr if stream is None else stream
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _let_go(stream)


def say(text: str) -> None:
    """Data, on stdout.

    Raises:
        TargetError: it cannot be written, and that is not because the reader has left.
    """
    try:
        sys.stdout.write(harmless(text) + "\n")
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
