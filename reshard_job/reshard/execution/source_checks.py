"""Is a source what its commit states, and still what was indexed? Answered from what a conversion has read anyway.

The CRC-32 of a file follows from those of the ranges that the units have read and of the rest, which alone is read
here. Where a conversion needs little of a file whose container states checksums of its own, those are enough.
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
from reshard.checksums.crc import Piece
from reshard.commits.commit import Commit, read_commit
from reshard.contract import COMMIT_FILE
from reshard.errors import CorruptSourceError, PlanError, SourceError, UnsupportedError
from reshard.file_identity import FileIdentity
from reshard.planning.plan import Plan
from reshard.storage.files import identity_at, noting_opened
from reshard.storage.object_store import RemotePath, location
from reshard.storage.source_reader import SourceReader, changed
from reshard.tensors.layout import PADDING, Index, SourceFile

Ranges = Mapping[int, Sequence[Piece]]
"""What was read of each source file, with checksums, in order."""

_MAX_LINES = 20
_MAX_NAME = 200
_SMALL_BYTES = 1 << 20
_SMALL_PART = 8
_BLAMED_BYTES = 1 << 30
_THREADS = 16
"""Files that are opened at the same time, where each may be a request over a network."""


def check_metadata(index: Index) -> int:
    """Compare files without tensors with the commit's checksums, and return how many bytes that has read.

    Raises:
        CorruptSourceError: with every file that is damaged.
    """
    return check_files(index.root, index.metadata)


def check_matches_commit(index: Index, commit: Commit, *, told: bool = False) -> None:
    """Compare what the files of a checkpoint say of themselves with what its commit says of them.

    Args:
        index: with `metadata`, so that files without tensors are compared too.
        commit: of the same folder.
        told: see `mismatches`.

    Raises:
        CorruptSourceError: with everything that differs.
    """
    if problems := mismatches(index, commit, told=told):
        raise CorruptSourceError(
            f"its files are not those that {COMMIT_FILE} describes",
            path=str(index.root),
            problems=problems,
            hint="use an earlier commit; if files were added to the folder since it was committed, move them away",
        )


def mismatches(index: Index, commit: Commit, *, told: bool = False) -> list[str]:
    """Return where a commit contradicts its files in format, files or tensors, in at most 20 lines.

    Args:
        index: what the files say.
        commit: of the same folder.
        told: by a file of patterns, which need not tell padding rows of a vocabulary apart as the commit does.
    """
    found = []
    if commit.format != index.format:
        found.append(f"{COMMIT_FILE} says format {commit.format:.{_MAX_NAME}}, the files say {index.format}")
    listed = {file.path for file in commit.files} | {COMMIT_FILE}
    read = sorted({file.path for file in (*index.files, *index.metadata)} - listed)
    found += [f"{path:.{_MAX_NAME}}: is read, {COMMIT_FILE} does not list it" for path in read]
    absent = _absent_tensors(index, commit, told=told)
    found += [
        f"{name:.{_MAX_NAME}}: digest {commit.digests[name]} was committed, no file holds the tensor" for name in absent
    ]
    return found if len(found) <= _MAX_LINES else [*found[: _MAX_LINES - 1], f"and {len(found) - _MAX_LINES + 1} more"]


def _absent_tensors(index: Index, commit: Commit, *, told: bool) -> list[str]:
    """Names of tensors with a digest in the commit that the files do not hold, of the states that were read."""
    if not commit.digests:
        return []
    absent = commit.digests.keys() - {str(tensor.key) for tensor in index.tensors}
    if told:
        absent = {name for name in absent if not name.endswith(PADDING)}
    if index.unread is not None:
        states = {tensor.key.state for tensor in index.tensors}
        absent = {name for name in absent if name.partition("/")[0] in states}
    return sorted(absent)


def check_digests(plan: Plan, digests: Mapping[str, str], *, told: bool) -> None:
    """Compare what was read with the digests of the source's own commit, where the tensor kept its state and type.

    A tensor that only got another name is looked up by the name that it has in the source.

    Args:
        plan: what was done.
        digests: of the target's tensors, by `state/name`.
        told: by a file of patterns, which may tell padding rows of a vocabulary apart that the commit does not.

    Raises:
        CorruptSourceError: with every tensor that is not what was committed.
    """
    index = plan.index
    try:
        committed = read_commit(index.root).digests
    except SourceError:
        return
    own = [index.own_key(tensor.key) for tensor in index.tensors]
    if told:
        padding = {str(key) for key in own if key is not None and key.name.endswith(PADDING)}
        apart = {key.removesuffix(PADDING) for key in padding - committed.keys()}
        committed = {key: value for key, value in committed.items() if key not in apart}
    problems = []
    for tensor, origin in zip(plan.target_tensors, plan.origins.tolist(), strict=True):
        source, key = index.tensors[origin], own[origin]
        if key is None or (source.key, source.dtype) != (tensor.key, tensor.dtype):
            continue
        expected, found = committed.get(str(key)), digests.get(str(tensor.key))
        if expected is not None and found is not None and found != expected:
            problems.append(f"{key}: {expected} was committed, {found} is there")
    if problems:
        raise CorruptSourceError(
            "tensors are not what was committed: nothing was published",
            path=str(index.root),
            problems=problems[:20],
            hint="use an earlier commit",
        )


def check_settings(index: Index, *, is_loaded_later: bool = False) -> int:
    """Compare all files that settings are taken from, where only the commit proves them; the bytes that this has read.

    Settings lie in pickles beside tensors too. Containers that state checksums state one of the pickle, which was
    compared when it was read; the others are read whole.

    Args:
        index: whose settings are used, though not all of its tensors are read now.
        is_loaded_later: what is read of tensors then proves their files, see `reshard.virtual.load`. Files of
            safetensors hold nothing else, so they are left to that.

    Raises:
        CorruptSourceError: with every file that is damaged.
    """
    bare = [file for file in index.files if not file.checksums]
    if is_loaded_later:
        bare = [file for file in bare if not file.path.endswith(".safetensors")]
    return check_files(index.root, (*bare, *index.metadata))


def check_files(root: Path, files: Sequence[SourceFile]) -> int:
    """Read files of which the commit states a checksum, and return how many bytes that has read.

    Raises:
        CorruptSourceError: with every file that is damaged.
    """
    files = [file for file in files if file.crc32 is not None]
    source = SourceReader(root, files)
    try:
        found = [source.checksum(number, 0, file.num_bytes).crc32 for number, file in enumerate(files)]
    finally:
        source.close()
    _refuse_damaged(root, [(file, value) for file, value in zip(files, found, strict=True) if value != file.crc32])
    return sum(file.num_bytes for file in files)


@contextlib.contextmanager
def damage_first() -> Iterator[None]:
    """Where a source is refused, say so if a file that was opened for it is not what its commit states.

    Damaged metadata may look like something that this version does not support, and nobody would try an earlier commit.

    Raises:
        CorruptSourceError: in the place of an error that damage may have caused.
    """
    with noting_opened() as opened:
        try:
            yield
        except (UnsupportedError, PlanError):
            for marker in [path for path in opened if path.endswith(f"/{COMMIT_FILE}")]:
                _refuse_damaged_of(location(marker).parent, list(opened))
            raise


def _refuse_damaged_of(root: Path, opened: Sequence[str]) -> None:
    """Compare the files that were opened last, which are those that a reader complained of."""
    try:
        stated = {f"{root}/{file.path}": file for file in read_commit(root).files}
    except SourceError:
        return
    files, left = [], _BLAMED_BYTES
    for path in reversed(opened):
        file = stated.get(path)
        left -= 0 if file is None else file.num_bytes
        if file is not None and left >= 0:
            files.append(SourceFile(path=file.path, num_bytes=file.num_bytes, crc32=file.crc32))
    check_files(root, files)


def check_committed(source: SourceReader, index: Index, read: Ranges, num_threads: int) -> tuple[set[int], int]:
    """Compare files with the commit's checksums, and return which of them, and how many bytes that has read.

    Args:
        source: open files of the index.
        index: the source.
        read: of all units together.
        num_threads: that may read at the same time.

    Raises:
        CorruptSourceError: with every file that is damaged.
        SourceChangedError: a range that was read twice had two contents.
    """
    whole = [number for number, file in enumerate(index.files) if _is_compared(file, read.get(number, ()))]

    def complete(number: int) -> tuple[int, int]:
        return source.complete(number, read.get(number, ()), 0, index.files[number].num_bytes)

    with ThreadPoolExecutor(num_threads) as pool:
        found = list(pool.map(complete, whole))
    sums = [(index.files[number], value) for number, (value, _) in zip(whole, found, strict=True)]
    _refuse_damaged(index.root, [(file, value) for file, value in sums if value != file.crc32])
    return set(whole), sum(more for _, more in found)


def _is_compared(file: SourceFile, pieces: Sequence[Piece]) -> bool:
    """True if the file's own checksum is needed, or costs little."""
    if file.crc32 is None:
        return False
    if not pieces:  # its metadata was read: containers that state checksums state one of that too
        return not file.checksums or file.num_bytes <= _SMALL_BYTES
    rest = file.num_bytes - sum(piece.num_bytes for piece in crc.disjoint(pieces)[0])
    return rest <= max(_SMALL_BYTES, file.num_bytes // _SMALL_PART) or not _are_stated(file, pieces)


def _are_stated(file: SourceFile, pieces: Sequence[Piece]) -> bool:
    """True if each of the sorted pieces lies in a range whose checksum the container states."""
    stated = iter(file.checksums)
    current = next(stated, None)
    for piece in pieces:
        while current is not None and current.start + current.num_bytes < piece.start + piece.num_bytes:
            current = next(stated, None)
        if current is None or piece.start < current.start:
            return False
    return True


def _refuse_damaged(root: Path, found: Sequence[tuple[SourceFile, int]]) -> None:
    if not found:
        return
    problems = [
        f"{file.path}: CRC-32 {file.crc32:08x} was committed, the content has {crc32:08x}" for file, crc32 in found
    ]
    raise CorruptSourceError(
        f"{'1 file is' if len(problems) == 1 else f'{len(problems)} files are'} not what was committed",
        path=str(root),
        problems=problems[:20],
        hint="use an earlier commit",
    )


def touched_files(index: Index) -> dict[str, FileIdentity]:
    """Files with another identity than when they were indexed that does not prove another content.

    Raises:
        SourceChangedError: with every file whose identity proves that it was changed, or that is gone.
    """
    files = [file for file in (*index.files, *index.metadata) if file.identity is not None]
    if isinstance(index.root, RemotePath):
        index.root.forget({(index.root / file.path).parent for file in files})
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda file: _look(index, file), files))
    if problems := [f"{file.path}: {now}" for file, now in zip(files, found, strict=True) if isinstance(now, str)]:
        raise changed(problems, str(index.root))
    return {
        file.path: now
        for file, now in zip(files, found, strict=True)
        if isinstance(now, FileIdentity) and now != file.identity
    }


