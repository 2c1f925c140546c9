"""Output of `kubectl etj`; no other module prints.

Texts from pods, nodes and other tenants are escaped before they reach a terminal: see `text.escape`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from elastic_operator.plugin.pages.text import escape, make_printable


def write_text(text: str) -> None:
    """Print formatted text on stdout."""
    _write(escape(text, keep="\n"))


def write_json(value: Any) -> None:
    """Print a value as JSON; `json.dumps` escapes non-ASCII characters, and DEL is escaped here."""
    _write(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def write_log_line(line: str, *, raw: bool, flush: bool) -> None:
    """Print one line that a container wrote, escaped except for tabs; with `raw` print it unchanged."""
    _write(line if raw else escape(line.removesuffix("\r"), keep="\t"))
    if flush:
        sys.stdout.flush()


def write_note(text: str) -> None:
    """Print a note or an error as one line on stderr."""
    print(_encodable(make_printable(text), sys.stderr.encoding), file=sys.stderr)


def _write(text: str) -> None:
    print(_encodable(text, sys.stdout.encoding))


def _encodable(text: str, encoding: str | None) -> str:
    """Escape the characters of `text` that the stream's encoding cannot express."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
