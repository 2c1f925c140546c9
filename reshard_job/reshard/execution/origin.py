"""Which source a result was made of: to go on with an unfinished one, and to say that a finished one is there.

Every run that shares an unfinished result leaves in its journal what identified the source's files when they were
indexed. A finished result keeps digests of that and of the content in COMMIT.json (`Commit.origin`).
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
from reshard.commits.staging import Sharing, is_unfinished, unfinished
from reshard.errors import SourceChangedError
from reshard.execution.executor import Outcome, content_now
from reshard.execution.journal import FOLDER, Journal
from reshard.file_identity import FileIdentity
from reshard.planning.plan import Plan
from reshard.storage.files import identity_at
from reshard.tensors.layout import Index, SourceFile

_PREFIX, _SUFFIX = "source-", ".json"
_MAX_RECORD_BYTES = 1 << 30
_IDENTITY, _CONTENT = "identity", "content"
"""Keys of `Commit.origin`."""


def with_identities(index: Index, opened: Mapping[str, FileIdentity], commit: Commit | None) -> Index:
    """Return the index with what identifies its files, and what the commit states about them.

    Args:
        index: just made.
        opened: files that were opened for it, by path.
        commit: of the source, if it has one.
    """
    stated = {} if commit is None else {file.path: file.crc32 for file in commit.files}
    root = f"{index.root}/"

    def known(file: SourceFile) -> SourceFile:
        identity = opened.get(root + file.path)
        if identity is None:
            try:
                identity = identity_at(index.root / file.path)
            except OSError:  # said when it is read
                identity = None
        return dataclasses.replace(file, identity=identity, crc32=stated.get(file.path))

    files = tuple(known(file) for file in index.files)
    named = {file.path for file in files}
    metadata = [(path.removeprefix(root), found) for path, found in sorted(opened.items()) if path.startswith(root)]
    return dataclasses.replace(
        index,
        files=files,
        metadata=tuple(
            SourceFile(path=path, num_bytes=found.num_bytes, crc32=stated.get(path), identity=found)
            for path, found in metadata
            if path not in named
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a run works on.

    Attributes:
        request: hash of what was asked for, the source's path included.
        files: identities of the source's files, by path.
        stated: files whose content the source's commit states.
    """

    request: str
    files: Mapping[str, FileIdentity]
    stated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, index: Index, request: str) -> Origin:
        """Return that of a run."""
        every = (*index.files, *index.metadata)
        return cls(
            request=hashlib.sha256(request.encode(errors="surrogateescape")).hexdigest()[:16],
            files={file.path: file.identity for file in every if file.identity is not None},
            stated=frozenset(file.path for file in index.files if file.crc32 is not None),
        )

    def compare(self, before: Origin) -> tuple[list[str], set[str]]:
        """(What shows that files were changed, files that may have been) since another run indexed the source."""
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
        """One line."""
        files = [[path, *dataclasses.astuple(found)] for path, found in sorted(self.files.items())]
        return json.dumps({"request": self.request, "files": files})

    @classmethod
    def from_json(cls, text: str) -> Origin:
        """Inverse of `to_json`, without `stated`.

        Raises:
            ValueError, KeyError, TypeError: it is not such a line.
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
                raise ValueError(f"{path!r:.60} is not described as a file")
            files[path] = FileIdentity(*numbers, version)
        return cls(request=str(value["request"]), files=files)


def refuse_changed(origin: Origin, source: Path, target: Path) -> None:
    """Refuse to go on with unfinished results of the same request whose source was another one.

    Raises:
        SourceChangedError: with every file that was changed.
    """
    for folder in _unfinished(target):
        for before in _recorded(folder):
            problems = origin.compare(before)[0] if before.request == origin.request else []
            if problems:
                raise _other_source(problems, source, folder)


def _unfinished(target: Path) -> Iterator[Path]:
    prefix = unfinished(target, "").name
    try:
        found = sorted(path for path in target.parent.iterdir() if path.name.startswith(prefix))
    except OSError:  # no such folder, or none of ours
        return
    yield from (path for path in found if is_unfinished(path))


def _recorded(folder: Path) -> Iterator[Origin]:
    """What the journal of an unfinished result says of sources; what cannot be read is as good as nothing."""
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


def join(origin: Origin, source: Path, folder: Path, sharing: Sharing) -> set[str]:
    """Say in the journal what this run works on, and return the files that other runs may have read otherwise.

    Raises:
        SourceChangedError: other runs of this conversion have read another source.
    """
    if sharing is Sharing.ALONE:
        return set()
    journal = Journal(folder)
    others = list(_recorded(folder))
    if sharing is Sharing.RESUMABLE and not others:  # of units whose source nobody knows
        for unit in journal.done():
            journal.forget(unit)
    content = origin.to_json()
    journal.note(f"{_PREFIX}{hashlib.sha256(content.encode()).hexdigest()[:16]}{_SUFFIX}", content)
    doubted = set[str]()
    for before in _recorded(folder):  # read again: each run sees all that were there before it
        problems, found = origin.compare(before)
        if problems:
            raise _other_source(problems, source, folder)
        doubted |= found
    return doubted


def origin_of(plan: Plan, outcome: Outcome) -> dict[str, str]:
    """Return `Commit.origin` of a result."""
    return {_IDENTITY: identity_digest(plan.index), _CONTENT: outcome.content}


def identity_digest(index: Index, *, attributes: bool = True) -> str:
    """Digest of what identifies the files of a source; without `attributes`, mode and owner do not matter."""
    found = hashlib.sha256()
    for path, identity in sorted(Origin.of(index, "").files.items()):
        known = identity if attributes else dataclasses.replace(identity, ctime_ns=0)
        found.update(f"{os.fsencode(path)!r} {dataclasses.astuple(known)}\n".encode())
    return found.hexdigest()[:32]


def check_origin(commit: Commit, plan: Plan, target: Path) -> None:
    """A result that is there was made of the source that is there now.

    Where its files are not those that were read, they are read again: a source that was put back from a copy will do.

    Raises:
        SourceChangedError: it was not.
        SourceError: the source cannot be read.
    """
    if not commit.origin:  # of an older version, which did not say
        problems = list(_later(commit, plan.index))
    elif commit.origin.get(_IDENTITY) == identity_digest(plan.index) or content_now(plan) == commit.origin.get(
        _CONTENT
    ):
        return
    else:
        problems = list(_later(commit, plan.index)) or ["its files hold other bytes than were converted"]
    if problems:
        raise other_result(problems, plan.index.root, target)


def unread_origin(index: Index) -> dict[str, str]:
    """Return `Commit.origin` of a virtual commit, whose bytes are read when it is loaded.

    Mode and owner of the files do not matter, since no content is known that could prove that it is the same.
    """
    return {_IDENTITY: identity_digest(index, attributes=False)}


def check_unread_origin(commit: Commit, index: Index, target: Path) -> None:
    """A virtual commit that is there describes the source that is there now.

    Raises:
        SourceChangedError: it does not.
    """
    if commit.origin and dict(commit.origin) != unread_origin(index):
        raise other_result(["its files are not those that the virtual commit describes"], index.root, target)


def refuse_other_content(commit: Commit, plan: Plan, target: Path) -> None:
    """Where a result is not of this plan though it is of this command, say so if the source has another content.

    Raises:
        SourceChangedError: it has.
    """
    if _CONTENT not in commit.origin or commit.origin.get(_IDENTITY) == identity_digest(plan.index):
        return
    if content_now(plan) != commit.origin[_CONTENT]:
        problems = list(_later(commit, plan.index)) or ["its files say or hold something else than was converted"]
        raise other_result(problems, plan.index.root, target)


def other_result(problems: list[str], source: Path, target: Path) -> SourceChangedError:
    """What to raise where a result is of what the source was before."""
    return SourceChangedError(
        f"the source changed since it was converted: {target} holds what it was",
        path=str(source),
        problems=problems[:20],
        hint="choose another folder for what it is now, or remove the result that is there",
    )


def _later(commit: Commit, index: Index) -> Iterator[str]:
    """Files that were written after the result was made."""
    try:
        made = datetime.datetime.fromisoformat(commit.created).timestamp()
    except ValueError:
        return
    for file in (*index.files, *index.metadata):
        if file.identity is not None and file.identity.mtime_ns / 1e9 > made:
            when = datetime.datetime.fromtimestamp(file.identity.mtime_ns // 10**9, datetime.UTC)
            yield f"{file.path}: was written at {when:%Y-%m-%dT%H:%M:%SZ}, the result at {commit.created}"
