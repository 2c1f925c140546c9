"""Lay out the weights of any checkpoint as safetensors files, as Hugging Face's libraries name and cut them.

Source: huggingface_hub 2.4 `split_state_dict_into_shards_factory` (file names, index) and safetensors 0.8
`save_model` (second names of tied weights in `__metadata__`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from reshard.errors import UnsupportedError
from reshard.formats.base import DEFAULT_FILE_BYTES, Request
from reshard.formats.safetensors import header
from reshard.formats.safetensors.header import Entry
from reshard.formats.safetensors.reader import NAME, SAMPLES, STEP, SafetensorsExtra
from reshard.formats.safetensors.select import Selection, select
from reshard.tensors.geometry import whole
from reshard.tensors.layout import Index, LogicalTensor, TargetFile, TargetLayout
from reshard.tensors.shard_table import ShardTableBuilder, ranges_of

_FORMAT = {"format": "pt"}
"""transformers refuses files that do not say which framework's tensors they hold."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of the target.

    Attributes:
        tensors: positions among the target's tensors, in the order of their bytes.
        entries: the same as the header describes them.
    """

    tensors: tuple[int, ...]
    entries: tuple[Entry, ...]


def lay_out(index: Index, request: Request) -> TargetLayout:
    """Lay out the weights of `index`.

    Raises:
        UnsupportedError: no weights, types that cannot be converted, or names that the format cannot hold.
    """
    selection = select(index, request.weight_dtype)
    metadata = _metadata(index)
    file_bytes = request.file_bytes or DEFAULT_FILE_BYTES
    shards = _shards(selection.tensors, file_bytes, metadata, index.aliases)
    builder = ShardTableBuilder()
    files: list[TargetFile] = []
    names = _file_names(len(shards))
    for number, shard in enumerate(shards):
        prefix = header.dump(shard.entries, _metadata_of(shard, metadata, index.aliases))
        for tensor, entry in zip(shard.tensors, shard.entries, strict=True):
            if entry.num_bytes:
                builder.add(tensor=tensor, box=whole(entry.shape), file=number, byte_offset=len(prefix) + entry.start)
        num_bytes = len(prefix) + sum(entry.num_bytes for entry in shard.entries)
        files.append(TargetFile(path=names[number], num_bytes=num_bytes, fixed=((0, prefix),)))
    if len(shards) > 1:
        content = _index_file(shards, names)
        files.append(TargetFile(path="model.safetensors.index.json", num_bytes=len(content), fixed=((0, content),)))
    return TargetLayout(
        format=NAME,
        topology=request.topology,  # the files are the same for all
        files=tuple(files),
        shards=builder.build(),
        zeros=ranges_of(()),
        tensors=selection.tensors,
        origins=selection.origins,
        notes=(*selection.notes, *_large_notes(selection, file_bytes)),
    )


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _shards(
    tensors: Sequence[LogicalTensor], file_bytes: int, metadata: Mapping[str, str], aliases: Mapping[str, str]
) -> list[Shard]:
    """Cut the list of tensors where the next one would make a file larger than `file_bytes`."""
    second: dict[str, int] = {}
    for alias, name in aliases.items():
        second[name] = second.get(name, 0) + len(json.dumps({alias: name}, ensure_ascii=False).encode())
    fixed = header.PREFIX_BYTES * 2 + len(json.dumps({header.METADATA: metadata}, ensure_ascii=False).encode())
    shards: list[Shard] = []
    held: list[int] = []
    head, data = fixed, 0
    for number, tensor in enumerate(tensors):
        name = tensor.key.name
        own = header.entry_bytes(name, tensor.dtype, tensor.shape) + second.get(name, 0)
        fits = head + own + data + tensor.num_bytes <= file_bytes and head + own <= header.MAX_HEADER_BYTES
        if held and not fits:
            shards.append(_shard(tensors, held))
            held, head, data = [], fixed, 0
        held.append(number)
        head, data = head + own, data + tensor.num_bytes
    shards.append(_shard(tensors, held))
    return shards


def _shard(tensors: Sequence[LogicalTensor], held: Sequence[int]) -> Shard:
    """Tensors of the widest type come first, so that every one begins at a multiple of its element's size."""
    ordered = sorted(held, key=lambda number: -tensors[number].item_bytes)
    entries = []
    start = 0
    for number in ordered:
        tensor = tensors[number]
        entries.append(
            Entry(name=tensor.key.name, dtype=tensor.dtype, shape=tensor.shape, start=start, num_bytes=tensor.num_bytes)
        )
        start += tensor.num_bytes
    return Shard(tensors=tuple(ordered), entries=tuple(entries))


def _metadata(index: Index) -> dict[str, str]:
    """What every file says: the user's own words, where the source has any, and when the weights were saved."""
    own = dict(index.extra.metadata) if isinstance(index.extra, SafetensorsExtra) else {}
    return {**own, **_FORMAT, STEP: str(index.step), SAMPLES: str(index.samples)}


def _metadata_of(shard: Shard, metadata: Mapping[str, str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The same, and second names of the file's own tensors."""
    names = {entry.name for entry in shard.entries}
    second = {alias: name for alias, name in sorted(aliases.items()) if name in names}
    if clash := sorted(second.keys() & metadata.keys()):
        raise UnsupportedError(
            f"second names of tied weights are keys of the file's metadata: {', '.join(clash)}",
            hint="rename them with a name map",
        )
    return {**metadata, **second}


def _index_file(shards: Sequence[Shard], names: Sequence[str]) -> bytes:
    weight_map = {entry.name: name for shard, name in zip(shards, names, strict=True) for entry in shard.entries}
    total = sum(entry.num_bytes for shard in shards for entry in shard.entries)
    value = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode()


def _large_notes(selection: Selection, file_bytes: int) -> list[str]:
    large = [str(tensor.key.name) for tensor in selection.tensors if tensor.num_bytes > file_bytes]
    if not large:
        return []
    return [f"larger than a file of {file_bytes} bytes may be, each in a file of its own: {_some(large)}"]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
