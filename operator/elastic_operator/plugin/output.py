"""Where the output of `kubectl etj` leaves the program; no other module prints.

Nothing that a pod, a node or another tenant wrote reaches a terminal as it is: see `text.escape`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from elastic_operator.plugin.pages.text import escape, printable


def write_text(text: str) -> None:
    """Print text that was laid out here, on stdout."""
    _write(escape(text, keep="\n"))


def write_json(value: Any) -> None:
    """Print a value as JSON, whose strings escape what is not ASCII; DEL is escaped here."""
    _write(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def write_log_line(line: str, *, raw: bool, flush: bool) -> None:
    """Print one line that a container wrote; tabs stay. `raw`: as it is."""
    _write(line if raw else escape(line.removesuffix("\r"), keep="\t"))
    if flush:
        sys.stdout.flush()


def write_note(text: str) -> None:
    """Print a line about the answer, on stderr."""
    print(_encodable(printable(text), sys.stderr.encoding), file=sys.stderr)


def _write(text: str) -> None:
    print(_encodable(text, sys.stdout.encoding))


def _encodable(text: str, encoding: str | None) -> str:
    """Return `text` with escapes in place of what the stream's encoding cannot write."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
