"""Digests of tensors rounded to a narrower type, to compare weights with the master weights they are rounded from."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.checksums.digest import finish_digest, to_hex
from reshard.execution.averages import read_mean_digest
from reshard.execution.scan import read_term
from reshard.planning.averages import find_averages
from reshard.storage.source_reader import SourceReader
from reshard.tensors.layout import ITEM_BYTES, Index, TensorKey


def rounded_digests(index: Index, wanted: Mapping[TensorKey, str]) -> dict[TensorKey, str]:
    """Read tensors and compute their digests after rounding to nearest even.

    One copy of each tensor is read, and all copies of one that is their mean. The caller has already compared all
    copies by their unrounded digests.

    Args:
        index: the checkpoint.
        wanted: tensor -> type to round it to.

    Raises:
        CorruptSourceError: a file cannot be read.
    """
    rows = index.shards.by_tensor(len(index.tensors)) if wanted else []
    source = SourceReader(index.root, index.files)
    averages = find_averages(index, rows, rows, agreement=False) if wanted else {}
    digests: dict[TensorKey, str] = {}
    try:
        for number, (tensor, own) in enumerate(zip(index.tensors if wanted else (), rows, strict=True)):
            if tensor.key not in wanted or not len(own):
                continue
            if number in averages:
                mean = read_mean_digest(source, index, number, averages[number], wanted[tensor.key])
                digests[tensor.key] = to_hex(mean.digest)
                continue
            term, types = 0, (tensor.dtype, wanted[tensor.key])
            copy = own[index.shards.replica[own] == index.shards.replica[own].min()]
            for row in index.shards.iterate_boxes(copy, len(tensor.shape)):
                term ^= read_term(source, row, row.box, tensor.shape, tensor.item_bytes, types=types).term
            digests[tensor.key] = to_hex(finish_digest(term, tensor.num_elements * ITEM_BYTES[types[1]]))
    finally:
        source.close()
    return digests
