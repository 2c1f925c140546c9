"""Copy an object tree with other storages; objects that hold no tensor are not copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.formats.pt.objects import Inert, Size, StatefulDict, Storage, Tensor, copy_container


def find_holders(root: Any) -> frozenset[int]:
    """Find the identities of all tensors and of all containers that hold one."""
    found: dict[int, bool] = {}

    def visit(value: Any) -> bool:
        number = id(value)
        if number not in found and isinstance(value, dict | list | tuple | Inert | Tensor):
            found[number] = isinstance(value, Tensor)
            for part in _list_children(value):
                if visit(part):
                    found[number] = True
        return found.get(number, False)

    visit(root)
    return frozenset(number for number, holds in found.items() if holds)


def _list_children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values(), *([value.state] if isinstance(value, StatefulDict) else [])]
    if isinstance(value, Inert):
        return [*value.args, value.state, *value.items, *(part for pair in value.pairs for part in pair)]
    if isinstance(value, Tensor):
        return [] if value.attributes is None else [value.attributes[1]]
    return [] if isinstance(value, Size) else list(value)


class StorageExchange:
    """Copier of object trees with new storages; an object that occurs twice is copied once."""

    def __init__(self, storages: Mapping[int, Storage], holding: frozenset[int]) -> None:
        """Create a copier.

        Args:
            storages: identity of an old storage -> the new storage.
            holding: identities that `find_holders` returned for the tree.
        """
        self._storages = storages
        self._holding = holding
        self._done: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        """Copy a tree, with the new storages."""
        if id(value) not in self._holding:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._copy(value)
        return self._done[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            attributes = None if value.attributes is None else (value.attributes[0], self.copy(value.attributes[1]))
            storage = self._storages.get(id(value.storage), value.storage)
            return dataclasses.replace(value, storage=storage, attributes=attributes)
        return copy_container(value, self.copy)
