"""State that a checkpoint has beside weights and optimizer: small files, and the seed of random number generators.

Small files (progress, schedule) are packed into the commit's `data`, which a resharder carries over as it is. States of
random number generators belong to one rank each and are large together, so that they are files of the commit; after a
change of the number of ranks they mean nothing, and `derive_seed` gives every rank a new seed.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path

_MASK = 2**64 - 1


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


def derive_seed(*, seed: int, step: int, rank: int) -> int:
    """Return the seed, 32 bits, with which a rank goes on at a step after a change of the number of ranks.

    It is a hash of the arguments (the finalizer of splitmix64 after each of them), so that a second resume of the same
    commit draws the same numbers, and no two ranks or steps share a sequence.

    >>> derive_seed(seed=42, step=100, rank=0)
    1365867421
    """
    state = 0
    for value in (seed, step, rank):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 32
