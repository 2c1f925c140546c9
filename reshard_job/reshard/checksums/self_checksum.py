"""The checksum that COMMIT.json states of itself, so that one flipped bit anywhere in it is noticed.

The marker protects all other files and nothing protects the marker but this. docs/checkpoint-format.md is normative.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

FIELD = "checksum"
_PREFIX = "crc32:"
_BLANK = _PREFIX + "0" * 8
_STATED = re.compile(r"crc32:[0-9a-f]{8}")


def with_self_checksum(value: Mapping[str, Any]) -> bytes:
    """A JSON object as the bytes of a file, with its checksum among the fields."""
    blank = (json.dumps({**value, FIELD: _BLANK}, indent=1, sort_keys=True) + "\n").encode()
    line = f'\n "{FIELD}": "'.encode()  # an indent of 1 is that of the object's own fields; strings hold no line breaks
    stated = f"{_PREFIX}{zlib.crc32(blank):08x}"
    return blank.replace(line + _BLANK.encode(), line + stated.encode())


def check_self_checksum(content: bytes, value: Mapping[str, Any]) -> None:
    """Hold the bytes of a file against the checksum among its fields; older writers state none.

    Raises:
        ValueError: they differ, or the checksum is not where it belongs.
    """
    astray = [key for key, item in value.items() if key != FIELD and str(item).startswith(_PREFIX)]
    if astray:  # a damaged name of the field would otherwise pass for an older writer's file
        raise ValueError(f"a checksum is called {astray[0]!r:.40}, expected {FIELD}: damaged")
    if FIELD not in value:
        return
    stated = value[FIELD]
    if not isinstance(stated, str) or _STATED.fullmatch(stated) is None:
        raise ValueError(f"{FIELD} is {stated!r:.40}, expected {_PREFIX} and 8 hex digits: damaged")
    actual = f"{_PREFIX}{zlib.crc32(content.replace(stated.encode(), _BLANK.encode())):08x}"
    if actual != stated:
        raise ValueError(f"its content has the checksum {actual}, it states {stated}: damaged, or edited")
