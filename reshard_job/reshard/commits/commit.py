"""COMMIT.json: the marker of a committed checkpoint.

A checkpoint folder is written once and never changed. Its COMMIT.json is written last, by a rename, after all files
are on stable storage. It lists every file with its size and CRC-32, so that truncation and damage are detected before a
byte is used. The page docs/checkpoint-format.md is normative.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from reshard.checksums import self_checksum
from reshard.contract import COMMIT_FILE, UNCONFIRMED_FILE, CommitRef
from reshard.errors import (
    CorruptSourceError,
    ReshardError,
    StoreError,
    TargetError,
    TargetTakenError,
    UncommittedError,
    UnsupportedError,
    UsageError,
    make_read_error,
)
from reshard.storage.durable import file_crc32, replace_file, sync_folder
from reshard.topology import Topology

COMMIT_VERSION = 1
"""Version of the format; increased when readers of the old version would misread the new one."""

VIRTUAL = "virtual"
"""Format of commits that refer to the bytes of another checkpoint instead of holding them."""

_LONGEST_CHAIN = 8
_MAX_MARKER_BYTES = 256 << 20  # 1 M files take 100 MB
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFile:
    """One file of a commit.

    Attributes:
        path: path relative to the commit's folder, with forward slashes.
        num_bytes: exact size.
        crc32: CRC-32 of the content (zlib), or None if it was not computed.
    """

    path: str
    num_bytes: int
    crc32: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Content of COMMIT.json.

    Attributes:
        format: name of the format in `reshard.formats`, for instance `deepspeed`.
        step: optimizer steps done.
        samples: global samples consumed.
        topology: topology that the files are laid out for.
        attempt: attempt that the folder belongs to.
        writer: `trainer` or `reshard`.
        files: every file of the checkpoint except COMMIT.json itself.
        digests: logical tensor (`state/name`) -> digest in hex; empty if they were not computed.
        data: position in the data, as the trainer's sampler wrote it (seed, sample index).
        model: data about the model that the files lack and a resharder needs (pipeline layers, partition method).
        source: folder of the commit that this one was converted from; empty for a trainer's own commit.
        options: options of the conversion besides the topology (`dtype`, `states`, `names`); usually empty.
        created: RFC 3339 time, UTC.
        owner: UID of the job that wrote it; empty without a cluster, and in commits of older versions.
        origin: digests of the source: `identity` of its files, `content` of the ranges that were read.
        witness: what was compared with the source by name: numbers of `tensors` and `samples`, and `not_witnessed`
            (reason -> number of tensors); empty in commits of trainers and of older versions.
    """

    format: str
    step: int
    samples: int
    topology: Topology
    attempt: int
    writer: str
    files: Sequence[CommittedFile]
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    created: str = ""
    owner: str = ""
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict)
    witness: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    def ref(self, folder: str | Path) -> CommitRef:
        """Return the short form that Leases and the resource's status hold."""
        return CommitRef(
            uri=str(folder),
            step=self.step,
            samples=self.samples,
            attempt=self.attempt,
            topology=self.topology.to_dict(),
            num_bytes=self.num_bytes,
            format=self.format,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as COMMIT.json states them."""
        return {
            "version": COMMIT_VERSION,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "topology": self.topology.to_dict(),
            "files": [
                {
                    "path": file.path,
                    "bytes": file.num_bytes,
                    "crc32": None if file.crc32 is None else f"{file.crc32:08x}",
                }
                for file in self.files
            ],
        }


def read_commit(folder: str | Path) -> Commit:
    """Read and validate COMMIT.json of `folder`.

    Raises:
        UncommittedError: there is no COMMIT.json.
        CorruptSourceError: COMMIT.json cannot be read, or is not of the form that this version writes.
    """
    path = _as_path(folder) / COMMIT_FILE
    try:
        num_bytes = _regular_bytes(path)
        if num_bytes > _MAX_MARKER_BYTES:
            raise UnsupportedError(f"has {num_bytes} bytes: at most {_MAX_MARKER_BYTES} are read", path=str(path))
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UncommittedError(
            f"no {COMMIT_FILE}: the checkpoint was never completed", path=str(folder), hint="use an earlier commit"
        ) from error
    except OSError as error:
        raise make_read_error(error, str(path)) from error
    return _decode(content, path)


def _decode(content: bytes, path: Path) -> Commit:
    """Decode a commit from the bytes of its marker.

    Raises:
        CorruptSourceError: the marker is not of the form that this version writes.
    """
    try:
        value = json.loads(content.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse)
        try:
            commit = _parse(value, path)
        except UnsupportedError:  # a damaged version is no newer one
            self_checksum.check_self_checksum(content, value)
            raise
        self_checksum.check_self_checksum(content, value)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{error!s:.200}" if type(error) is ValueError else f"{type(error).__name__}: {error!s:.200}"
        raise CorruptSourceError(
            f"not a commit marker: {what}",
            path=str(path),
            hint=f"use an earlier commit (if you edited the marker on purpose, remove its field {self_checksum.FIELD})",
        ) from error
    return commit


def _parse(value: Any, path: Path) -> Commit:
    """Parse a commit from its JSON value; several classes of error are raised for invalid values."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found a {type(value).__name__}")
    if type(version := value["version"]) is not int:
        raise ValueError(f"version {version!r:.40}: expected a whole number")
    if version != COMMIT_VERSION:
        raise UnsupportedError(f"version {version}: this program reads {COMMIT_VERSION}", path=str(path))
    files = tuple(
        CommittedFile(
            path=_inside(_of(str, file, "path"), path),
            num_bytes=_count(file, "bytes"),
            crc32=None if file["crc32"] is None else _hex(file["crc32"], 8),
        )
        for file in _of(list, value, "files")
    )
    if len({file.path for file in files}) != len(files):
        raise ValueError("a file is listed twice")
    topology = _of(dict, value, "topology")
    if any(isinstance(degree, bool) for degree in topology.values()):
        raise ValueError(f"topology {topology!r:.100}")
    digests = _of(dict, value, "digests", {})
    for name, digest in digests.items():
        name.encode("utf-8")
        _hex(digest, 8)
    options, origin = _of(dict, value, "options", {}), _of(dict, value, "origin", {})
    for texts in (options, origin):
        for key in texts:
            _of(str, texts, key)
    return Commit(
        format=_of(str, value, "format"),
        step=_count(value, "step"),
        samples=_count(value, "samples"),
        topology=Topology.from_dict(topology),
        attempt=_count(value, "attempt"),
        writer=_of(str, value, "writer"),
        files=files,
        digests=digests,
        data=_of(dict, value, "data", {}),
        model=_of(dict, value, "model", {}),
        source=_source(value),
        options=options,
        created=_of(str, value, "created", ""),
        owner=_of(str, value, "owner", ""),
        origin=origin,
        witness=_of(dict, value, "witness", {}),
    )


