"""Finds what is newer than the pins: packages that the resolver chooses without them, and Kubernetes' releases."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Pinned exactly in pyproject.toml, because results are only promised for these versions.
FRAMEWORKS = frozenset(
    {"torch", "deepspeed", "transformers", "accelerate", "safetensors", "megatron-core", "torchdata"}
)
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?P<rest>.*)", re.DOTALL)
_RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


class Change(NamedTuple):
    """A package whose newest version differs from the pinned one; None where there is none."""

    name: str
    pinned: str | None
    newest: str | None

    def __str__(self) -> str:
        return f"{self.name:<28} {self.pinned or '-':<16} -> {self.newest or '-'}"


def loosen_pins(pyproject: Path) -> list[str]:
    """Return all requirements of all extras; those of frameworks ask for the pinned version or a newer one."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return sorted({_loosen(requirement) for group in groups for requirement in group})


def _loosen(requirement: str) -> str:
    found = _REQUIREMENT.fullmatch(requirement)
    assert found is not None, requirement
    is_pinned_framework = found["name"].lower() in FRAMEWORKS and found["rest"].startswith("==")
    return f"{found['name']}>={found['rest'][2:]}" if is_pinned_framework else requirement


def read_pins(lines: Iterable[str]) -> dict[str, str]:
    """Return version by package name from the lines of a lock file; hashes and comments are skipped."""
    found = (re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", line) for line in lines)
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def find_changes(pinned: dict[str, str], newest: dict[str, str]) -> list[Change]:
    """Return the packages whose versions differ, frameworks first."""
    names = sorted(pinned.keys() | newest.keys(), key=lambda name: (name not in FRAMEWORKS, name))
    changes = (Change(name, pinned.get(name), newest.get(name)) for name in names)
    return [change for change in changes if change.pinned != change.newest]


def newest_release(versions: Iterable[str]) -> str | None:
    """Return the newest of `v1.2.3`, without the `v`; versions before a release (`-rc.1`) do not count."""
    found = [match for match in map(_RELEASE.fullmatch, versions) if match]
    if not found:
        return None
    return ".".join(str(number) for number in max(tuple(map(int, match.groups())) for match in found))
