"""DeepSpeed's native checkpoints, ZeRO stages 0 to 3, with tensor and pipeline parallelism. Written against 0.19.8.

What is read, written and refused: docs/deepspeed-format.md.
"""

from __future__ import annotations

from pathlib import Path

from reshard.commits.commit import Commit
from reshard.formats.base import Request, refuse_options, understood
from reshard.formats.deepspeed.names import NAME, has_checkpoint
from reshard.tensors.layout import Index, TargetLayout

_INSTEAD = "use an earlier commit"


class DeepSpeedFormat:
    """`reshard.formats.base.Format` for native DeepSpeed checkpoints."""

    name = NAME
    takes_patterns = True
    takes_ds_config = True
    keeps_zero_stage = True

    def sniff(self, path: Path) -> str | None:
        """Return why `path` is not a native checkpoint, or None if it is one."""
        if not path.is_dir():
            return "not a folder"
        if not has_checkpoint(path):
            return "no file *mp_rank_*_model_states.pt (name the folder of the tag, not its parent)"
        return None

    def read(
        self, path: Path, commit: Commit | None, patterns: Path | None = None, ds_config: Path | None = None
    ) -> Index:
        """Index the checkpoint, see `read_index`."""
        from reshard.formats.deepspeed import configured
        from reshard.formats.deepspeed.reading.reader import read_index  # a sniff needs no reader
        from reshard.formats.deepspeed.tensor_parallel import pattern_file

        stated = None if patterns is None else pattern_file.load(patterns)
        config = None if ds_config is None else configured.load(ds_config)
        with understood(path, "DeepSpeed", instead=_INSTEAD):
            return read_index(path, commit, stated, config)

    def layout(self, index: Index, request: Request) -> TargetLayout:
        """Lay out tensors as a checkpoint of DeepSpeed, see `lay_out`."""
        from reshard.formats.deepspeed.described.example import complete_request
        from reshard.formats.deepspeed.writing.writer import lay_out

        refuse_options(NAME, request, model=True)
        request, example = complete_request(index, request)
        request.topology.refuse_partitioned_pipeline()
        with understood(index.root, "DeepSpeed", instead=_INSTEAD):
            return lay_out(index, request, example)


FORMAT = DeepSpeedFormat()
