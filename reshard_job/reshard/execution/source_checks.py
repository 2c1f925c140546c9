"""Check that a source is what its commit states, and that it did not change since it was indexed.

The checks use the ranges that a conversion reads anyway. The CRC-32 of a file is computed from the ranges that the
units have read and from the remaining ranges, which are read here. If a conversion needs little of a file whose
container states checksums, the ranges are compared with these checksums instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.commits.commit import Commit, read_commit
from reshard.contract import COMMIT_FILE
from reshard.errors import CorruptSourceError, PlanError, SourceError, UnsupportedError
from reshard.file_identity import FileIdentity
from reshard.planning.plan import Plan
from reshard.storage.files import identity_at, record_opened_files
from reshard.storage.object_store import RemotePath, location
from reshard.storage.source_reader import SourceReader, source_changed_error
from reshard.tensors.layout import PADDING, Index, SourceFile

ReadRanges = Mapping[int, Sequence[CrcRange]]
"""Sorted ranges that were read of each source file."""

_MAX_LINES = 20
_MAX_NAME = 200
SMALL_BYTES = 1 << 20
"""Size up to which a file, or the unread rest of a file, is read whole to check it."""

_SMALL_SHARE = 8
_BLAMED_BYTES = 1 << 30
_THREADS = 16
"""Files that are opened at the same time, where each may be a request over a network."""


def check_metadata(index: Index) -> int:
    """Compare files without tensors with the commit's checksums, and return the number of bytes read.

    Raises:
        CorruptSourceError: files are damaged; the error lists them.
    """
    return check_files(index.root, index.metadata)


def check_matches_commit(index: Index, commit: Commit, *, has_patterns: bool = False) -> None:
    """Compare the format, files and tensors of a checkpoint with those that its commit lists.

    Args:
        index: index of the checkpoint, with `metadata`, so that files without tensors are compared too.
        commit: commit of the same folder.
        has_patterns: see `mismatches`.

    Raises:
        CorruptSourceError: they differ; the error lists the differences.
    """
    if problems := mismatches(index, commit, has_patterns=has_patterns):
        raise CorruptSourceError(
            f"its files are not those that {COMMIT_FILE} describes",
            path=str(index.root),
            problems=problems,
            hint="use an earlier commit; if files were added to the folder since it was committed, move them away",
        )


def mismatches(index: Index, commit: Commit, *, has_patterns: bool = False) -> list[str]:
    """Describe differences in format, files and tensors between a checkpoint and its commit, in at most 20 lines.

    Args:
        index: index of the checkpoint.
        commit: commit of the same folder.
        has_patterns: the index was made with a file of patterns, which may split padding rows off a vocabulary
            differently than the commit does.
    """
    lines = []
    if commit.format != index.format:
        lines.append(f"{COMMIT_FILE} says format {commit.format:.{_MAX_NAME}}, the files say {index.format}")
    listed = {file.path for file in commit.files} | {COMMIT_FILE}
    unlisted = sorted({file.path for file in (*index.files, *index.metadata)} - listed)
    lines += [f"{path:.{_MAX_NAME}}: is read, {COMMIT_FILE} does not list it" for path in unlisted]
    absent = _absent_tensors(index, commit, has_patterns=has_patterns)
    lines += [
        f"{name:.{_MAX_NAME}}: digest {commit.digests[name]} was committed, no file holds the tensor" for name in absent
    ]
    return lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 1], f"and {len(lines) - _MAX_LINES + 1} more"]


def _absent_tensors(index: Index, commit: Commit, *, has_patterns: bool) -> list[str]:
    """List tensors that have a digest in the commit and are not in the index, of the states that the reader reads."""
    if not commit.digests:
        return []
    absent = commit.digests.keys() - {str(tensor.key) for tensor in index.tensors}
    if has_patterns:
        absent = {name for name in absent if not name.endswith(PADDING)}
    if index.unread is not None:
        states = {tensor.key.state for tensor in index.tensors}
        absent = {name for name in absent if name.partition("/")[0] in states}
    return sorted(absent)


def check_digests(plan: Plan, digests: Mapping[str, str], *, has_patterns: bool) -> None:
    """Compare digests with those of the source's own commit, for all tensors that kept their state and type.

    A tensor that was renamed is looked up by the name that it has in the source.

    Args:
        plan: plan of the conversion.
        digests: digests of the target's tensors, by `state/name`.
        has_patterns: the index was made with a file of patterns, which may split padding rows off a vocabulary where
            the commit does not.

    Raises:
        CorruptSourceError: tensors are not what was committed; the error lists them.
    """
    index = plan.index
    try:
        committed = read_commit(index.root).digests
    except (SourceError, UnsupportedError):
        return
    own = [index.own_key(tensor.key) for tensor in index.tensors]
    if has_patterns:
        padding = {str(key) for key in own if key is not None and key.name.endswith(PADDING)}
        split = {key.removesuffix(PADDING) for key in padding - committed.keys()}
        committed = {key: value for key, value in committed.items() if key not in split}
    problems = []
    for tensor, origin in zip(plan.target_tensors, plan.origins.tolist(), strict=True):
        source, key = index.tensors[origin], own[origin]
        if key is None or (source.key, source.dtype) != (tensor.key, tensor.dtype):
            continue
        expected, actual = committed.get(str(key)), digests.get(str(tensor.key))
        if expected is not None and actual is not None and actual != expected:
            problems.append(f"{key}: {expected} was committed, {actual} is there")
    if problems:
        raise CorruptSourceError(
            "tensors are not what was committed: nothing was published",
            path=str(index.root),
            problems=problems[:20],
            hint="use an earlier commit",
        )


def check_settings(index: Index, *, is_loaded_later: bool = False) -> int:
    """Compare files that hold settings with the commit's checksums, and return the number of bytes read.

    Pickles beside tensors hold settings, too. A container that states checksums also states one of its pickle, and the
    reader has compared it. Files of other containers are read whole here.

    Args:
        index: index whose settings are used, though not all of its tensors are read now.
        is_loaded_later: the tensors will be read later, which checks the files that hold only tensors, see
            `reshard.virtual.load`. Files of safetensors are therefore not read here.

    Raises:
        CorruptSourceError: files are damaged; the error lists them.
    """
    bare = [file for file in index.files if not file.checksums]
    if is_loaded_later:
        bare = [file for file in bare if not file.path.endswith(".safetensors")]
    return check_files(index.root, (*bare, *index.metadata))


def check_files(root: Path, files: Sequence[SourceFile]) -> int:
    """Read files whose checksum the commit states, compare them, and return the number of bytes read.

    Raises:
        CorruptSourceError: files are damaged; the error lists them.
    """
    files = [file for file in files if file.crc32 is not None]
    source = SourceReader(root, files)
    try:
        sums = [source.checksum(number, 0, file.num_bytes).crc32 for number, file in enumerate(files)]
    finally:
        source.close()
    _refuse_damaged(root, [(file, value) for file, value in zip(files, sums, strict=True) if value != file.crc32])
    return sum(file.num_bytes for file in files)


@contextlib.contextmanager
def report_damage_first() -> Iterator[None]:
    """Raise CorruptSourceError instead of another error if an opened file is not what its commit states.

    Damaged metadata may look like a feature that this version does not support. Without this check, users would not
    know that they can try an earlier commit.

    Raises:
        CorruptSourceError: a file that was opened is damaged, which may have caused the other error.
    """
    with record_opened_files() as opened:
        try:
            yield
        except (UnsupportedError, PlanError):
            for marker in [path for path in opened if path.endswith(f"/{COMMIT_FILE}")]:
                _refuse_damaged_of(location(marker).parent, list(opened))
            raise


def _refuse_damaged_of(root: Path, opened: Sequence[str]) -> None:
    """Compare the files that were opened last with the commit; the reader failed on one of them."""
    try:
        stated = {f"{root}/{file.path}": file for file in read_commit(root).files}
    except (SourceError, UnsupportedError):
        return
    files, left = [], _BLAMED_BYTES
    for path in reversed(opened):
        file = stated.get(path)
        left -= 0 if file is None else file.num_bytes
        if file is not None and left >= 0:
            files.append(SourceFile(path=file.path, num_bytes=file.num_bytes, crc32=file.crc32))
    check_files(root, files)


def check_committed(source: SourceReader, index: Index, read: ReadRanges, num_threads: int) -> tuple[set[int], int]:
    """Compare files with the commit's checksums.

    Args:
        source: open files of the index.
        index: the source.
        read: ranges that all units together have read.
        num_threads: number of threads that read.

    Returns:
        Numbers of the files that were compared, and the number of bytes read for it.

    Raises:
        CorruptSourceError: files are damaged; the error lists them.
        SourceChangedError: a range that was read twice had two contents.
    """
    whole = [number for number, file in enumerate(index.files) if _is_compared(file, read.get(number, ()))]

    def complete(number: int) -> tuple[int, int]:
        return source.complete(number, read.get(number, ()), 0, index.files[number].num_bytes)

    with ThreadPoolExecutor(num_threads) as pool:
        completed = list(pool.map(complete, whole))
    sums = [(index.files[number], value) for number, (value, _) in zip(whole, completed, strict=True)]
    _refuse_damaged(index.root, [(file, value) for file, value in sums if value != file.crc32])
    return set(whole), sum(more for _, more in completed)


def _is_compared(file: SourceFile, ranges: Sequence[CrcRange]) -> bool:
    """Return True if the checksum of the whole file is needed to prove its ranges, or if it costs little."""
    if file.crc32 is None:
        return False
    if not ranges:  # only metadata was read, of which containers that state checksums state one, too
        return not file.checksums or file.num_bytes <= SMALL_BYTES
    rest = file.num_bytes - sum(crc_range.num_bytes for crc_range in crc.separate_overlaps(ranges)[0])
    return rest <= max(SMALL_BYTES, file.num_bytes // _SMALL_SHARE) or not _are_stated(file, ranges)


def _are_stated(file: SourceFile, ranges: Sequence[CrcRange]) -> bool:
    """Return True if each of the sorted ranges lies in a range whose checksum the container states."""
    stated = iter(file.checksums)
    current = next(stated, None)
    for crc_range in ranges:
        while current is not None and current.start + current.num_bytes < crc_range.start + crc_range.num_bytes:
            current = next(stated, None)
        if current is None or crc_range.start < current.start:
            return False
    return True


def _refuse_damaged(root: Path, damaged: Sequence[tuple[SourceFile, int]]) -> None:
    if not damaged:
        return
    problems = [
        f"{file.path}: CRC-32 {file.crc32:08x} was committed, the content has {crc32:08x}" for file, crc32 in damaged
    ]
    raise CorruptSourceError(
        f"{'1 file is' if len(problems) == 1 else f'{len(problems)} files are'} not what was committed",
        path=str(root),
        problems=problems[:20],
        hint="use an earlier commit",
    )


def find_touched_files(index: Index) -> dict[str, FileIdentity]:
    """Find files whose identity changed since they were indexed, though the change does not prove other content.

    Raises:
        SourceChangedError: files changed for certain, or are gone; the error lists them.
    """
    files = [file for file in (*index.files, *index.metadata) if file.identity is not None]
    if isinstance(index.root, RemotePath):
        index.root.forget({(index.root / file.path).parent for file in files})
    with ThreadPoolExecutor(_THREADS) as pool:
        results = list(pool.map(lambda file: _identity_or_change(index, file), files))
    if problems := [f"{file.path}: {now}" for file, now in zip(files, results, strict=True) if isinstance(now, str)]:
        raise source_changed_error(problems, str(index.root))
    return {
        file.path: now
        for file, now in zip(files, results, strict=True)
        if isinstance(now, FileIdentity) and now != file.identity
    }


def _identity_or_change(index: Index, file: SourceFile) -> FileIdentity | str:
    """Return the file's present identity, or a text that describes how the file changed for certain."""
    try:
        now = identity_at(index.root / file.path)
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be opened: {error.strerror or error}"
    before, is_stated = file.identity or now, file.crc32 is not None
    return before.difference(now, is_stated=is_stated) or now


