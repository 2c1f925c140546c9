"""Index weights in files of torch.save: every tensor is one box with the state `weight`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile, read
from reshard.formats.pytorch.files import NAME, find_files, read_weight_map
from reshard.tensors.geometry import whole
from reshard.tensors.layout import ITEM_BYTES, Checksum, Index, LogicalTensor, SourceFile, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology

_CONTAINERS = ("module", "state_dict", "model", "model_state_dict")
"""Keys under which scripts and frameworks save the weights beside other things."""

_MOST_DEPTH = 3
_MOST_LINES = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PytorchExtra:
    """Facts besides the tensors.

    Attributes:
        containers: keys that lead to the weights of each file.
    """

    format_name: ClassVar[str] = NAME
    containers: Mapping[str, tuple[str, ...]]


class _Weights(NamedTuple):
    """Weights of a file: the keys that lead to them, the tensors by name, and what is there besides."""

    keys: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    others: tuple[str, ...]


def read_index(folder: Path) -> Index:
    """Index the weights in `folder`.

    Raises:
        CorruptSourceError: damaged, missing or mixed files.
        UnsafePickleError: a pickle wants more than data.
        UnsupportedError: no weights, or it is not clear which tensors are the weights.
    """
    found = find_files(folder)
    weight_map = read_weight_map(folder / found.index) if found.index else None
    names = found.names if weight_map is None else tuple(sorted(set(weight_map.values())))
    files = [read(folder / name) for name in names]
    weights = [_find_weights(file) for file in files]
    _check_names(folder, names, weights, weight_map)
    tensors: list[LogicalTensor] = []
    aliases: dict[str, str] = {}
    builder = ShardTableBuilder()
    for number, own in enumerate(weights):
        views: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], str] = {}
        for name, tensor in own.tensors.items():
            view = (id(tensor.storage), tensor.offset, tensor.shape, tensor.stride)
            if tensor.num_elements and views.setdefault(view, name) != name:
                aliases[name] = views[view]
                continue
            if tensor.num_elements:
                builder.add(
                    tensor=len(tensors),
                    box=whole(tensor.shape),
                    file=number,
                    byte_offset=tensor.file_offset,
                    strides=None if tensor.is_contiguous else tensor.stride,
                )
            tensors.append(LogicalTensor(key=TensorKey("weight", name), shape=tensor.shape, dtype=tensor.dtype))
    return Index(
        root=folder,
        format=NAME,
        topology=Topology(zero=0),
        step=0,
        samples=0,
        tensors=tuple(tensors),
        files=tuple(_make_source_file(name, file) for name, file in zip(names, files, strict=True)),
        shards=builder.build(),
        aliases=aliases,
        extra=PytorchExtra(containers={name: own.keys for name, own in zip(names, weights, strict=True)}),
        notes=tuple(note for name, own in zip(names, weights, strict=True) for note in _list_notes(name, own)),
    )


def _list_notes(name: str, weights: _Weights) -> tuple[str, ...]:
    where = f"under {'.'.join(weights.keys)}" if weights.keys else "at the top"
    if not weights.others:
        return ()
    more = f" and {len(weights.others) - 8} more" if len(weights.others) > 8 else ""
    return (f"{name}: the weights are {where}; not converted besides: {', '.join(weights.others[:8])}{more}",)


def _find_weights(file: PtFile) -> _Weights:
    """Find the dict of tensors in what was saved.

    Raises:
        UnsupportedError: there is none, or there are several that could be meant.
    """
    value, keys, others = file.value, tuple[str, ...](), list[str]()
    while True:
        if not isinstance(value, Mapping):
            raise UnsupportedError(
                f"holds a {type(value).__name__} {'under ' + '.'.join(keys) if keys else 'at the top'}, expected a dict"
                " of tensors",
                path=file.path,
                hint="save the weights as model.state_dict(), not the model itself",
            )
        tensors = {name: item for name, item in value.items() if isinstance(item, Tensor)}
        inner = [key for key in _CONTAINERS if _holds_tensors(value.get(key))]
        beside = [str(name) for name in value if name not in inner]
        known = {name for key in inner for name in value[key]}
        rivals = [str(name) for name, tensor in tensors.items() if name in known or _is_parameter(name, tensor)]
        if tensors and not inner:
            if not rivals and any(map(_holds_tensors, value.values())):
                raise _unclear(file, keys, value, ())
            others += [".".join((*keys, name)) for name in beside if name not in tensors]
            return _Weights(keys, _check_tensors(tensors, file), tuple(others))
        if len(inner) != 1 or rivals or len(keys) == _MOST_DEPTH:
            raise _unclear(file, keys, value, [*inner, *rivals])
        others += [".".join((*keys, name)) for name in beside]
        keys, value = (*keys, inner[0]), value[inner[0]]


def _is_parameter(name: object, tensor: Tensor) -> bool:
    """Return True if a tensor beside a set of weights may be one of them: a state dict names those of modules `a.b`.

    Others are losses, random states and the like, for instance the `best_val_loss` of nanoGPT's `ckpt.pt`.
    """
    return isinstance(name, str) and "." in name and bool(tensor.shape)


def _holds_tensors(value: Any) -> bool:
    """Return True if a value is a dict that holds tensors, or a known container of such a dict."""
    if not isinstance(value, Mapping):
        return False
    return any(isinstance(item, Tensor) for item in value.values()) or any(
        isinstance(value.get(key), Mapping) for key in _CONTAINERS
    )


def _unclear(file: PtFile, keys: tuple[str, ...], value: Mapping[Any, Any], could: Sequence[str]) -> UnsupportedError:
    where = ".".join(keys) or "the top"
    if not could:
        return UnsupportedError(
            f"holds no weights: no dict of tensors at {where}, nor under {', '.join(_CONTAINERS)}",
            path=file.path,
            problems=[f"{str(key)[:80]}: a {type(item).__name__}" for key, item in list(value.items())[:_MOST_LINES]],
            hint="save the weights as a dict of tensors, by themselves or under one of these keys",
        )
    return UnsupportedError(
        f"could hold the weights in several places at {where}",
        path=file.path,
        problems=list(could[:_MOST_LINES]),
        hint="save the weights alone: torch.save(model.state_dict(), ...)",
    )


def _check_tensors(tensors: Mapping[Any, Tensor], file: PtFile) -> Mapping[str, Tensor]:
    """Return the tensors by name, after refusing those that cannot be converted.

    Raises:
        UnsupportedError: lists them.
    """
    problems = [f"{str(name)[:80]}: its name is no text" for name in tensors if not isinstance(name, str)]
    problems += [f"{name}: type {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in ITEM_BYTES]
    problems += [
        f"{name}: repeats elements (strides {list(tensor.stride)} of {list(tensor.shape)})"
        for name, tensor in tensors.items()
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride, tensor.shape, strict=True))
    ]
    if problems:
        raise UnsupportedError(
            f"holds {len(problems)} tensors that are not converted", path=file.path, problems=problems[:_MOST_LINES]
        )
    return tensors


def _check_names(
    folder: Path, names: Sequence[str], weights: Sequence[_Weights], weight_map: Mapping[str, str] | None
) -> None:
    """Check that every tensor is in one file, the one that the index names.

    Raises:
        CorruptSourceError: lists the tensors about which files contradict each other.
    """
    holders: dict[str, str] = {}
    problems = []
    for file, own in zip(names, weights, strict=True):
        for name in own.tensors:
            if name in holders:
                problems.append(f"tensor {name!r} is in {holders[name]} and in {file}")
            elif weight_map is not None and weight_map.get(name) != file:
                problems.append(f"tensor {name!r} is in {file}, the index names {weight_map.get(name, 'no file')}")
            holders.setdefault(name, file)
    problems += [
        f"tensor {name!r} is not in {file}, which the index names"
        for name, file in (weight_map or {}).items()
        if name not in holders
    ]
    if problems:
        raise CorruptSourceError(
            f"its files contradict each other about {len(problems)} tensors",
            path=str(folder),
            problems=problems[:_MOST_LINES],
            hint="a file was not copied, or two saves are mixed in one folder",
        )


def _make_source_file(name: str, file: PtFile) -> SourceFile:
    stated = sorted(
        (storage.file_offset, storage.num_bytes, storage.crc32)
        for storage in file.storages.values()
        if storage.crc32 is not None and storage.num_bytes
    )
    checksums = tuple(Checksum(start=start, num_bytes=count, crc32=crc) for start, count, crc in stated)
    return SourceFile(path=name, num_bytes=file.num_bytes, checksums=checksums)
