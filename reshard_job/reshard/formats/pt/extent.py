"""How deep and how large the object tree of a pickle is, for those who walk, copy or print it.

A pickle can refer to one object many times. Forty pairs, each of the one before twice, are a tree of 2^40 leaves for
whoever walks it, and a list can hold itself. Real checkpoints share few containers and are about ten levels deep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsafePickleError
from reshard.formats.pt.objects import Inert, Size, StatefulDict, Tensor

MAX_DEPTH = 100
"""Levels of containers; functions that walk the tree need a few frames for each, Python allows 1000 in all."""

MAX_UNFOLDED = 1 << 20
"""Objects that a walk over the tree meets, besides `MAX_SHARING` times those that there are."""

MAX_SHARING = 64

_HINT = "the file was tampered with, or holds objects that do not belong into a checkpoint: save plain data"


def check_extent(root: Any, path: str, weights: Mapping[int, int]) -> None:
    """Check that a walk over the tree ends soon; takes time linear in the number of objects.

    Args:
        root: of the tree.
        path: of the file, for messages.
        weights: of long texts and numbers, by identity: as how many objects each counts.

    Raises:
        UnsafePickleError: too deep, too large when unfolded, or an object that contains itself.
    """
    sizes: dict[int, int] = dict(weights)
    entered: set[int] = set()
    count, depth = sum(weights.values()), 0
    todo: list[tuple[Any, bool]] = [(root, False)]
    while todo:
        value, leaving = todo.pop()
        number = id(value)
        if leaving:
            depth -= 1
            entered.discard(number)
            sizes[number] = 1 + sum(sizes.get(id(child), 1) for child in _children(value))
        elif number in entered:
            raise UnsafePickleError(
                f"its pickle has a {type(value).__name__} that contains itself", path=path, hint=_HINT
            )
        elif number not in sizes:
            children = _children(value)
            count += 1 + len(children)
            depth += 1
            if depth > MAX_DEPTH:
                raise UnsafePickleError(f"its pickle is more than {MAX_DEPTH} levels deep", path=path, hint=_HINT)
            entered.add(number)
            todo.append((value, True))
            todo += [(child, False) for child in children if isinstance(child, _CONTAINERS) and type(child) is not Size]
    unfolded = sizes.get(id(root), 1)
    if unfolded > MAX_UNFOLDED + MAX_SHARING * count:
        raise UnsafePickleError(
            f"its pickle has {count} objects that unfold to 2^{unfolded.bit_length() - 1}", path=path, hint=_HINT
        )


_CONTAINERS = (dict, list, tuple, Inert, Tensor)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        state = [value.state] if isinstance(value, StatefulDict) else []
        return [*value.keys(), *value.values(), *state]
    if isinstance(value, Inert):
        if not (value.items or value.pairs):
            return [*value.args, value.state]
        return [*value.args, value.state, *value.items, *(part for pair in value.pairs for part in pair)]
    if isinstance(value, Tensor):
        return [] if value.attributes is None else [value.attributes[1]]
    if isinstance(value, Size):
        return []
    return list(value) if isinstance(value, list | tuple) else []
