"""Limit the keys, depth and size of the object tree of a pickle, which other functions walk, copy or print.

A pickle can refer to one object many times. Forty pairs, each of which holds the one before twice, unfold to a tree of
2^40 leaves, and a list can hold itself. Real checkpoints share few containers and are about ten levels deep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import CorruptSourceError, ReshardError, UnsafePickleError
from reshard.formats.pt.objects import Global, Inert, Size, StatefulDict, Tensor

MAX_DEPTH = 100
"""Most levels of containers; functions that walk the tree need a few frames for each, and Python allows 1000 in all."""

MAX_UNFOLDED = 1 << 20
"""Most objects that a walk over the tree may visit, in addition to `MAX_SHARING` visits of each object."""

MAX_SHARING = 64

_MAX_KEY_PARTS = 16  # a tuple is hashed anew each time that it is a key
_MAX_KEY_CHARACTERS = 1 << 14  # equal texts of two objects are compared whole
_MAX_KEY_BITS = 60  # integers up to 2**61 - 1 differ in their hashes; a file can make larger ones collide
_SCALARS = (str, int, float, bool, bytes, type(None))
_HINT = "the file was tampered with, or holds objects that do not belong into a checkpoint: save plain data"


class LimitError(ValueError):
    """A pickle is well formed, and has more of something than is read."""


def make_pickle_error(error: Exception, position: int, path: str) -> ReshardError:
    """Make the error for a pickle that could not be run further than to `position`."""
    if isinstance(error, LimitError):
        return UnsafePickleError(f"its pickle, at byte {position}: {error}", path=path, hint=_HINT)
    what = f"{type(error).__name__}: {error!s:.300}"
    return CorruptSourceError(f"broken pickle at byte {position}: {what}", path=path)


def check_key(key: Any) -> Any:
    """Check that the hash of a key takes constant time (a tuple of tuples can take 2**depth), and return the key."""
    kind = type(key)
    if kind is Inert or (kind is str and len(key) <= _MAX_KEY_CHARACTERS):  # an Inert hashes by identity
        return key
    if isinstance(key, str | bytes):
        if len(key) > _MAX_KEY_CHARACTERS:
            raise LimitError(f"a key of {len(key)} characters: at most {_MAX_KEY_CHARACTERS} are read")
    elif isinstance(key, tuple):
        if len(key) > _MAX_KEY_PARTS:
            raise LimitError(f"a key is a tuple of {len(key)} parts: at most {_MAX_KEY_PARTS} are read")
        for part in key:
            if not isinstance(part, _SCALARS):
                raise LimitError("a key is a tuple of something other than scalars")
            check_key(part)
    elif isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS:
        raise LimitError(f"a key is an integer of {key.bit_length()} bits")
    elif not isinstance(key, (*_SCALARS, Global, Inert)):
        raise (LimitError if isinstance(key, Tensor) else ValueError)(f"a key is a {type(key).__name__}")
    return key


def check_tree_size(root: Any, path: str, weights: Mapping[int, int]) -> None:
    """Check that a walk over the tree ends soon, in time linear in the number of objects.

    Args:
        root: root of the tree.
        path: path of the file, for messages.
        weights: number of objects that a long text or number counts as, by identity.

    Raises:
        UnsafePickleError: the tree is too deep, too large when unfolded, or an object contains itself.
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
            sizes[number] = 1 + sum(sizes.get(id(child), 1) for child in _list_children(value))
        elif number in entered:
            raise UnsafePickleError(
                f"its pickle has a {type(value).__name__} that contains itself", path=path, hint=_HINT
            )
        elif number not in sizes:
            children = _list_children(value)
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


def _list_children(value: Any) -> list[Any]:
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
