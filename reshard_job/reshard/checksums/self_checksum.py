"""The checksum that COMMIT.json states of itself, so that one flipped bit anywhere in it is detected.

COMMIT.json protects all other files of a checkpoint; this checksum protects COMMIT.json. docs/checkpoint-format.md is
normative.
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
    """Encode a JSON object as the bytes of a file, with the checksum of these bytes among its fields."""
    blank = (json.dumps({**value, FIELD: _BLANK}, indent=1, sort_keys=True) + "\n").encode()
    line = (
        f'\n "{FIELD}": "'.encode()
    )  # only the object's own fields have an indent of 1, and strings hold no line breaks
    stated = f"{_PREFIX}{zlib.crc32(blank):08x}"
    return blank.replace(line + _BLANK.encode(), line + stated.encode())


def check_self_checksum(content: bytes, value: Mapping[str, Any]) -> None:
    """Compare the bytes of a file with the checksum among its fields; files of older writers have no such field.

    Raises:
        ValueError: they differ, or the checksum is in another field.
    """
    astray = [key for key, item in value.items() if key != FIELD and str(item).startswith(_PREFIX)]
    if astray:  # if the field's name is damaged, the file would otherwise look like one of an older writer
        raise ValueError(f"a checksum is called {astray[0]!r:.40}, expected {FIELD}: damaged")
    if FIELD not in value:
        return
    stated = value[FIELD]
    if not isinstance(stated, str) or _STATED.fullmatch(stated) is None:
        raise ValueError(f"{FIELD} is {stated!r:.40}, expected {_PREFIX} and 8 hex digits: damaged")
    actual = f"{_PREFIX}{zlib.crc32(content.replace(stated.encode(), _BLANK.encode())):08x}"
    if actual != stated:
        raise ValueError(f"its content has the checksum {actual}, it states {stated}: damaged, or edited")
