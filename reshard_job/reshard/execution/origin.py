"""Identify the source that a result was made of.

A run checks this before it resumes an unfinished result, and before it reports that a finished result exists. Every run
that shares an unfinished result writes the identities of the source's files at indexing time to the journal. The
COMMIT.json of a finished result holds a digest of the identities and one of the content (`Commit.origin`).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from reshard.commits.commit import Commit
from reshard.commits.staging import Sharing, is_unfinished, unfinished_folder
from reshard.errors import SourceChangedError
from reshard.execution.executor import Outcome, read_content_digest
from reshard.execution.journal import FOLDER, Journal
from reshard.file_identity import FileIdentity
from reshard.planning.plan import Plan
from reshard.storage.files import identity_at
from reshard.tensors.layout import Index, SourceFile

_PREFIX, _SUFFIX = "source-", ".json"
_MAX_RECORD_BYTES = 1 << 30
_IDENTITY, _CONTENT = "identity", "content"
"""Keys of `Commit.origin`."""


def add_identities(index: Index, opened: Mapping[str, FileIdentity], commit: Commit | None) -> Index:
    """Return the index with the identities of its files and their checksums from the commit.

    Args:
        index: an index that was just made.
        opened: identities of the files that were opened to make the index, by path.
        commit: commit of the source, if it has one; else checksums that the index has already are kept.
    """
    stated = {} if commit is None else {file.path: file.crc32 for file in commit.files}
    root = f"{index.root}/"

    def identify(file: SourceFile) -> SourceFile:
        identity = opened.get(root + file.path)
        if identity is None:
            try:
                identity = identity_at(index.root / file.path)
            except OSError:  # the error is raised when the file is read
                identity = None
        return dataclasses.replace(file, identity=identity, crc32=stated.get(file.path, file.crc32))

    files = tuple(identify(file) for file in index.files)
    named = {file.path for file in files}
    metadata = [
        (path.removeprefix(root), identity) for path, identity in sorted(opened.items()) if path.startswith(root)
    ]
    return dataclasses.replace(
        index,
        files=files,
        metadata=tuple(
            SourceFile(path=path, num_bytes=identity.num_bytes, crc32=stated.get(path), identity=identity)
            for path, identity in metadata
            if path not in named
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Identity of the source that a run converts.

    Attributes:
        request: hash of the run's arguments, including the source's path.
        files: identities of the source's files, by path.
        stated: files whose content the source's commit states.
    """

    request: str
    files: Mapping[str, FileIdentity]
    stated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, index: Index, request: str) -> Origin:
        """Make the origin of a run."""
        every = (*index.files, *index.metadata)
        return cls(
            request=hashlib.sha256(request.encode(errors="surrogateescape")).hexdigest()[:16],
            files={file.path: file.identity for file in every if file.identity is not None},
            stated=frozenset(file.path for file in index.files if file.crc32 is not None),
        )

    def compare(self, before: Origin) -> tuple[list[str], set[str]]:
        """Compare with the origin of an earlier run.

        Returns:
            Sentences about files that changed since then, and paths of files that may have changed.
        """
        problems = [f"{path}: is gone" for path in sorted(before.files.keys() - self.files.keys())]
        problems += [f"{path}: was not there before" for path in sorted(self.files.keys() - before.files.keys())]
        doubted = set[str]()
        for path in sorted(self.files.keys() & before.files.keys()):
            old, now = before.files[path], self.files[path]
            if why := old.difference(now, is_stated=path in self.stated):
                problems.append(f"{path}: {why}")
            elif old != now:
                doubted.add(path)
        return problems, doubted

    def to_json(self) -> str:
        """Encode as one line of JSON, without `stated`."""
        files = [[path, *dataclasses.astuple(identity)] for path, identity in sorted(self.files.items())]
        return json.dumps({"request": self.request, "files": files})

    @classmethod
    def from_json(cls, text: str) -> Origin:
        """Decode the output of `to_json`; `stated` is empty.

        Raises:
            ValueError, KeyError, TypeError: the text is not such a line.
        """
        value = json.loads(text)
        files = {}
        for path, num_bytes, mtime_ns, inode, ctime_ns, version in value["files"]:
            numbers = (num_bytes, mtime_ns, inode, ctime_ns)
            if (
                not isinstance(path, str)
                or not isinstance(version, str)
                or any(type(item) is not int for item in numbers)
            ):
                raise ValueError(f"{path!r:.60}: expected a path, four integers and a version")
            files[path] = FileIdentity(*numbers, version)
        return cls(request=str(value["request"]), files=files)


def refuse_changed(origin: Origin, source: Path, target: Path) -> None:
    """Refuse to continue unfinished results of the same request if their source was different.

    Raises:
        SourceChangedError: files of the source changed; the error lists them.
    """
    for folder in _unfinished_folders(target):
        for before in _read_origins(folder):
            problems = origin.compare(before)[0] if before.request == origin.request else []
            if problems:
                raise _other_source(problems, source, folder)


def _unfinished_folders(target: Path) -> Iterator[Path]:
    prefix = unfinished_folder(target, "").name
    try:
        folders = sorted(path for path in target.parent.iterdir() if path.name.startswith(prefix))
    except OSError:  # there is no such folder, or it may not be read
        return
    yield from (path for path in folders if is_unfinished(path))


