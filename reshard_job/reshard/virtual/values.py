"""Check values of a manifest that may have been edited: return the value, or raise `ValueError`."""

from __future__ import annotations

from typing import Any

from reshard.tensors.layout import ITEM_BYTES


def require_text(value: Any) -> str:
    """Return a string."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.60}: expected a string")
    return value


def require_count(value: Any) -> int:
    """Return an integer from 0 that is small enough for sums."""
    return require_below(value, 1 << 62)


def require_below(value: Any, limit: int) -> int:
    """Return an integer from 0 and below a limit."""
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.60}: expected an integer from 0 and below {limit}")
    return value


def require_shape(value: Any) -> tuple[int, ...]:
    """Return the sizes of a tensor's dims."""
    return tuple(require_count(size) for size in value)


def require_dtype(value: Any) -> str:
    """Return a type of elements."""
    if value not in ITEM_BYTES:
        raise ValueError(f"type {value!r:.40}: expected one of {', '.join(ITEM_BYTES)}")
    return str(value)


def require_relative_path(path: Any) -> str:
    """Return a relative path that stays in its folder."""
    if not require_text(path) or path.startswith("/") or "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"file name {path!r:.200} leaves the folder")
    return str(path)
