"""Values of a manifest that somebody may have edited: each is what it has to be, or a `ValueError` says what it is."""

from __future__ import annotations

from typing import Any

from reshard.tensors.layout import ITEM_BYTES


def text(value: Any) -> str:
    """A string."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.60}: expected a string")
    return value


def count(value: Any) -> int:
    """An integer from 0 that leaves room for sums."""
    return below(value, 1 << 62)


def below(value: Any, limit: int) -> int:
    """An integer from 0 and below a limit."""
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.60}: expected an integer from 0 and below {limit}")
    return value


def shape(value: Any) -> tuple[int, ...]:
    """Sizes of a tensor's dims."""
    return tuple(count(size) for size in value)


def dtype(value: Any) -> str:
    """A type of elements."""
    if value not in ITEM_BYTES:
        raise ValueError(f"type {value!r:.40}: expected one of {', '.join(ITEM_BYTES)}")
    return str(value)


def inside(path: Any) -> str:
    """A relative path that stays in its folder."""
    if not text(path) or path.startswith("/") or "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"file name {path!r:.200} leaves the folder")
    return str(path)
