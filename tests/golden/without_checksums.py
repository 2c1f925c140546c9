"""Checkpoints as `torch.serialization.set_crc32_options(False)` lets torch save them: archives state no checksums."""

import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from reshard.tensors.layout import Index
from reshard.tensors.shard_table import ShardRow

_ENTRY = 46  # bytes of a central directory's entry before its name
_CRC_AT, _LENGTHS_AT = 16, 28


def copied(source: Path, folder: Path) -> Path:
    """Copy a checkpoint without COMMIT.json, and take the checksums out of its archives."""
    target = folder / source.name
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("COMMIT.json"))
    for path in target.rglob("*.pt"):
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            at, count = archive.start_dir, len(archive.infolist())
        for _ in range(count):
            content[at + _CRC_AT : at + _CRC_AT + 4] = bytes(4)
            at += _ENTRY + sum(struct.unpack_from("<HHH", content, at + _LENGTHS_AT))
        path.write_bytes(content)
    return target


def flip(index: Index, wanted: Callable[[ShardRow], bool], *, byte: int = 0) -> ShardRow:
    """Change a byte of the last element of the first box that is wanted, in its file; the box."""
    for number, rows in enumerate(index.shards.by_tensor(len(index.tensors))):
        for row in index.shards.iterate_boxes(rows, len(index.tensors[number].shape)):
            if wanted(row):
                path = index.root / index.files[row.file].path
                content = bytearray(path.read_bytes())
                last = sum((size - 1) * stride for size, stride in zip(row.box.size, row.strides, strict=True))
                content[row.byte_offset + last * index.tensors[number].item_bytes + byte] ^= 1
                path.write_bytes(content)
                return row
    raise AssertionError("no such box")
