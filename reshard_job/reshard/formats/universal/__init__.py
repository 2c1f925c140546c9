"""DeepSpeed's universal checkpoints: one folder per parameter, one file per state. Written against 0.19.8.

What is read, written and refused: docs/universal-format.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from reshard.commit import Commit
from reshard.errors import CorruptSourceError, ReshardError
from reshard.formats.base import Request, refuse_options
from reshard.formats.universal.names import NAME, OPTIMIZER_FILE
from reshard.layout import Index, TargetLayout


@contextlib.contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Fields of other types than DeepSpeed writes surface wherever they are used: say whose fault it is."""
    try:
        yield
    except ReshardError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptSourceError(
            f"holds something that DeepSpeed does not write ({type(error).__name__}: {error})",
            path=str(folder),
            hint="convert again from the native checkpoint; if DeepSpeed loads this one, report it as a bug of reshard",
        ) from error


class UniversalFormat:
    """`reshard.formats.base.Format` for universal checkpoints."""

    name = NAME

    def sniff(self, path: Path) -> str | None:
        """Why `path` is not a universal checkpoint, or None if it is."""
        if not path.is_dir():
            return "not a folder"
        if not (path / OPTIMIZER_FILE).is_file():
            return f"no file {OPTIMIZER_FILE}"
        return None

    def read(self, path: Path, commit: Commit | None) -> Index:
        """Index the checkpoint, see `read_index`."""
        from reshard.formats.universal.reader import read_index  # a sniff needs no reader

        with _understood(path):
            return read_index(path, commit)

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Lay out tensors as a universal checkpoint, see `lay_out`."""
        from reshard.formats.universal.writer import lay_out

        refuse_options(NAME, request)
        with _understood(index.root):
            return lay_out(index, request)


FORMAT = UniversalFormat()
