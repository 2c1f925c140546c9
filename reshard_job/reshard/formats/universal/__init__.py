"""DeepSpeed's universal checkpoints: one folder per parameter, one file per state. Written against 0.19.8.

What is read, written and refused: docs/universal-format.md.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from reshard.commits.commit import Commit
from reshard.errors import UnsupportedError
from reshard.formats.base import Request, refuse_options, understood
from reshard.formats.universal.names import NAME, OPTIMIZER_FILE
from reshard.tensors.layout import Index, TargetLayout

_INSTEAD = "convert again from the native checkpoint"


class UniversalFormat:
    """`reshard.formats.base.Format` for universal checkpoints."""

    name = NAME
    takes_patterns = True
    takes_ds_config = False
    keeps_zero_stage = False

    def sniff(self, path: Path) -> str | None:
        """Return why `path` is not a universal checkpoint, or None if it is one."""
        if not path.is_dir():
            return "not a folder"
        if not (path / OPTIMIZER_FILE).is_file():
            return f"no file {OPTIMIZER_FILE}"
        return None

    def read(
        self, path: Path, commit: Commit | None, patterns: Path | None = None, ds_config: Path | None = None
    ) -> Index:
        """Index the checkpoint, see `read_index`."""
        from reshard.formats.deepspeed.tensor_parallel import pattern_file
        from reshard.formats.universal.reader import read_index  # a sniff needs no reader

        stated = None if patterns is None else pattern_file.load(patterns)
        with understood(path, "DeepSpeed", instead=_INSTEAD):
            return read_index(path, commit, stated)

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Lay out tensors as a universal checkpoint, see `lay_out`."""
        from reshard.formats.deepspeed.described.example import complete_request
        from reshard.formats.universal.writer import lay_out

        refuse_options(NAME, request, model=True)
        request, example = complete_request(index, request)
        if example is not None and example.weights_alone:
            raise UnsupportedError(
                "holds weights alone, and DeepSpeed loads no universal checkpoint without an optimizer",
                path=str(index.root),
                hint="choose --format deepspeed, which it loads with load_module_only=True",
            )
        request.topology.refuse_partitioned_pipeline()
        with understood(index.root, "DeepSpeed", instead=_INSTEAD):
            layout = lay_out(index, request)
        return layout if example is None else dataclasses.replace(layout, notes=(*example.notes, *layout.notes))


FORMAT = UniversalFormat()
