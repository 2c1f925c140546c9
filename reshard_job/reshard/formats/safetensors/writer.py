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
from reshard.formats.safetensors.file_names import NAME
from reshard.formats.safetensors.header import Entry
from reshard.formats.safetensors.reader import SAMPLES, STEP, SafetensorsExtra
from reshard.formats.safetensors.select import Selection, select_weights
from reshard.tensors.geometry import whole
from reshard.tensors.layout import Index, LogicalTensor, TargetFile, TargetLayout
from reshard.tensors.shard_table import ShardTableBuilder, ranges_of

_FORMAT = {"format": "pt"}
"""Metadata without which transformers refuses a file: the framework of the tensors."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of the target.

    Attributes:
        tensors: positions of its tensors among the target's, in the order of their bytes.
        entries: the header's description of each of them.
    """

    tensors: tuple[int, ...]
    entries: tuple[Entry, ...]


def lay_out(index: Index, request: Request) -> TargetLayout:
    """Lay out the weights of `index`.

    Raises:
        UnsupportedError: no weights, types that cannot be converted, or names that the format cannot hold.
    """
    selection = select_weights(index, request.weight_dtype)
    metadata = _build_metadata(index)
    file_bytes = request.file_bytes or DEFAULT_FILE_BYTES
    shards = _split_shards(selection.tensors, file_bytes, metadata, index.aliases)
    builder = ShardTableBuilder()
    files: list[TargetFile] = []
    names = _list_file_names(len(shards))
    for number, shard in enumerate(shards):
        prefix = header.dump(shard.entries, _add_second_names(shard, metadata, index.aliases))
        for tensor, entry in zip(shard.tensors, shard.entries, strict=True):
            if entry.num_bytes:
                builder.add(tensor=tensor, box=whole(entry.shape), file=number, byte_offset=len(prefix) + entry.start)
        num_bytes = len(prefix) + sum(entry.num_bytes for entry in shard.entries)
        files.append(TargetFile(path=names[number], num_bytes=num_bytes, fixed=((0, prefix),)))
    if len(shards) > 1:
        content = _build_index(shards, names)
        files.append(TargetFile(path="model.safetensors.index.json", num_bytes=len(content), fixed=((0, content),)))
    return TargetLayout(
        format=NAME,
        topology=request.topology,  # the files are the same for all
        files=tuple(files),
        shards=builder.build(),
        zeros=ranges_of(()),
        tensors=selection.tensors,
        origins=selection.origins,
        notes=(*selection.notes, *_note_large_tensors(selection, file_bytes)),
    )


def _list_file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _split_shards(
    tensors: Sequence[LogicalTensor], file_bytes: int, metadata: Mapping[str, str], aliases: Mapping[str, str]
) -> list[Shard]:
    """Cut the list of tensors where the next one would make a file larger than `file_bytes`."""
    alias_bytes: dict[str, int] = {}
    for alias, name in aliases.items():
        alias_bytes[name] = alias_bytes.get(name, 0) + len(json.dumps({alias: name}, ensure_ascii=False).encode())
    fixed = header.PREFIX_BYTES * 2 + len(json.dumps({header.METADATA: metadata}, ensure_ascii=False).encode())
    shards: list[Shard] = []
    chosen: list[int] = []
    head, data = fixed, 0
    for number, tensor in enumerate(tensors):
        name = tensor.key.name
        own = header.max_entry_bytes(name, tensor.dtype, tensor.shape) + alias_bytes.get(name, 0)
        fits = head + own + data + tensor.num_bytes <= file_bytes and head + own <= header.MAX_HEADER_BYTES
        if chosen and not fits:
            shards.append(_build_shard(tensors, chosen))
            chosen, head, data = [], fixed, 0
        chosen.append(number)
        head, data = head + own, data + tensor.num_bytes
    shards.append(_build_shard(tensors, chosen))
    return shards


def _build_shard(tensors: Sequence[LogicalTensor], chosen: Sequence[int]) -> Shard:
    """Build a file with the widest dtypes first, so that each tensor begins at a multiple of its element size."""
    ordered = sorted(chosen, key=lambda number: -tensors[number].item_bytes)
    entries = []
    start = 0
    for number in ordered:
        tensor = tensors[number]
        entries.append(
            Entry(name=tensor.key.name, dtype=tensor.dtype, shape=tensor.shape, start=start, num_bytes=tensor.num_bytes)
        )
        start += tensor.num_bytes
    return Shard(tensors=tuple(ordered), entries=tuple(entries))


def _build_metadata(index: Index) -> dict[str, str]:
    """Build the metadata of every file: the user's, if the source has any, and the step and samples of the weights."""
    own = dict(index.extra.metadata) if isinstance(index.extra, SafetensorsExtra) else {}
    return {**own, **_FORMAT, STEP: str(index.step), SAMPLES: str(index.samples)}


def _add_second_names(shard: Shard, metadata: Mapping[str, str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Add the second names of a file's own tensors to its metadata.

    Raises:
        UnsupportedError: a second name is a key of the metadata.
    """
    names = {entry.name for entry in shard.entries}
    second = {alias: name for alias, name in sorted(aliases.items()) if name in names}
    if clash := sorted(second.keys() & metadata.keys()):
        raise UnsupportedError(
            f"second names of tied weights are keys of the file's metadata: {', '.join(clash)}",
            hint="rename them with a name map",
        )
    return {**metadata, **second}


def _build_index(shards: Sequence[Shard], names: Sequence[str]) -> bytes:
    weight_map = {entry.name: name for shard, name in zip(shards, names, strict=True) for entry in shard.entries}
    total = sum(entry.num_bytes for shard in shards for entry in shard.entries)
    value = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode()


def _note_large_tensors(selection: Selection, file_bytes: int) -> list[str]:
    large = [str(tensor.key.name) for tensor in selection.tensors if tensor.num_bytes > file_bytes]
    if not large:
        return []
    return [f"larger than a file of {file_bytes} bytes may be, each in a file of its own: {_shorten_list(large)}"]


def _shorten_list(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
