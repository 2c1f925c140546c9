"""Folders of training stacks: a checkpoint of a known format in a subfolder, and the stack's own files beside it.

Such a folder is converted as one unit. The front door reads and lays out checkpoints through this package, which hands
plain checkpoints to `reshard.formats` unchanged. It may import formats and what is below; it knows no tensors.
"""

from __future__ import annotations

from reshard.folders.reading import find_inner, find_training_folder, is_checkpoint, read_checkpoint
from reshard.folders.writing import describe, lay_out, unwrap

__all__ = ("describe", "find_inner", "find_training_folder", "is_checkpoint", "lay_out", "read_checkpoint", "unwrap")
