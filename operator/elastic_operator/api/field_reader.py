"""Reads one mapping of the resource field by field, and writes down every problem instead of raising at the first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RESOURCE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
"""An extended resource: DNS subdomain, slash, qualified name."""

_LARGEST = 2**53
"""Above it, JSON numbers lose digits on their way through other programs."""


class SpecError(Exception):
    """The spec cannot be used.

    Attributes:
        problems: one sentence per problem, each beginning with the path of its field.
    """

    reason = "InvalidSpec"
    """Of the condition that tells the problems."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class NotPermittedError(SpecError):
    """The spec makes sense, but the operator must not do what it says; see `boundary`."""

    reason = "NotPermitted"


class Section:
    """One mapping of the resource, its path, and the list that all sections share for problems.

    Every getter returns a value of the promised type, even where it writes down a problem, so that reading goes on.
    """

    def __init__(self, value: Mapping[str, Any], path: str, problems: list[str]) -> None:
        self.value = value
        self._path = path
        self._problems = problems

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def problem(self, key: str, message: str) -> None:
        """Write down that `key` has a problem; `message` continues the sentence."""
        self._problems.append(f"{self._path}.{key} {message}")

    def section(self, key: str, *, required: bool = False) -> Section:
        """The mapping at `key`; an empty one where it is absent."""
        found = self.value.get(key)
        if found is None and required:
            self.problem(key, "is missing")
        elif found is not None and not isinstance(found, Mapping):
            self.problem(key, f"is {found!r}: expected an object")
        if isinstance(found, Mapping):
            return Section(found, f"{self._path}.{key}", self._problems)
        # What is inside a missing section is not reported again, one problem is enough.
        return Section({}, f"{self._path}.{key}", [] if required or found is not None else self._problems)

    def sections(self, key: str) -> Iterator[Section]:
        """The mappings in the list at `key`."""
        found = self.value.get(key)
        if found is None:
            return
        if not isinstance(found, list) or not found:
            self.problem(key, f"is {found!r}: expected a list with at least one entry")
            return
        for i, item in enumerate(found):
            if isinstance(item, Mapping):
                yield Section(item, f"{self._path}.{key}[{i}]", self._problems)
            else:
                self.problem(f"{key}[{i}]", f"is {item!r}: expected an object")

    def integer(self, key: str, *, default: int | None, least: int = 1, most: int = _LARGEST) -> int:
        """The whole number at `key`; required where `default` is None."""
        found = self.value.get(key)
        if found is None:
            if default is None:
                self.problem(key, "is missing")
            return least if default is None else default
        return self._whole(key, found, least, most)

    def integers(self, key: str, *, default: tuple[int, ...] | None) -> tuple[int, ...]:
        """The list of different numbers of at least 1 at `key`, in its order; required where `default` is None."""
        found = self.value.get(key)
        if found is None:
            if default is None:
                self.problem(key, "is missing")
            return default or (1,)
        if not isinstance(found, list) or not found:
            self.problem(key, f"is {found!r}: expected a list with at least one number")
            return (1,)
        # The order is one of preference; a repeated entry adds nothing.
        return tuple(dict.fromkeys(self._whole(f"{key}[{i}]", item, 1, _LARGEST) for i, item in enumerate(found)))

    def number(self, key: str, *, default: float | None, least: float) -> float | None:
        """The number at `key`, or `default`."""
        found = self.value.get(key)
        if found is None:
            return default
        # NaN fails the comparison too.
        if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= 1e300:
            self.problem(key, f"is {found!r}: expected a number of at least {least:g}")
            return max(least, 1.0)
        return float(found)

    def real(self, key: str, *, default: float | None, least: float) -> float:
        """The number at `key`; required where `default` is None."""
        found = self.number(key, default=default, least=least)
        if found is None:
            self.problem(key, "is missing")
            return max(least, 1.0)
        return found

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false at `key`."""
        found = self.value.get(key)
        if found is not None and not isinstance(found, bool):
            self.problem(key, f"is {found!r}: expected true or false")
        return found if isinstance(found, bool) else default

    def text(self, key: str, *, required: bool = False) -> str:
        """The string at `key`; empty where it is absent."""
        found = self.value.get(key)
        if found is not None and not isinstance(found, str):
            self.problem(key, f"is {found!r}: expected a string")
        elif required and not found:
            self.problem(key, "is missing" if found is None else "is empty")
        return found if isinstance(found, str) else ""

    def choice(self, key: str, choices: Sequence[str], *, default: str) -> str:
        """One of `choices` at `key`."""
        found = self.value.get(key)
        if found is None:
            return default
        if found not in choices:
            self.problem(key, f"is {found!r}: expected one of {', '.join(choices)}")
            return default
        return str(found)

    def _whole(self, key: str, found: Any, least: int, most: int) -> int:
        # JSON does not tell 8 from 8.0, and some clients write the latter.
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            limits = f"of at least {least}" if most == _LARGEST else f"from {least} to {most}"
            self.problem(key, f"is {found!r}: expected a whole number {limits}")
            return least
        return found
