"""Read checkpoints to their last byte and compare: with their own commit, or with each other in another layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from reshard.commit import check_files, read_commit
from reshard.crc import Piece
from reshard.digest import finished, to_hex
from reshard.errors import CorruptSourceError, UncommittedError, VerificationError
from reshard.execute import Progress, row_term
from reshard.layout import Index
from reshard.reading import Source

_PART_BYTES = 8 << 20


def digests(index: Index, *, progress: Progress | None = None) -> dict[str, str]:
    """Digest of every logical tensor, by reading every copy of it through the format's reader.

    Args:
        index: the checkpoint.
        progress: told about bytes read.

    Raises:
        CorruptSourceError: copies of one tensor differ, or bytes do not match the container's checksums.
    """
    source = Source(index.root, index.files)
    found: dict[str, str] = {}
    read: dict[int, list[Piece]] = defaultdict(list)
    problems = []
    try:
        for number, rows in enumerate(index.shards.by_tensor(len(index.tensors))):
            tensor = index.tensors[number]
            by_replica: dict[int, int] = {}
            for row in index.shards.each(rows, len(tensor.shape)):
                found_row = row_term(source, row, tensor.shape, tensor.item_bytes, _PART_BYTES // tensor.item_bytes)
                by_replica[row.replica] = by_replica.get(row.replica, 0) ^ found_row.term
                read[row.file] += found_row.pieces
                if progress is not None:
                    progress(row.box.num_elements * tensor.item_bytes)
            sums = {replica: finished(term, tensor.num_bytes) for replica, term in sorted(by_replica.items())}
            if len(set(sums.values())) > 1:
                copies = ", ".join(f"{replica}: {to_hex(value)}" for replica, value in sums.items())
                problems.append(f"{tensor.key}: its copies differ ({copies})")
            if sums:
                found[str(tensor.key)] = to_hex(sums[min(sums)])
        source.check_sums(read)
    finally:
        source.close()
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
    check_files(folder, commit, crc=True)
    found = digests(index, progress=progress)
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


def compare(first: Mapping[str, str], second: Mapping[str, str]) -> None:
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
    """Sum of all digests modulo 2^32, in hex."""
    return to_hex(sum(int(value, 16) for value in values.values()) % 2**32) if values else ""
