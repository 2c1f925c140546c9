"""COMMIT.json: the marker that makes a checkpoint exist.

A checkpoint folder is written once and never changed. Its COMMIT.json is written last, by a rename, after all files
are on stable storage. It lists every file with its size and CRC-32, so that truncation and damage are found before a
byte is used. The page docs/checkpoint-format.md is normative.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.contract import COMMIT_FILE, CommitRef
from reshard.errors import CorruptSourceError, UncommittedError
from reshard.topology import Topology

COMMIT_VERSION = 1
"""Raised when a reader of the old version would be wrong about the new one."""

_BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFile:
    """One file of a commit.

    Attributes:
        path: relative to the commit's folder, with forward slashes.
        num_bytes: exact size.
        crc32: CRC-32 of the content (zlib), or None where it was not computed.
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
        files: every file of the checkpoint but COMMIT.json itself.
        digests: logical tensor (`state/name`) to digest in hex; empty where they were not computed.
        data: position in the data, as the trainer's sampler wrote it (seed, sample index).
        model: what the files do not say about the model and a resharder needs (pipeline layers, partition method).
        source: folder of the commit that this one was converted from; empty for a trainer's own.
        options: what the conversion was asked for besides the topology (`dtype`, `states`, `names`); usually empty.
        created: RFC 3339 time, UTC.
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

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    def ref(self, folder: str | Path) -> CommitRef:
        """The short form that travels through Lease and status."""
        return CommitRef(
            uri=str(folder),
            step=self.step,
            samples=self.samples,
            attempt=self.attempt,
            topology=self.topology.to_dict(),
            num_bytes=self.num_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Wire form."""
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
        UncommittedError: there is none.
        CorruptSourceError: it is not what this version writes.
    """
    path = Path(folder) / COMMIT_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UncommittedError(
            f"no {COMMIT_FILE}: the checkpoint was never completed", path=str(folder), hint="use an earlier commit"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptSourceError(f"cannot be read: {error}", path=str(path)) from error
    try:
        value = json.loads(text)
        version = value.pop("version")
        if version != COMMIT_VERSION:
            raise CorruptSourceError(f"version {version!r}: this program reads {COMMIT_VERSION}", path=str(path))
        files = tuple(
            CommittedFile(
                path=_inside(file["path"], path),
                num_bytes=int(file["bytes"]),
                crc32=None if file.get("crc32") is None else int(file["crc32"], 16),
            )
            for file in value.pop("files")
        )
        known = {field.name for field in dataclasses.fields(Commit)}
        rest = {key: item for key, item in value.items() if key in known and key != "topology"}
        return Commit(files=files, topology=Topology.from_dict(value["topology"]), **rest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptSourceError(f"not a commit marker: {type(error).__name__}: {error}", path=str(path)) from error


def check_files(folder: str | Path, commit: Commit, *, crc: bool = False) -> None:
    """Check every file that the commit lists: present, of the exact size and, with `crc`, of the exact content.

    Raises:
        CorruptSourceError: with all problems found.
    """
    problems: list[str] = []
    for file in commit.files:
        path = Path(folder) / file.path
        try:
            found = path.stat().st_size
        except OSError as error:
            problems.append(f"{file.path}: {error.strerror or error}")
            continue
        if found != file.num_bytes:
            problems.append(f"{file.path}: {file.num_bytes} bytes were committed, {found} are there")
        elif crc and file.crc32 is not None and (actual := file_crc32(path)) != file.crc32:
            problems.append(f"{file.path}: CRC-32 {file.crc32:08x} was committed, the content has {actual:08x}")
    if problems:
        raise CorruptSourceError(
            f"{len(problems)} of {len(commit.files)} files are damaged",
            path=str(folder),
            problems=problems,
            hint="use an earlier commit",
        )


def write_commit(folder: str | Path, commit: Commit) -> None:
    """Publish `folder` as a commit: write the marker beside its name, fsync, rename, fsync the folder.

    The caller has already synced the files themselves.
    """
    folder = Path(folder)
    draft = folder / f".{COMMIT_FILE}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as stream:
        json.dump(commit.to_dict(), stream, indent=1, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(folder / COMMIT_FILE)
    sync_folder(folder)


def sync_folder(folder: str | Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_crc32(path: str | Path) -> int:
    """CRC-32 (zlib) of a file, in blocks of 4 MiB."""
    crc = 0
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def _inside(path: Any, marker: Path) -> str:
    """Refuse names that leave the commit's folder."""
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/"):
        raise CorruptSourceError(f"file name {path!r} leaves the folder", path=str(marker))
    return path
