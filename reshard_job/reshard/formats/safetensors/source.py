"""Find the files of a safetensors checkpoint in a folder, read their headers, and check them against each other."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reshard.errors import CorruptSourceError, UnsupportedError, make_read_error
from reshard.formats.safetensors import header
from reshard.formats.safetensors.file_names import INDEX_SUFFIX, SUFFIX, is_file_name
from reshard.formats.safetensors.header import Header
from reshard.formats.safetensors.hub import locate_file
from reshard.storage.files import File, open_file

_SERIES = re.compile(r"^(?P<stem>.+)-(?P<number>\d{1,18})-of-(?P<count>\d{1,18})\.safetensors$", re.ASCII)
_MOST_MISSING = 20
_MAX_INDEX_BYTES = 256 << 20
SHARDING = "DCP_SHARDING_INFO"  # torch/distributed/checkpoint/_hf_utils.py of torch 2.13


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A file and its header.

    Attributes:
        name: name in the folder.
        place: path relative to the folder: its name, or a blob of a download cache (`hub.locate_file`).
        num_bytes: size of the whole file.
        header: the parsed header.
    """

    name: str
    place: str
    num_bytes: int
    header: Header


def read_files(folder: Path) -> tuple[WeightFile, ...]:
    """Read the headers of all files of the checkpoint in `folder` and check them against each other.

    Raises:
        CorruptSourceError: damaged, missing or mixed files.
        UnsupportedError: shards of tensors, or files of two checkpoints.
    """
    try:
        listed = sorted(item.name for item in folder.iterdir() if not item.name.startswith("."))
    except OSError as error:
        raise make_read_error(error, str(folder), what="cannot be listed", is_indexed=False) from error
    indexes = [name for name in listed if name.endswith(INDEX_SUFFIX)]
    present = [name for name in listed if name.endswith(SUFFIX)]
    if len(indexes) > 1:
        raise UnsupportedError(
            f"holds {len(indexes)} checkpoints: {', '.join(indexes)}",
            path=str(folder),
            hint="keep each with its files in a folder of its own",
        )
    index_path = folder / locate_file(folder, indexes[0]) if indexes else None
    weight_map, stated_bytes = _read_index(index_path) if index_path else (None, 0)
    names = sorted(set(weight_map.values())) if weight_map is not None else present
    _check_series(folder, present, names, indexes)
    files = tuple(_read_file(folder, name, listed=weight_map is not None) for name in names)
    _check_names(folder, files, weight_map)
    if index_path and any(SHARDING in file.header.metadata for file in files):
        _check_bytes(index_path, files, stated_bytes)
    return files


def _read_file(folder: Path, name: str, *, listed: bool) -> WeightFile:
    place = locate_file(folder, name)
    path = folder / place
    with _open_file(path) as file:
        num_bytes = file.num_bytes
        length = header.parse_length(_read_bytes(file, header.PREFIX_BYTES, 0), num_bytes, str(path))
        parsed = header.parse(_read_bytes(file, length, header.PREFIX_BYTES), num_bytes, str(path))
    if SHARDING in parsed.metadata and not (listed and _has_only_whole_tensors(parsed, str(path))):
        raise UnsupportedError(
            "holds shards of tensors, as torch.distributed.checkpoint writes them for each rank; no file says how large"
            " a tensor is, so that the last shards could be missing",
            path=str(path),
            hint="put them together where all are: torch.distributed.checkpoint's consolidate_safetensors_files",
        )
    return WeightFile(name=name, place=place, num_bytes=num_bytes, header=parsed)


def _has_only_whole_tensors(parsed: Header, path: str) -> bool:
    """Return True if every tensor begins at offset 0, so that none is a later shard of a tensor.

    HuggingFaceStorageWriter states offsets of whole tensors too, if it lists the files in an index.
    """
    try:
        shards = json.loads(parsed.metadata[SHARDING], object_pairs_hook=header.build_unique)
        offsets = [shards[entry.name]["saved_offsets"] for entry in parsed.entries]
        return all(isinstance(offset, list) and not any(offset) for offset in offsets)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UnsupportedError(
            f"its {SHARDING} does not say where every tensor begins ({type(error).__name__}: {error})", path=path
        ) from error


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[File]:
    """Open a file, and report errors of the operating system or store as those of the source."""
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsupportedError(
                "is a symbolic link",
                path=str(path),
                hint=f"copy the folder with what it links to: cp -rL {path.parent} NEW_FOLDER (links of Hugging Face's"
                " own cache, snapshots/*/ to blobs/, are followed)",
            ) from error
        raise make_read_error(error, str(path)) from error


