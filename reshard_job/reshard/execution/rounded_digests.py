"""Digests of tensors in a narrower type: how weights are compared with the master weights that they round."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.checksums.digest import finished, to_hex
from reshard.execution.scan import term_of
from reshard.storage.source_reader import SourceReader
from reshard.tensors.layout import ITEM_BYTES, Index, TensorKey


def rounded_digests(index: Index, wanted: Mapping[TensorKey, str]) -> dict[TensorKey, str]:
    """Read tensors, and digest them rounded to nearest even.

    One copy of each is read: that all copies agree was found when they were digested as they are.

    Args:
        index: the checkpoint.
        wanted: tensor -> type to round it to.

    Raises:
        CorruptSourceError: a file cannot be read.
    """
    rows = index.shards.by_tensor(len(index.tensors)) if wanted else []
    source = SourceReader(index.root, index.files)
    found: dict[TensorKey, str] = {}
    try:
        for tensor, own in zip(index.tensors if wanted else (), rows, strict=True):
            if tensor.key not in wanted or not len(own):
                continue
            term, types = 0, (tensor.dtype, wanted[tensor.key])
            copy = own[index.shards.replica[own] == index.shards.replica[own].min()]
            for row in index.shards.each(copy, len(tensor.shape)):
                term ^= term_of(source, row, row.box, tensor.shape, tensor.item_bytes, types=types).term
            found[tensor.key] = to_hex(finished(term, tensor.num_elements * ITEM_BYTES[types[1]]))
    finally:
        source.close()
    return found
