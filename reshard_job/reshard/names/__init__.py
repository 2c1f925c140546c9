"""Name maps: give a checkpoint's tensors the names, and the parts, that another program expects.

`load` reads a map from YAML, `rename` applies it to an index. Imports `tensors`, `storage` and what is below them;
imported by `api`. Docs: docs/name-maps.md.
"""

from __future__ import annotations

from reshard.names.apply import rename
from reshard.names.parse import build, load
from reshard.names.rules import NameMap, Rule

__all__ = ["NameMap", "Rule", "build", "load", "rename"]
