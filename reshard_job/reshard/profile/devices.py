"""Find the device and the file system of files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard.profile.events import Device

_UNKNOWN = Device("?", "")


def parse_file_systems(mountinfo: str) -> dict[str, str]:
    """Map `major:minor` of each mounted device to the type of its file system.

    Args:
        mountinfo: content of /proc/self/mountinfo (proc(5)).
    """
    kinds = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) > 2 and kind:
            kinds[fields[2]] = kind[0]
    return kinds


def find_devices(root: Path | str, paths: Sequence[str]) -> list[tuple[str, Device]]:
    """Return each path with the device of its folder below `root`; a URL's device is its store and bucket."""
    text = str(root)
    if "://" in text:
        scheme, _, rest = text.partition("://")
        store = Device(f"{scheme}://{rest.partition('/')[0]}", "object store")
        return [(path, store) for path in paths]
    kinds = parse_file_systems(_read("/proc/self/mountinfo"))
    devices: dict[str, Device] = {}
    named = []
    for path in paths:
        folder = path.rpartition("/")[0]
        if folder not in devices:
            devices[folder] = _device_of(f"{text}/{folder}", kinds)
        named.append((path, devices[folder]))
    return named


def _device_of(folder: str, kinds: Mapping[str, str]) -> Device:
    with contextlib.suppress(OSError):
        number = Path(folder).stat().st_dev
        name = f"{os.major(number)}:{os.minor(number)}"
        return Device(name, kinds.get(name, ""))
    return _UNKNOWN


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""
