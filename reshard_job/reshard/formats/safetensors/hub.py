"""Hugging Face's download cache, whose snapshots are folders of links to blobs.

Source: huggingface_hub 2.4 `file_download.py`: `models--<name>/snapshots/<revision>/<file>` links to
`../../blobs/<etag>`, where the etag is the SHA-1 (40 hex digits) or SHA-256 (64) of the content.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from reshard.storage.object_store import RemotePath

_BLOB = re.compile(r"\.\./\.\./blobs/(?:[0-9a-f]{40}|[0-9a-f]{64})")


def locate_file(folder: Path, name: str) -> str:
    """Return the path of a file relative to its folder: its own name, or that of a blob of the cache.

    Only a link that this cache makes is followed, and only one step: to a plain file in the cache's own folder of
    blobs, whose name is a checksum. Any other link is refused when the file is opened.
    """
    if isinstance(folder, RemotePath):
        return name
    try:
        link = str((folder / name).readlink())
    except OSError:  # a plain file, or none: opening it reports the error
        return name
    snapshot = Path(os.path.realpath(folder))
    if _BLOB.fullmatch(link) is None or snapshot.parent.name != "snapshots":
        return name
    blobs = snapshot.parent.parent / "blobs"
    try:
        safe = stat.S_ISDIR(blobs.lstat().st_mode) and stat.S_ISREG((snapshot / link).lstat().st_mode)
    except OSError:
        return name
    return link if safe else name
