"""Output of `kubectl etj`; no other module prints.

Texts from pods, nodes and other tenants are escaped before they reach a terminal: see `text.escape`.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

from elastic_operator.plugin.pages.text import escape, make_printable
from elastic_operator.plugin.terminal import print_coloured

if TYPE_CHECKING:
    import yaml

_GO_TYPES = (
    ("float", r"[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9_]+)?$", "-+.0123456789"),
    ("int", r"[-+]?0[bBoOxX][0-9a-fA-F_]+$", "-+0"),
    ("bool", r"[yYnN]$", "yYnN"),
)
"""Plain scalars that kubectl's YAML reads as another type than PyYAML does: type, pattern, first characters."""


def write_text(text: str, *, is_coloured: bool = False, flush: bool = False) -> None:
    """Print formatted text on stdout, with colours if they are wanted."""
    safe = _encodable(escape(text, keep="\n"), sys.stdout.encoding)
    if is_coloured:
        print_coloured(safe)
    else:
        print(safe, flush=flush)


def write_json(value: Any) -> None:
    """Print a value as JSON; `json.dumps` escapes non-ASCII characters, and DEL is escaped here."""
    _write(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def write_json_line(value: Any) -> None:
    """Print a value as JSON on one line, at once."""
    print(json.dumps(value).replace("\x7f", "\\u007f"), flush=True)


def write_yaml(value: Any) -> None:
    """Print a value as YAML; every text stays on one line, and all but printable ASCII is escaped."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = None if text.isascii() and text.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    quote_as_for_kubectl(Dumper)
    _write(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=float("inf")).removesuffix("\n"))


def quote_as_for_kubectl(dumper: type[yaml.SafeDumper]) -> None:
    """Make a class put every text into quotes that kubectl would read as a number or boolean, such as `1e-4`."""
    for name, pattern, first in _GO_TYPES:
        dumper.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(pattern), list(first))


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
