"""Names of safetensors files, which say whether a folder holds any before one is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard

NAME = "safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


def list_names(folder: Path) -> list[str]:
    """List the names of the folder's safetensors files, sorted; return none if the folder cannot be listed."""
    try:
        return sorted(item.name for item in folder.iterdir() if is_file_name(item.name))
    except OSError:
        return []


def is_file_name(name: object) -> TypeGuard[str]:
    """Return True if this is the name of a safetensors file in its folder, and not of a hidden one."""
    return isinstance(name, str) and name.endswith(SUFFIX) and not name.startswith(".") and "/" not in name