def _look(index: Index, file: SourceFile) -> FileIdentity | str:
    """The file's identity now, or what shows that it was changed."""
    try:
        now = identity_at(index.root / file.path)
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be opened: {error.strerror or error}"
    before, is_stated = file.identity or now, file.crc32 is not None
    return before.difference(now, is_stated=is_stated) or now


def check_again(source: SourceReader, index: Index, read: Ranges, paths: Collection[str]) -> int:
    """Read ranges of files once more, which must be what they were, and return how many bytes these are.

    Raises:
        SourceChangedError: with every file that is not.
    """
    problems, more = [], 0
    for number, file in enumerate(index.files):
        pieces = read.get(number, ()) if file.path in paths else ()
        more += sum(piece.num_bytes for piece in pieces)
        if any(source.checksum(number, piece.start, piece.num_bytes) != piece for piece in pieces):
            problems.append(f"{file.path}: has another content, though size and time of writing are the same")
    if problems:
        raise changed(problems, str(index.root))
    return more


def places_digest(index: Index) -> bytes:
    """Digest of which bytes of the files are which tensor's."""
    found = hashlib.sha256()
    for tensor in index.tensors:
        found.update(f"{tensor.key!a} {tensor.shape} {tensor.dtype}\n".encode())
    for field in dataclasses.fields(index.shards):
        found.update(np.ascontiguousarray(getattr(index.shards, field.name)).data)
    return found.digest()


def content_digest(index: Index, read: Ranges) -> str:
    """Digest of all ranges that were read, and of what they hold: equal for equal sources, whoever read what."""
    found = hashlib.sha256(places_digest(index))
    for number in sorted(read):
        found.update(f"{index.files[number].path!a}\n".encode())
        for piece in read[number]:
            found.update(f"{piece.start} {piece.num_bytes} {piece.crc32:08x}\n".encode())
    return found.hexdigest()[:32]
