"""Read checkpoints to their last byte and compare: with their own commit, or with each other in another layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.checksums import crc
from reshard.checksums.crc import Piece
from reshard.checksums.digest import finished, to_hex
from reshard.commits.commit import Commit, check_files, damaged, other_content, read_commit
from reshard.errors import CorruptSourceError, UncommittedError, VerificationError
from reshard.execution.executor import Progress, pays_to_fork
from reshard.execution.scan import Term, term_of
from reshard.storage.durable import file_crc32
from reshard.storage.object_store import RemotePath
from reshard.storage.source_reader import SourceReader
from reshard.system.limits import default_num_threads
from reshard.tensors.geometry import Box, tiles
from reshard.tensors.layout import Index
from reshard.tensors.shard_table import ShardRow

_TASK_BYTES = 64 << 20


def digests(index: Index, *, commit: Commit | None = None, progress: Progress | None = None) -> dict[str, str]:
    """Digest of every logical tensor, by reading every copy of it through the format's reader.

    Args:
        index: the checkpoint.
        commit: whose files it is made of: their checksums are compared too, without reading anything twice.
        progress: told about bytes read.

    Raises:
        CorruptSourceError: files are not what was committed, copies of one tensor differ, or bytes do not match the
            container's checksums.
    """
    terms: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    read: dict[int, list[Piece]] = defaultdict(list)

    def took(seen: Sequence[_Seen]) -> None:
        for part in seen:
            terms[part.tensor][part.replica] ^= part.found.term
            read[part.file] += part.found.pieces
            if progress is not None:
                progress(part.num_bytes)

    if commit is not None:
        check_files(index.root, commit)
    source = SourceReader(index.root, index.files)
    try:
        _look(index, source, took)
        if commit is not None:
            _check_contents(index, source, commit, read)
        source.check_sums(read)
    finally:
        source.close()
    return _agreed(index, terms)


class _Seen(NamedTuple):
    """A part that was read."""

    tensor: int
    replica: int
    file: int
    num_bytes: int
    found: Term


def _look(index: Index, source: SourceReader, took: Callable[[Sequence[_Seen]], None]) -> None:
    """Read every part of every copy, by all processors where that pays."""

    def look(task: Sequence[tuple[ShardRow, Box]]) -> list[_Seen]:
        found = []
        for row, part in task:
            tensor = index.tensors[row.tensor]
            term = term_of(source, row, part, tensor.shape, tensor.item_bytes)
            found.append(_Seen(row.tensor, row.replica, row.file, part.num_elements * tensor.item_bytes, term))
        return found

    tasks = _tasks(index)
    num_bytes = sum(file.num_bytes for file in index.files)
    if not isinstance(index.root, RemotePath) and pays_to_fork(num_bytes):
        from reshard.system.process_pool import map_in_processes

        source.may_map = True
        map_in_processes(tasks, default_num_threads(), look, took)
    else:
        for task in tasks:
            took(look(task))


def _tasks(index: Index) -> Iterator[list[tuple[ShardRow, Box]]]:
    """All boxes, cut and collected to about `_TASK_BYTES`."""
    task: list[tuple[ShardRow, Box]] = []
    held = 0
    for number, rows in enumerate(index.shards.by_tensor(len(index.tensors))):
        tensor = index.tensors[number]
        for row in index.shards.each(rows, len(tensor.shape)):
            for tile in tiles(row.box.size, _TASK_BYTES // tensor.item_bytes):
                task.append((row, tile.shift(row.box.offset)))
                held += tile.num_elements * tensor.item_bytes
                if held >= _TASK_BYTES:
                    yield task
                    task, held = [], 0
    if task:
        yield task


def _check_contents(index: Index, source: SourceReader, commit: Commit, read: Mapping[int, list[Piece]]) -> None:
    """Compare the checksums of files, from those of what was read of them; only the rest is read here.

    Raises:
        CorruptSourceError: with every file that is not what was committed.
    """
    numbers = {file.path: number for number, file in enumerate(index.files)}
    problems = []
    for file in commit.files:
        if file.crc32 is None:
            continue
        number = numbers.get(file.path)
        pieces = [] if number is None else crc.join(read.get(number, ()))
        gaps = crc.gaps(pieces, 0, file.num_bytes)
        if number is None or gaps is None:  # not of tensors, or a part is shared by several
            found = file_crc32(index.root / file.path)
        else:
            rest = [source.checksum(number, start, length) for start, length in gaps]
            found = crc.assemble([*pieces, *rest], start=0, num_bytes=file.num_bytes)
        if found != file.crc32:
            problems.append(other_content(file, found))
    if problems:
        raise damaged(index.root, commit, problems)


def _agreed(index: Index, terms: Mapping[int, Mapping[int, int]]) -> dict[str, str]:
    """Digests of all tensors, in the index's order.

    Raises:
        CorruptSourceError: with every tensor whose copies differ.
    """
    found: dict[str, str] = {}
    problems = []
    for number, tensor in enumerate(index.tensors):
        sums = {replica: finished(term, tensor.num_bytes) for replica, term in sorted(terms.get(number, {}).items())}
        if len(set(sums.values())) > 1:
            copies = ", ".join(f"{replica}: {to_hex(value)}" for replica, value in sums.items())
            problems.append(f"{tensor.key}: its copies differ ({copies})")
        if sums:
            found[str(tensor.key)] = to_hex(sums[min(sums)])
    if problems:
        raise CorruptSourceError(
            "copies of one tensor differ",
            path=str(index.root),
            problems=problems[:20],
            hint="ranks wrote different values, or a file is damaged: use an earlier checkpoint",
        )
    return found


def verify_commit(index: Index, *, progress: Progress | None = None) -> dict[str, str]:
    """Check a checkpoint against its own commit marker, if it has one; returns the digests.

    Raises:
        CorruptSourceError: files or tensors are not what was committed.
    """
    folder = index.root
    try:
        commit = read_commit(folder)
    except UncommittedError:
        return digests(index, progress=progress)
    found = digests(index, commit=commit, progress=progress)
    problems = [
        f"{name}: {commit.digests[name]} was committed, {value} is there"
        for name, value in found.items()
        if name in commit.digests and commit.digests[name] != value
    ]
    if problems:
        raise CorruptSourceError(
            "tensors are not what was committed",
            path=str(folder),
            problems=problems[:20],
            hint="use an earlier commit, or convert its source again",
        )
    return found


def compare_digests(first: Mapping[str, str], second: Mapping[str, str]) -> None:
    """Check that two checkpoints hold the same tensors.

    Raises:
        VerificationError: with every tensor that differs or exists on one side only.
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


def total(values: Mapping[str, str]) -> str:
    """CRC-32 of a line for each tensor, `name digest`, in the order of the names' code points; empty for none.

    Two tensors of one shape in each other's places change it: the lines say which digest is whose.
    """
    lines = "".join(f"{name} {values[name]}\n" for name in sorted(values))
    return to_hex(crc.crc32(lines.encode("utf-8", "surrogatepass"))) if values else ""
