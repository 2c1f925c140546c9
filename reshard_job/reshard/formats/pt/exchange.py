"""The same object tree with other storages; what holds no tensor stays the same object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.formats.pt.objects import Inert, Size, StatefulDict, Storage, Tensor, rebuilt


def holders(root: Any) -> frozenset[int]:
    """Identities of all tensors and of all containers in which there is one."""
    found: dict[int, bool] = {}

    def visit(value: Any) -> bool:
        number = id(value)
        if number not in found and isinstance(value, dict | list | tuple | Inert | Tensor):
            found[number] = isinstance(value, Tensor)
            for part in _parts(value):
                if visit(part):
                    found[number] = True
        return found.get(number, False)

    visit(root)
    return frozenset(number for number, holds in found.items() if holds)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values(), *([value.state] if isinstance(value, StatefulDict) else [])]
    if isinstance(value, Inert):
        return [*value.args, value.state, *value.items, *(part for pair in value.pairs for part in pair)]
    if isinstance(value, Tensor):
        return [] if value.attributes is None else [value.attributes[1]]
    return [] if isinstance(value, Size) else list(value)


class Exchange:
    """Copies object trees; an object that occurs twice stays one object."""

    def __init__(self, storages: Mapping[int, Storage], holding: frozenset[int]) -> None:
        """`storages`: identity of an old storage -> the new one; `holding`: `holders` of the tree."""
        self._storages = storages
        self._holding = holding
        self._done: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        """The tree with the new storages."""
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
        return rebuilt(value, self.copy)