def check_again(source: SourceReader, index: Index, read: ReadRanges, paths: Collection[str]) -> int:
    """Read ranges of files again, compare them with their checksums, and return the number of bytes read.

    Raises:
        SourceChangedError: files have another content; the error lists them.
    """
    problems, more = [], 0
    for number, file in enumerate(index.files):
        ranges = read.get(number, ()) if file.path in paths else ()
        more += sum(crc_range.num_bytes for crc_range in ranges)
        if any(source.checksum(number, crc_range.start, crc_range.num_bytes) != crc_range for crc_range in ranges):
            problems.append(f"{file.path}: has another content, though size and time of writing are the same")
    if problems:
        raise source_changed_error(problems, str(index.root))
    return more


def places_digest(index: Index) -> bytes:
    """Compute a digest of the index's tensors and of the files and positions of their boxes."""
    sha256 = hashlib.sha256()
    for tensor in index.tensors:
        sha256.update(f"{tensor.key!a} {tensor.shape} {tensor.dtype}\n".encode())
    for field in dataclasses.fields(index.shards):
        sha256.update(np.ascontiguousarray(getattr(index.shards, field.name)).data)
    return sha256.digest()


def content_digest(index: Index, read: ReadRanges) -> str:
    """Compute a digest of all ranges that were read and of their content.

    It is equal for equal sources, however the units were shared among workers.
    """
    sha256 = hashlib.sha256(places_digest(index))
    for number in sorted(read):
        sha256.update(f"{index.files[number].path!a}\n".encode())
        for crc_range in read[number]:
            sha256.update(f"{crc_range.start} {crc_range.num_bytes} {crc_range.crc32:08x}\n".encode())
    return sha256.hexdigest()[:32]