def _of(kind: type[_Kind], value: Any, key: str, default: _Kind | None = None) -> _Kind:
    """Return a field of one type; a field that MAY be absent has a default.

    Raises:
        KeyError: the field is absent and has no default.
        ValueError: the field has another type, or is not valid text.
    """
    field = value[key] if default is None else value.get(key, default)
    if type(field) is not kind:
        raise ValueError(f"{key} is {field!r:.60}, expected a {kind.__name__}")
    if isinstance(field, str):
        field.encode("utf-8")  # raises for half of a surrogate pair
    return field


def _source(value: Any) -> str:
    source = _of(str, value, "source", "")
    if "\0" in source:
        raise ValueError("source holds a zero byte")
    return source


def _count(value: Any, key: str) -> int:
    count = _of(int, value, key)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"{key} is {count!r:.60}, expected 0 to 2^63 - 1")
    return count


def _hex(value: Any, digits: int) -> int:
    if not isinstance(value, str) or len(value) != digits or set(value) - _HEX_DIGITS:
        raise ValueError(f"{value!r:.60}: expected {digits} hex digits")
    return int(value, 16)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _as_path(path: str | Path) -> Path:
    """Convert text to a path; a path is returned as it is, because `Path(path)` would make a remote one local."""
    if "\0" in str(path):
        raise UsageError(f"{str(path)!r:.200} is no path: it holds a zero byte")
    return path if isinstance(path, Path) else Path(path)