def _read_bytes(file: File, length: int, position: int) -> bytes:
    parts: list[bytes] = []
    while length and (part := file.read(length, position)):
        parts.append(part)
        position, length = position + len(part), length - len(part)
    return b"".join(parts)


def _read_index(path: Path) -> tuple[Mapping[str, str], int]:
    """Read an index: its `weight_map` (tensor -> file), and its `total_size`, 0 if not stated."""
    try:
        with _open_file(path) as file:
            if file.num_bytes > _MAX_INDEX_BYTES:
                raise UnsupportedError(f"is larger than {_MAX_INDEX_BYTES} bytes", path=str(path))
            text = _read_bytes(file, file.num_bytes, 0)
        value = json.loads(text.decode("utf-8"), object_pairs_hook=header.build_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptSourceError(f"is no valid JSON: {error}", path=str(path)) from error
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedError("has no weight_map from tensors to files", path=str(path))
    outside = sorted({str(name)[:80] for name in weight_map.values() if not is_file_name(name)})
    if outside:
        raise UnsupportedError(
            "names files that are no safetensors files of its folder", path=str(path), problems=outside[:20]
        )
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int) else 0


def _check_series(folder: Path, present: Sequence[str], expected: Sequence[str], indexes: Sequence[str]) -> None:
    """Check that every file is there, and that none is left over from another save."""
    problems = [f"{name} is missing" for name in expected if name not in present]
    series: dict[tuple[str, int], set[int]] = {}
    for name in expected:
        if match := _SERIES.match(name):
            series.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), numbers in series.items():
        missing = itertools.islice((number for number in range(1, count + 1) if number not in numbers), _MOST_MISSING)
        if not indexes and (listed := ", ".join(map(str, missing))):
            problems.append(f"{stem}: of {count} files number {listed} is missing")
    stems = {stem for stem, _ in series}
    if indexes:
        stems.add(indexes[0].removesuffix(INDEX_SUFFIX))
    for name in sorted(set(present) - set(expected)):
        match = _SERIES.match(name)
        if (match["stem"] if match else name.removesuffix(SUFFIX)) in stems:
            problems.append(f"{name} is not in {indexes[0]}")
    if problems:
        raise CorruptSourceError(
            "its files do not fit each other",
            path=str(folder),
            problems=problems[:20],
            hint="a file was not copied, or two saves are mixed in one folder",
        )


def _check_bytes(index_path: Path, files: Sequence[WeightFile], stated_bytes: int) -> None:
    """Check that the files hold as many bytes as the index states.

    In an index of torch's writer, `total_size` counts the tensors of all ranks, which may have written the same file.
    """
    num_bytes = sum(entry.num_bytes for file in files for entry in file.header.entries)
    if stated_bytes > num_bytes:
        raise CorruptSourceError(
            f"states tensors of {stated_bytes} bytes, the files hold {num_bytes}: they are the shards of one rank,"
            " which wrote over those of the others",
            path=str(index_path),
            hint="save again with HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True)",
        )


def _check_names(folder: Path, files: Sequence[WeightFile], weight_map: Mapping[str, str] | None) -> None:
    """Check that every tensor is in one file, the one that the index names.

    Without an index, files that are not of one series can each be sound: `model.fp16.safetensors` beside the model.
    """
    holders: dict[str, str] = {}
    problems = []
    contradict = weight_map is not None
    for file in files:
        for entry in file.header.entries:
            if entry.name in holders:
                problems.append(f"tensor {entry.name!r} is in {holders[entry.name]} and in {file.name}")
                contradict |= _find_series(holders[entry.name]) == _find_series(file.name)
            elif weight_map is not None and weight_map.get(entry.name) != file.name:
                stated = weight_map.get(entry.name, "no file")
                problems.append(f"tensor {entry.name!r} is in {file.name}, the index names {stated}")
            holders.setdefault(entry.name, file.name)
    if weight_map is not None:
        problems += [
            f"tensor {name!r} is not in {file}, which the index names"
            for name, file in weight_map.items()
            if name not in holders
        ]
    if problems:
        what = "its files contradict each other about" if contradict else "several of its files hold"
        raise (CorruptSourceError if contradict else UnsupportedError)(
            f"{what} {len(problems)} tensors",
            path=str(folder),
            problems=problems[:20],
            hint="two saves are mixed in one folder, or the folder holds more than one model: keep each in its own",
        )


def _find_series(name: str) -> tuple[str, str]:
    """Return what the names of the files of one save have in common."""
    match = _SERIES.match(name)
    return (match["stem"], match["count"]) if match else (name, "")