def _read_origins(folder: Path) -> Iterator[Origin]:
    """Yield the origins that runs wrote to the journal of an unfinished result; unreadable ones are left out."""
    try:
        paths = sorted((folder / FOLDER).iterdir())
    except OSError:
        return
    for path in paths:
        if not path.name.startswith(_PREFIX) or not path.name.endswith(_SUFFIX):
            continue
        try:
            if path.lstat().st_size <= _MAX_RECORD_BYTES:
                yield Origin.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue


def _other_source(problems: list[str], source: Path, folder: Path) -> SourceChangedError:
    return SourceChangedError(
        "the source changed since this conversion was begun: nothing was published",
        path=str(source),
        problems=problems[:20],
        hint=f"put the source back as it was, or convert what is there now from nothing: remove {folder}",
    )


def register_run(origin: Origin, source: Path, folder: Path, sharing: Sharing) -> set[str]:
    """Write this run's origin to the journal, and return the files that may have changed since other runs.

    Raises:
        SourceChangedError: other runs of this conversion have read a different source.
    """
    if sharing is Sharing.ALONE:
        return set()
    journal = Journal(folder)
    others = list(_read_origins(folder))
    if sharing is Sharing.RESUMABLE and not others:  # without an origin, nobody knows the source of the units
        for unit in journal.done():
            journal.forget(unit)
    content = origin.to_json()
    journal.note(f"{_PREFIX}{hashlib.sha256(content.encode()).hexdigest()[:16]}{_SUFFIX}", content)
    doubted = set[str]()
    for before in _read_origins(folder):  # read after writing, so that of two runs at least one sees the other
        problems, may_differ = origin.compare(before)
        if problems:
            raise _other_source(problems, source, folder)
        doubted |= may_differ
    return doubted


def origin_of(plan: Plan, outcome: Outcome) -> dict[str, str]:
    """Return the value of `Commit.origin` for a result."""
    return {_IDENTITY: identity_digest(plan.index), _CONTENT: outcome.content}


def identity_digest(index: Index, *, attributes: bool = True) -> str:
    """Compute a digest of the identities of a source's files; without `attributes`, mode and owner do not matter."""
    sha256 = hashlib.sha256()
    for path, identity in sorted(Origin.of(index, "").files.items()):
        compared = identity if attributes else dataclasses.replace(identity, ctime_ns=0)
        sha256.update(f"{os.fsencode(path)!r} {dataclasses.astuple(compared)}\n".encode())
    return sha256.hexdigest()[:32]


def check_origin(commit: Commit, plan: Plan, target: Path) -> None:
    """Check that an existing result was made of the present source.

    If the identities of the source's files differ, the files are read again. So a source that was restored from a copy
    passes.

    Raises:
        SourceChangedError: the result was made of different content.
        SourceError: the source cannot be read.
    """
    if not commit.origin:  # an older version wrote the commit, without an origin
        problems = list(_files_written_later(commit, plan.index))
    elif commit.origin.get(_IDENTITY) == identity_digest(plan.index) or read_content_digest(plan) == commit.origin.get(
        _CONTENT
    ):
        return
    else:
        problems = list(_files_written_later(commit, plan.index)) or ["its files hold other bytes than were converted"]
    if problems:
        raise other_result_error(problems, plan.index.root, target)


def unread_origin(index: Index) -> dict[str, str]:
    """Return the value of `Commit.origin` for a virtual commit, whose bytes are read when it is loaded.

    It ignores mode and owner of the files: if they change, no digest of the content could prove that nothing else did.
    """
    return {_IDENTITY: identity_digest(index, attributes=False)}


def check_unread_origin(commit: Commit, index: Index, target: Path) -> None:
    """Check that an existing virtual commit describes the present source.

    Raises:
        SourceChangedError: it does not.
    """
    if commit.origin and dict(commit.origin) != unread_origin(index):
        raise other_result_error(["its files are not those that the virtual commit describes"], index.root, target)


def refuse_other_content(commit: Commit, plan: Plan, target: Path) -> None:
    """Refuse an existing result of the same command but another plan, if the source's content has changed.

    Raises:
        SourceChangedError: the content has changed.
    """
    if _CONTENT not in commit.origin or commit.origin.get(_IDENTITY) == identity_digest(plan.index):
        return
    if read_content_digest(plan) != commit.origin[_CONTENT]:
        problems = list(_files_written_later(commit, plan.index))
        raise other_result_error(
            problems or ["its files say or hold something else than was converted"], plan.index.root, target
        )


def other_result_error(problems: list[str], source: Path, target: Path) -> SourceChangedError:
    """Make the error for a result that was made of earlier content of the source."""
    return SourceChangedError(
        f"the source changed since it was converted: {target} holds what it was",
        path=str(source),
        problems=problems[:20],
        hint="choose another folder for what it is now, or remove the result that is there",
    )


def _files_written_later(commit: Commit, index: Index) -> Iterator[str]:
    """Describe files of the source that were written after the result was made."""
    try:
        made = datetime.datetime.fromisoformat(commit.created).timestamp()
    except ValueError:
        return
    for file in (*index.files, *index.metadata):
        if file.identity is not None and file.identity.mtime_ns / 1e9 > made:
            when = datetime.datetime.fromtimestamp(file.identity.mtime_ns // 10**9, datetime.UTC)
            yield f"{file.path}: was written at {when:%Y-%m-%dT%H:%M:%SZ}, the result at {commit.created}"