def _regular_bytes(path: Path) -> int:
    """Return the size of a regular file.

    Raises:
        OSError: there is no such file, or it is a folder, a link, a pipe or a device.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"is a {_KINDS.get(stat.S_IFMT(status.st_mode), 'special file')}, expected a file")
    return status.st_size


def source_of(folder: Path, commit: Commit) -> Path:
    """Return the folder with the bytes of a commit: `folder`, or the source that a chain of virtual commits ends in.

    Raises:
        CorruptSourceError: a virtual commit names no source, or the chain is too long or a circle.
        UncommittedError: a source does not exist any more.
    """
    for _ in range(_LONGEST_CHAIN):
        if commit.format != VIRTUAL:
            return folder
        if not commit.source:
            raise CorruptSourceError("is a virtual commit that names no source", path=str(folder))
        virtual, folder = folder, _as_path(commit.source)
        try:
            commit = read_commit(folder)
        except UncommittedError as error:
            if folder.is_dir():  # a checkpoint without COMMIT.json, as frameworks write them
                return folder
            raise UncommittedError(
                f"is a virtual commit whose bytes are in {folder}, which is not there",
                path=str(virtual),
                hint="a virtual commit lives no longer than its source: put that back, or use another commit",
            ) from error
    raise UnsupportedError(f"leads through more than {_LONGEST_CHAIN} virtual commits", path=str(folder))


def is_vacant(folder: Path) -> bool:
    """Return True if the path does not exist, or is an empty folder, which a rename replaces."""
    if not os.path.lexists(folder):
        return True
    try:
        return folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    except OSError:  # without permission to list the folder, it may hold something
        return False


def taken_error(folder: Path) -> TargetTakenError:
    """Make the error for a target folder that holds something else than the requested result; describes what."""
    if folder.is_symlink() and is_vacant(Path(os.path.realpath(folder))):
        return TargetTakenError(
            f"is a link to {folder.readlink()}: expected a folder to make, or an empty one",
            path=str(folder),
            hint="name the folder itself",
        )
    what = ""
    try:
        commit = read_commit(folder)
        check_files(folder, commit)
        origin = f", from {commit.source}" if commit.source else ""
        what = f": it holds step {commit.step} as {commit.format} {commit.topology}{origin}, made at {commit.created}"
    except UncommittedError:
        what = ": it has no " + COMMIT_FILE
    except ReshardError as error:
        what = f": {error.message}"
    return TargetTakenError(
        f"exists and is not the result of this conversion{what}",
        path=str(folder),
        hint="choose another folder or remove this one",
    )


def check_files(folder: str | Path, commit: Commit, *, crc: bool = False) -> None:
    """Check that every file of the commit exists, has the exact size and, with `crc`, the committed checksum.

    Raises:
        CorruptSourceError: files differ; the error lists the problems.
    """
    problems: list[str] = []
    root, folders = _as_path(folder), {"."}
    for file in commit.files:
        path = root / file.path
        try:
            _check_parents(root, file.path, folders)
            num_bytes = _regular_bytes(path)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and isinstance(failure := make_read_error(error, str(path)), StoreError):
                raise failure from error
            problems.append(f"{file.path}: {getattr(error, 'strerror', None) or error}")
            continue
        if num_bytes != file.num_bytes:
            problems.append(f"{file.path}: {file.num_bytes} bytes were committed, {num_bytes} are there")
        elif crc and file.crc32 is not None and (actual := file_crc32(path)) != file.crc32:
            problems.append(describe_crc32_mismatch(file, actual))
    if problems:
        raise damaged_files_error(folder, commit, problems)


def describe_crc32_mismatch(file: CommittedFile, crc32: int) -> str:
    """Describe a file whose checksum differs from the committed one."""
    return f"{file.path}: CRC-32 {file.crc32:08x} was committed, the content has {crc32:08x}"


def damaged_files_error(folder: str | Path, commit: Commit, problems: Sequence[str]) -> CorruptSourceError:
    """Make the error for files that are not what was committed."""
    return CorruptSourceError(
        f"{len(problems)} of {len(commit.files)} files {'is' if len(problems) == 1 else 'are'} damaged",
        path=str(folder),
        problems=problems[:20],
        hint="use an earlier commit",
    )


def _check_parents(root: Path, name: str, known: set[str]) -> None:
    """Check that the folders between a commit and its file are no links, which could lead out of the commit.

    Raises:
        OSError: one of them is a link or not a folder.
    """
    for parent in reversed(PurePosixPath(name).parents):
        if str(parent) not in known:
            if not stat.S_ISDIR((root / parent).lstat().st_mode):
                raise OSError(errno.ENOTDIR, f"{parent} is a link or no folder")
            known.add(str(parent))


def write_commit(folder: str | Path, commit: Commit, *, name: str = COMMIT_FILE) -> None:
    """Publish `folder` as a commit: write the marker beside its name, fsync, rename, fsync the folder.

    The caller has already synced the files themselves. With `name` UNCONFIRMED_FILE nothing is published yet:
    see `confirm_commit`.

    Raises:
        TargetError: `read_commit` would refuse the marker, so nothing is written.
        OSError: the marker cannot be written.
    """
    path = _as_path(folder) / name
    content = self_checksum.with_self_checksum(commit.to_dict())
    try:
        _decode(content, path)
    except ReshardError as error:
        raise TargetError(f"would not be read back, so it is not written: {error.message}", path=str(path)) from error
    replace_file(path, content)


def confirm_commit(folder: Path) -> None:
    """Publish a folder by renaming its marker UNCONFIRMED_FILE to COMMIT_FILE.

    Raises:
        OSError: there is no such marker, or it cannot be renamed.
    """
    (folder / UNCONFIRMED_FILE).rename(folder / COMMIT_FILE)
    sync_folder(folder)


def path_to_text(path: Path) -> str:
    """Return a path as text for the marker; bytes that are not valid text become escapes, for display only."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _inside(path: str, marker: Path) -> str:
    """Return a file's path, after refusing paths that leave the commit's folder or are not normalized."""
    if not path or path.startswith("/") or "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise CorruptSourceError(f"file name {path!r:.200} leaves the folder", path=str(marker))
    return path
