"""Reads files of pins such as requirements.lock: one version of each package, and the hashes of its files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)")
_HASH = re.compile(r"\s--hash=(\S*)")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


class PinError(ValueError):
    """A line of a file of pins is not understood."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A version, and the hashes of its files for all platforms, each as `sha256:` and 64 hexadecimal digits."""

    version: str
    hashes: tuple[str, ...] = ()


def read_pins(path: Path) -> dict[str, Pin]:
    """Return the pins of a file by normalized name.

    Raises:
        PinError: a line is neither a pin nor a comment, or a hash is none.
    """
    pins: dict[str, Pin] = {}
    for number, line in _logical_lines(path.read_text(encoding="utf-8")):
        hashes = tuple(_HASH.findall(line))
        if wrong := [text for text in hashes if not _SHA256.fullmatch(text)]:
            raise PinError(f"{path}:{number}: expected sha256: and 64 digits, found {wrong[0][:80]!r}")
        text = _HASH.sub("", line).split(";")[0].strip()
        found = _PIN.fullmatch(text)
        if found is None:
            raise PinError(f"{path}:{number}: expected NAME==VERSION, found {text[:80]!r}")
        name = re.sub(r"[-_.]+", "-", found["name"]).lower()
        pins[name] = Pin(version=found["version"], hashes=hashes)
    return pins


def read_versions(path: Path) -> dict[str, str]:
    """Return the versions of a file of pins by normalized name.

    Raises:
        PinError: as `read_pins`.
    """
    return {name: pin.version for name, pin in read_pins(path).items()}


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines without comments, joined where a backslash ends one, with the number of the first."""
    start, joined = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        start = start if joined else number
        content = line.split("#")[0].rstrip()
        joined += content.removesuffix("\\")
        if not content.endswith("\\"):
            if joined.strip():
                yield start, joined
            joined = ""
