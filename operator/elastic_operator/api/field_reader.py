"""A reader for one mapping of the resource: it checks each field and collects all problems instead of raising."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RESOURCE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
"""An extended resource: DNS subdomain, slash, qualified name."""

_LARGEST = 2**53
"""Programs that store JSON numbers as doubles lose digits above this value."""


class SpecError(Exception):
    """The spec cannot be used.

    Attributes:
        problems: one sentence per problem; each begins with the path of its field.
    """

    reason = "InvalidSpec"
    """Reason of the SpecValid condition that reports the problems."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class NotPermittedError(SpecError):
    """The spec is valid, but asks for something that the operator must not do; see `forbidden_accounts`."""

    reason = "NotPermitted"


class Section:
    """One mapping of the resource with its path.

    All sections of a resource add their problems to one shared list. Every getter returns a value of its declared type
    even when it adds a problem, so that the caller can go on and collect the other problems.
    """

    def __init__(self, value: Mapping[str, Any], path: str, problems: list[str]) -> None:
        self.value = value
        self._path = path
        self._problems = problems

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def add_problem(self, key: str, message: str) -> None:
        """Add the problem `<path>.<key> <message>` to the shared list."""
        self._problems.append(f"{self._path}.{key} {message}")

    def section(self, key: str, *, required: bool = False) -> Section:
        """Return the mapping at `key`, or an empty section if the key is absent or invalid."""
        value = self.value.get(key)
        if value is None and required:
            self.add_problem(key, "is missing")
        elif value is not None and not isinstance(value, Mapping):
            self.add_problem(key, f"is {value!r}: expected an object")
        if isinstance(value, Mapping):
            return Section(value, f"{self._path}.{key}", self._problems)
        # One problem is enough: the fields of a section that is missing or invalid are not reported.
        return Section({}, f"{self._path}.{key}", [] if required or value is not None else self._problems)

    def sections(self, key: str) -> Iterator[Section]:
        """Yield one section for each mapping in the list at `key`."""
        items = self.value.get(key)
        if items is None:
            return
        if not isinstance(items, list) or not items:
            self.add_problem(key, f"is {items!r}: expected a list with at least one entry")
            return
        for i, item in enumerate(items):
            if isinstance(item, Mapping):
                yield Section(item, f"{self._path}.{key}[{i}]", self._problems)
            else:
                self.add_problem(f"{key}[{i}]", f"is {item!r}: expected an object")

    def integer(self, key: str, *, default: int | None, least: int = 1, most: int = _LARGEST) -> int:
        """Return the whole number at `key`; the field is required if `default` is None."""
        value = self.value.get(key)
        if value is None:
            if default is None:
                self.add_problem(key, "is missing")
            return least if default is None else default
        return self._whole(key, value, least, most)

    def integers(self, key: str, *, default: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the list of positive whole numbers at `key` without repeated entries, in the order of the resource.

        The field is required if `default` is None.
        """
        items = self.value.get(key)
        if items is None:
            if default is None:
                self.add_problem(key, "is missing")
            return default or (1,)
        if not isinstance(items, list) or not items:
            self.add_problem(key, f"is {items!r}: expected a list with at least one number")
            return (1,)
        # The order expresses preference, so only repeated entries are dropped.
        return tuple(dict.fromkeys(self._whole(f"{key}[{i}]", item, 1, _LARGEST) for i, item in enumerate(items)))

    def number(self, key: str, *, default: float | None, least: float) -> float | None:
        """Return the number at `key`, or `default` if the key is absent."""
        value = self.value.get(key)
        if value is None:
            return default
        # NaN fails the comparison too.
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e300:
            self.add_problem(key, f"is {value!r}: expected a number of at least {least:g}")
            return max(least, 1.0)
        return float(value)

    def real(self, key: str, *, default: float | None, least: float) -> float:
        """Return the number at `key`; the field is required if `default` is None."""
        value = self.number(key, default=default, least=least)
        if value is None:
            self.add_problem(key, "is missing")
            return max(least, 1.0)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the boolean at `key`."""
        value = self.value.get(key)
        if value is not None and not isinstance(value, bool):
            self.add_problem(key, f"is {value!r}: expected true or false")
        return value if isinstance(value, bool) else default

    def text(self, key: str, *, required: bool = False) -> str:
        """Return the string at `key`, or an empty string if the key is absent."""
        value = self.value.get(key)
        if value is not None and not isinstance(value, str):
            self.add_problem(key, f"is {value!r}: expected a string")
        elif required and not value:
            self.add_problem(key, "is missing" if value is None else "is empty")
        return value if isinstance(value, str) else ""

    def choice(self, key: str, choices: Sequence[str], *, default: str) -> str:
        """Return the value at `key`, which must be one of `choices`."""
        value = self.value.get(key)
        if value is None:
            return default
        if value not in choices:
            self.add_problem(key, f"is {value!r}: expected one of {', '.join(choices)}")
            return default
        return str(value)

    def _whole(self, key: str, value: Any, least: int, most: int) -> int:
        # JSON does not distinguish 8 from 8.0, and some clients write 8.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limits = f"of at least {least}" if most == _LARGEST else f"from {least} to {most}"
            self.add_problem(key, f"is {value!r}: expected a whole number {limits}")
            return least
        return value
