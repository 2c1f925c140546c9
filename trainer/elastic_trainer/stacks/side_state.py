"""Small files that a checkpoint has beside weights and optimizer (progress, schedule), as text in the commit's `data`.

A resharder carries `data` over as it is, whatever the format of the commit, so that it needs to know nothing of them.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path


def pack_files(folder: Path) -> dict[str, str]:
    """Return the files of a folder as text, by name; see `unpack_files`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
    ...     _ = (Path(source) / "progress.json").write_text("{}")
    ...     unpack_files(pack_files(Path(source)), Path(target))
    ...     (Path(target) / "progress.json").read_text()
    '{}'
    """
    return {
        path.name: base64.b64encode(zlib.compress(path.read_bytes())).decode()
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def unpack_files(packed: Mapping[str, str], folder: Path) -> None:
    """Write the files of `pack_files` into a folder."""
    for name, text in packed.items():
        (folder / Path(name).name).write_bytes(zlib.decompress(base64.b64decode(text)))
