"""Name maps: a checkpoint's tensors under the names, and in the parts, that another program wants.

`load` reads a map from YAML, `rename` expresses an index in its names. Docs: docs/name-maps.md.
"""

from __future__ import annotations

from reshard.names.apply import rename
from reshard.names.parse import build, load
from reshard.names.rules import NameMap, Rule

__all__ = ["NameMap", "Rule", "build", "load", "rename"]
