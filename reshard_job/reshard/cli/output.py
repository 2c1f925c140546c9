"""Write the command's data to stdout, its log to stderr, and its report to a file.

A stderr that cannot be written does not fail a conversion: if its terminal is closed, its pipe has no reader or its
disk is full, nothing more is written to it. Data that cannot be written to stdout is an error, unless the reader of the
pipe has left (`| head`).

Every line passes through `printable`, because others choose the names in a checkpoint.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from reshard.contract import ReshardReport
from reshard.errors import TargetError, UsageError

_LEGIBLE = "reshard.legible"
_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF  # Python's code points for undecodable bytes of a file name (PEP 383)


def open_streams() -> None:
    """Make stdout and stderr take every text: a process may start without them (`>&-`), or with a narrow encoding."""
    codecs.register_error(_LEGIBLE, _legible)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_LEGIBLE)


def _legible(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that the encoding lacks by escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return codecs.backslashreplace_errors(error)


def printable(line: str) -> str:
    """Escape every character of a line that a terminal interprets or that a reader cannot see.

    These are the characters that Unicode does not call printable: control characters (line breaks and tabs among them),
    marks that reverse the direction of text or have no width, separators of lines and paragraphs, and halves of
    surrogate pairs. An undecodable byte of a file name becomes a backslash, `x` and two digits. Letters of all
    languages stay.
    """
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else _escape(ord(letter)) for letter in line)


def _escape(code: int) -> str:
    if _FIRST_BYTE <= code <= _LAST_BYTE:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def can_overwrite_line(stream: TextIO) -> bool:
    """Return True if the stream is a terminal on which a line can be overwritten."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def write_log(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Write lines of the log, on stderr if no other stream is named; drop them if they cannot be written."""
    _write("".join(f"{printable(line)}\n" for line in lines), sys.stderr if stream is None else stream)


def overwrite_line(line: str, stream: TextIO) -> None:
    """Write a line over the last line of a terminal."""
    _write(f"\r\x1b[K{printable(line)}", stream)


def _write(text: str, stream: TextIO) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _discard(stream)


def write_data(lines: Iterable[str]) -> None:
    """Write lines of data on stdout.

    Raises:
        TargetError: stdout cannot be written, and that is not because its reader has left.
    """
    try:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        _discard(sys.stdout)
        raise TargetError(f"cannot be written: {error.strerror or error}", path="standard output") from error


def _discard(stream: TextIO) -> None:
    """Send a stream to nowhere: otherwise flushing its buffer at exit would fail again, and change the exit code."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not one of the process
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def check_report(report: str | None, *checkpoints: Path, option: str = "--report") -> None:
    """Refuse a report file that would damage a checkpoint or has no folder, before a byte is moved.

    Args:
        report: path of the file, or None.
        checkpoints: folders of source and target.
        option: that names the file.

    Raises:
        UsageError: it lies in the source or in the target.
        TargetError: there is no such folder.
    """
    if report is None:
        return
    path = Path(report).absolute()
    if any(folder in path.parents for folder in checkpoints):
        raise UsageError(f"{option} {report}: lies inside of a checkpoint", hint="name a file somewhere else")
    try:
        has_folder = path.parent.is_dir() and not path.is_dir()
    except OSError as error:
        raise TargetError(f"the report cannot be written: {error.strerror}", path=report) from error
    if not has_folder:
        raise TargetError("the report cannot be written: no such folder, or a folder itself", path=report)


def write_report(path: str | None, report: ReshardReport) -> None:
    """Write a report into a file; do nothing if `path` is None.

    Raises:
        TargetError: the file cannot be written.
    """
    if path is None:
        return
    try:
        Path(path).write_text(report.to_json(), encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise TargetError(f"the report cannot be written: {why}", path=path) from error
