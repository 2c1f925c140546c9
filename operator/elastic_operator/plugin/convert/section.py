"""Reads the fields of an object one by one, and notes those that nobody has asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


class ConvertError(Exception):
    """The object cannot be converted truly; the message says which field, what was expected, and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Notes:
    """Notes for the reader of the result.

    Attributes:
        left_out: fields that have no counterpart, or that the operator sets by itself.
        decisions: values that the source does not hold, and what was assumed.
    """

    left_out: list[str] = dataclasses.field(default_factory=list)
    decisions: list[str] = dataclasses.field(default_factory=list)

    def leave_out(self, path: str, why: str) -> None:
        """Note that a field of the source is not in the result."""
        self.left_out.append(f"{path}: {why}")

    def decide(self, path: str, what: str) -> None:
        """Note that a field of the result needs a decision."""
        self.decisions.append(f"{path}: {what}")


class Section:
    """A mapping whose fields are taken one by one; null counts as absent.

    Args:
        value: the mapping.
        path: of the mapping in its object, for messages; empty for the object itself.
        notes: where fields are noted that are left out.
    """

    def __init__(self, value: Any, path: str, notes: Notes) -> None:
        if not isinstance(value, Mapping):
            raise ConvertError(f"{path or 'the object'} is {_kind(value)}: expected a mapping")
        self.path = path
        self._rest = {str(key): item for key, item in value.items() if item is not None}
        self._notes = notes

    def __contains__(self, name: str) -> bool:
        return name in self._rest

    def names(self) -> list[str]:
        """Return the names of the fields that have not been taken."""
        return list(self._rest)

    def at(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Return the value of a field as it is, None if it is absent."""
        return self._rest.pop(name, None)

    def as_mapping(self) -> Mapping[str, Any]:
        """Take all fields as they are."""
        value, self._rest = self._rest, {}
        return value

    def section(self, name: str) -> Section:
        """Return a mapping; an absent one is empty."""
        return Section(self._rest.pop(name, {}), self.at(name), self._notes)

    def sections(self, name: str) -> list[Section]:
        """Return a list of mappings; an absent one is empty."""
        value = self._rest.pop(name, [])
        if not isinstance(value, list):
            raise ConvertError(f"{self.at(name)} is {_kind(value)}: expected a list")
        return [Section(item, f"{self.at(name)}[{index}]", self._notes) for index, item in enumerate(value)]

    def text(self, name: str) -> str:
        """Return a text, empty if it is absent."""
        value = self._rest.pop(name, "")
        if not isinstance(value, str):
            raise ConvertError(f"{self.at(name)} is {_kind(value)}: expected text")
        return value

    def texts(self, name: str) -> list[str] | None:
        """Return a list of texts, None if it is absent."""
        value = self._rest.pop(name, None)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise ConvertError(f"{self.at(name)}: expected a list of texts")
        return value

    def whole(self, name: str, least: int = 0) -> int | None:
        """Return a whole number of at least `least`, None if it is absent."""
        value = self._rest.pop(name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConvertError(f"{self.at(name)} is {value!r}: expected a whole number from {least} on")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; absent is false."""
        value = self._rest.pop(name, False)
        if not isinstance(value, bool):
            raise ConvertError(f"{self.at(name)} is {_kind(value)}: expected true or false")
        return value

    def leave_out(self, why: str, *names: str) -> None:
        """Note for each of these fields that is there why it is left out."""
        for name in names:
            if self._rest.pop(name, None) not in (None, {}, [], "", False):
                self._notes.leave_out(self.at(name), why)

    def refuse(self, why: str, *names: str) -> None:
        """Raise ConvertError if one of these fields is there."""
        for name in names:
            if self._rest.pop(name, None) not in (None, {}, [], "", False):
                raise ConvertError(f"{self.at(name)} cannot be converted: {why}")

    def finish(self) -> None:
        """Note all fields that nobody has taken."""
        self.leave_out("the converter does not know it", *self.names())


def _kind(value: Any) -> str:
    names = {str: "text", int: "a number", float: "a number", bool: "true or false", list: "a list", dict: "a mapping"}
    return names.get(type(value), "null")
