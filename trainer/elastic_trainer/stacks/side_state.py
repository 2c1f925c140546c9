"""Small files that a checkpoint has beside weights and optimizer (progress, schedule), as text in the commit's `data`.

A resharder carries `data` over as it is, whatever the format of the commit, so that it needs to know nothing of them.
"""

from __future__ import annotations

import base64
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path

from elastic_trainer.batch import BatchPlan
from elastic_trainer.session import Position

_log = logging.getLogger(__name__)


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


def warn_of_other_batch(position: Position, plan: BatchPlan) -> None:
    """Warn if a stack that counts its data in steps goes on at another row than the one that the commit has reached."""
    if position.samples != position.step * plan.global_batch:
        _log.warning(
            "the commit has %d samples after %d steps, and the global batch is %d now: data is counted in steps, so "
            "that rows are repeated or skipped",
            position.samples,
            position.step,
            plan.global_batch,
        )
