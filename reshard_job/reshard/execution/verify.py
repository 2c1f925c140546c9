"""Read whole checkpoints and compare them with their own commits, or with each other in different layouts."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.checksums.digest import finish_digest, to_hex
from reshard.commits.commit import Commit, check_files, damaged_files_error, describe_crc32_mismatch, read_commit
from reshard.errors import CorruptSourceError, UncommittedError, VerificationError
from reshard.execution.averages import describe_differences, read_mean_digest
from reshard.execution.executor import Progress, is_worth_forking
from reshard.execution.scan import Term, read_term
from reshard.planning.averages import find_averages
from reshard.planning.replicas import describe_rank_local, find_equal_copies
from reshard.storage.durable import file_crc32
from reshard.storage.object_store import RemotePath
from reshard.storage.source_reader import SourceReader
from reshard.system.limits import default_num_threads
from reshard.tensors.geometry import Box, tiles
from reshard.tensors.layout import Index
from reshard.tensors.shard_table import ShardRow

TASK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Differences:
    """Tensors whose copies differ where they may.

    Attributes:
        averaged: those that are the mean of their copies, with the largest difference.
        rank_local: names of buffers that each data-parallel rank computes for itself.
    """

    averaged: dict[str, float] = dataclasses.field(default_factory=dict)
    rank_local: list[str] = dataclasses.field(default_factory=list)

    def describe(self) -> list[str]:
        """Return a sentence about each kind of which there are any."""
        return [text for text in (describe_differences(self.averaged), describe_rank_local(self.rank_local)) if text]


def read_digests(
    index: Index,
    *,
    commit: Commit | None = None,
    progress: Progress | None = None,
    differences: Differences | None = None,
) -> dict[str, str]:
    """Read every copy of every logical tensor, and return the tensors' digests.

    A tensor that the checkpoint declares to be the mean of its copies has the digest of the mean. Where its copies
    differ, they are read twice.

    Args:
        index: the checkpoint.
        commit: commit of the checkpoint: the checksums of its files are compared too, without reading a byte twice.
        progress: called with the number of bytes read since the last call.
        differences: gets the tensors whose copies differ where they may.

    Raises:
        CorruptSourceError: files are not what was committed, copies of one tensor differ, or bytes do not match the
            container's checksums.
    """
    differences = Differences() if differences is None else differences
    terms: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    read: dict[int, list[CrcRange]] = defaultdict(list)

    def collect(boxes: Sequence[_BoxTerm]) -> None:
        for box in boxes:
            terms[box.tensor][box.replica] ^= box.term.term
            read[box.file] += box.term.ranges
            if progress is not None:
                progress(box.num_bytes)

    if commit is not None:
        check_files(index.root, commit)
    source = SourceReader(index.root, index.files)
    try:
        _read_boxes(index, source, collect)
        if commit is not None:
            _check_contents(index, source, commit, read)
        source.check_sums(read)
        means = _read_means(index, source, terms, differences.averaged)
    finally:
        source.close()
    return _compare_copies(index, terms, means, differences)


class _BoxTerm(NamedTuple):
    """A box that was read, and its term."""

    tensor: int
    replica: int
    file: int
    num_bytes: int
    term: Term


def _read_boxes(index: Index, source: SourceReader, collect: Callable[[Sequence[_BoxTerm]], None]) -> None:
    """Read all boxes of all copies, in several processes if that is faster."""

    def read(task: Sequence[tuple[ShardRow, Box]]) -> list[_BoxTerm]:
        boxes = []
        for row, box in task:
            tensor = index.tensors[row.tensor]
            term = read_term(source, row, box, tensor.shape, tensor.item_bytes)
            boxes.append(_BoxTerm(row.tensor, row.replica, row.file, box.num_elements * tensor.item_bytes, term))
        return boxes

    tasks = _tasks(index)
    num_bytes = sum(file.num_bytes for file in index.files)
    if not isinstance(index.root, RemotePath) and is_worth_forking(num_bytes):
        from reshard.system.process_pool import map_in_processes

        source.may_map = True
        map_in_processes(tasks, default_num_threads(), read, collect)
    else:
        for task in tasks:
            collect(read(task))


def _tasks(index: Index) -> Iterator[list[tuple[ShardRow, Box]]]:
    """Yield all boxes in tasks of about `TASK_BYTES`; larger boxes are cut."""
    task: list[tuple[ShardRow, Box]] = []
    held = 0
    for number, rows in enumerate(index.shards.by_tensor(len(index.tensors))):
        tensor = index.tensors[number]
        for row in index.shards.iterate_boxes(rows, len(tensor.shape)):
            for tile in tiles(row.box.size, TASK_BYTES // tensor.item_bytes):
                task.append((row, tile.shift(row.box.offset)))
                held += tile.num_elements * tensor.item_bytes
                if held >= TASK_BYTES:
                    yield task
                    task, held = [], 0
    if task:
        yield task


def _check_contents(index: Index, source: SourceReader, commit: Commit, read: Mapping[int, list[CrcRange]]) -> None:
    """Compare files with the checksums of their commit; only ranges that were not read before are read here.

    Raises:
        CorruptSourceError: files are not what was committed; the error lists them.
    """
    numbers = {file.path: number for number, file in enumerate(index.files)}
    problems = []
    for file in commit.files:
        if file.crc32 is None:
            continue
        number = numbers.get(file.path)
        ranges = [] if number is None else crc.join(read.get(number, ()))
        gaps = crc.find_gaps(ranges, 0, file.num_bytes)
        if number is None or gaps is None:  # a file without tensors, or tensors share some bytes of the file
            actual = file_crc32(index.root / file.path)
        else:
            rest = [source.checksum(number, start, length) for start, length in gaps]
            actual = crc.assemble([*ranges, *rest], start=0, num_bytes=file.num_bytes)
        if actual != file.crc32:
            problems.append(describe_crc32_mismatch(file, actual))
    if problems:
        raise damaged_files_error(index.root, commit, problems)


def _read_means(
    index: Index, source: SourceReader, terms: Mapping[int, Mapping[int, int]], averaged: dict[str, float]
) -> dict[int, int]:
    """Return the digests of the means of declared tensors whose copies differ; add the differences to `averaged`."""
    differing = {
        index.tensors[number].key.name
        for number, by_replica in terms.items()
        if index.tensors[number].key in index.averaged and len(set(by_replica.values())) > 1
    }
    if not differing:
        return {}
    means: dict[int, int] = {}
    rows = index.shards.by_tensor(len(index.tensors))
    chosen = [own if tensor.key.name in differing else own[:0] for tensor, own in zip(index.tensors, rows, strict=True)]
    for number, average in find_averages(index, rows, chosen, agreement=False).items():
        mean = read_mean_digest(source, index, number, average, index.tensors[number].dtype)
        means[number] = mean.digest
        if mean.difference is not None:
            averaged[str(index.tensors[number].key)] = mean.difference
    return means


def _compare_copies(
    index: Index, terms: Mapping[int, Mapping[int, int]], means: Mapping[int, int], differences: Differences
) -> dict[str, str]:
    """Return the digests of all tensors, in the index's order, after comparing all copies of each tensor.

    Args:
        index: the checkpoint.
        terms: sums of the terms of each copy, by tensor and copy.
        means: digests of the tensors that are the mean of their copies.
        differences: gets the tensors whose copies differ where each rank has its own.

    Raises:
        CorruptSourceError: copies of tensors differ; the error lists the tensors.
    """
    digests: dict[str, str] = {}
    problems = []
    for number, tensor in enumerate(index.tensors):
        sums = {
            replica: finish_digest(term, tensor.num_bytes) for replica, term in sorted(terms.get(number, {}).items())
        }
        if tensor.key in index.rank_local and len(set(sums.values())) > 1:
            differences.rank_local.append(tensor.key.name)
        sums = {copy: sums[copy] for copy in find_equal_copies(index, tensor.key, sums)} if sums else {}
        ranks = index.averaged[tensor.key] if number in means else 1
        if any(value != sums[min(sums) + (replica - min(sums)) % ranks] for replica, value in sums.items()):
            copies = ", ".join(f"{replica}: {to_hex(value)}" for replica, value in sums.items())
            problems.append(f"{tensor.key}: its copies differ ({copies})")
        if sums:
            digests[str(tensor.key)] = to_hex(means.get(number, sums[min(sums)]))
    if problems:
        raise CorruptSourceError(
            "copies of one tensor differ",
            path=str(index.root),
            problems=problems[:20],
            hint="ranks wrote different values, or a file is damaged: use an earlier checkpoint",
        )
    return digests


def verify_commit(
    index: Index, *, progress: Progress | None = None, differences: Differences | None = None
) -> dict[str, str]:
    """Compare a checkpoint with its own commit, if it has one, and return the digests; arguments as `read_digests`.

    Raises:
        CorruptSourceError: files or tensors are not what was committed.
    """
    folder = index.root
    try:
        commit = read_commit(folder)
    except UncommittedError:
        return read_digests(index, progress=progress, differences=differences)
    digests = read_digests(index, commit=commit, progress=progress, differences=differences)
    problems = [
        f"{name}: {commit.digests[name]} was committed, {value} is there"
        for name, value in digests.items()
        if name in commit.digests and commit.digests[name] != value
    ]
    if problems:
        raise CorruptSourceError(
            "tensors are not what was committed",
            path=str(folder),
            problems=problems[:20],
            hint="use an earlier commit, or convert its source again",
        )
    return digests


def compare_digests(first: Mapping[str, str], second: Mapping[str, str]) -> None:
    """Check that two checkpoints hold the same tensors.

    Raises:
        VerificationError: tensors differ or exist on one side only; the error lists them.
    """
    problems = [f"{name}: only in the first" for name in sorted(first.keys() - second.keys())]
    problems += [f"{name}: only in the second" for name in sorted(second.keys() - first.keys())]
    problems += [
        f"{name}: {first[name]} in the first, {second[name]} in the second"
        for name in sorted(first.keys() & second.keys())
        if first[name] != second[name]
    ]
    if problems:
        raise VerificationError(f"{len(problems)} tensors differ", problems=problems[:20])


def total_digest(values: Mapping[str, str]) -> str:
    """Compute one digest for all tensors: the CRC-32 of lines `name digest`, sorted by name; empty for no tensors.

    Names are sorted by code points. The lines hold the names, so that two tensors that are swapped change the digest.
    """
    lines = "".join(f"{name} {values[name]}\n" for name in sorted(values))
    return to_hex(crc.crc32(lines.encode("utf-8", "surrogatepass"))) if values else ""
