"""Find the checkpoint in the folder of a training stack, and index it together with the files beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from reshard import formats
from reshard.commits.commit import Commit, check_files, read_commit
from reshard.commits.latest import FILES, read_name
from reshard.commits.staging import FINISH_FILE, is_unfinished
from reshard.contract import COMMIT_FILE
from reshard.errors import NotACheckpointError, UncommittedError, UsageError, make_read_error
from reshard.folders.stacks import STACKS, Stack
from reshard.folders.writing import wrap
from reshard.storage.files import open_file
from reshard.storage.object_store import RemotePath
from reshard.tensors.layout import Index, SourceFile, TrainingFolder

_NAMED_FORMATS = frozenset(stack.format for stack in STACKS if stack.tag is not None)
_MOST_FILES = 10_000
_MOST_DEPTH = 8


def is_checkpoint(path: Path) -> bool:
    """Return True if a folder is a checkpoint of a known format, or a folder of a training stack with one inside."""
    return any(reason is None for _, reason in formats.recognise(path)) or find_training_folder(path) is not None


def find_training_folder(path: Path) -> tuple[Stack, tuple[str, ...]] | None:
    """Find out if a folder is one of a training stack with one checkpoint inside.

    Returns:
        The stack, and the names of the folders that hold the checkpoint; None if the folder is something else, or if
        it holds several checkpoints, so that the files beside them belong to none of them alone.
    """
    with contextlib.suppress(OSError, NotACheckpointError):
        named = {target_format: read_name(path, target_format) for target_format in _NAMED_FORMATS}
        for stack in STACKS:
            if (parts := _find_parts(path, stack, named)) and (not stack.mark or (path / stack.mark).is_file()):
                return stack, parts
    return None


def find_inner(path: Path) -> Path | None:
    """Return the one folder with the checkpoint in a training folder; None if there is none, or if several hold it."""
    known = find_training_folder(path)
    return path / known[1][0] if known is not None and known[0].tag is not None else None


def _find_parts(path: Path, stack: Stack, named: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the names of the folders that hold the checkpoint; empty if the folder is not of this stack.

    Args:
        path: the folder.
        stack: the stack.
        named: format -> name of the checkpoint that the format's own file in the folder states.
    """
    if stack.tag is None:
        expected = tuple(name for name in stack.parts if (path / name).is_dir())
        if expected[:1] != stack.parts[:1]:
            return ()
    else:
        name = named[stack.format]
        if name is None or not stack.tag.fullmatch(name):
            return ()
        expected = (name,)
    inside = {child.name for child in _list_checkpoints(path, stack)}
    return expected if inside == set(expected) else ()


def _list_checkpoints(path: Path, stack: Stack) -> Iterator[Path]:
    """Yield the folders below that hold a checkpoint of the stack's format; a link could lead out of the folder."""
    sniff = formats.format_of(stack.format).sniff
    for child in path.iterdir():
        is_folder = not child.name.startswith(".") and not child.is_symlink() and child.is_dir()
        if is_folder and sniff(child) is None:
            yield child


def read_checkpoint(
    path: Path, commit: Commit | None, patterns: Path | None = None, ds_config: Path | None = None
) -> Index:
    """Index the checkpoint in folder `path`, whatever its format, or the one inside the folder of a training stack.

    Args:
        path: folder of one checkpoint, or of a training stack.
        commit: its commit marker, if it has one.
        patterns: see `reshard.formats.read_checkpoint`.
        ds_config: see `reshard.formats.read_checkpoint`.

    Raises:
        NotACheckpointError: also for a file beside the checkpoint that cannot be carried: a link, a pipe.
        ReshardError: see `reshard.formats.read_checkpoint`.
    """
    known = find_training_folder(path)
    if known is None:
        return formats.read_checkpoint(path, commit, patterns, ds_config)
    stack, parts = known
    if stack.tag is None:
        if patterns is not None or ds_config is not None:
            what = "patterns are" if ds_config is None else "--ds-config is"
            raise UsageError(f"{what} for DeepSpeed's checkpoints: this is a folder of {stack.name}", path=str(path))
        from reshard.formats.dcp import read_parts  # only such folders pay for this import

        index = read_parts(path, parts, commit)
    else:
        inner = path / parts[0]
        own = _commit_inside(inner, commit)
        index = _add_checksums(formats.read_checkpoint(inner, own, patterns, ds_config), own)
    side_files = tuple(_list_side_files(path, stack, parts, commit))
    return wrap(index, path, TrainingFolder(stack=stack.name, parts=parts, side_files=side_files))


def _add_checksums(index: Index, commit: Commit | None) -> Index:
    """Return an index with the CRC-32 of its files that the checkpoint's own commit states."""
    stated = {} if commit is None else {file.path: file.crc32 for file in commit.files}
    files = tuple(dataclasses.replace(file, crc32=stated.get(file.path)) for file in index.files)
    return dataclasses.replace(index, files=files)


def _commit_inside(inner: Path, commit: Commit | None) -> Commit | None:
    """Return the commit of the checkpoint inside: the folder's, as seen from there, or its own."""
    if commit is not None:
        prefix = f"{inner.name}/"
        own = [file for file in commit.files if file.path.startswith(prefix)]
        files = [dataclasses.replace(file, path=file.path.removeprefix(prefix)) for file in own]
        return dataclasses.replace(commit, files=files)
    try:
        own_commit = read_commit(inner)
    except UncommittedError:
        return None
    check_files(inner, own_commit)
    return own_commit


def _list_side_files(root: Path, stack: Stack, parts: tuple[str, ...], commit: Commit | None) -> Iterator[SourceFile]:
    """Yield the files beside the checkpoint that a conversion carries; where there is a commit, only those it lists.

    Raises:
        NotACheckpointError: a file cannot be carried, or there are too many.
    """
    listed = None if commit is None else {file.path for file in commit.files}
    own = {FILES.get(stack.format, ""), COMMIT_FILE, FINISH_FILE}
    count = 0
    for path in _walk(root, parts, 0):
        name = path.relative_to(root).as_posix()
        if name in own or name.startswith(f".{COMMIT_FILE}.") or (listed is not None and name not in listed):
            continue
        if not name.isprintable():
            raise NotACheckpointError(
                f"holds a file whose name is no plain text: {name!a:.100}",
                path=str(root),
                hint="give it another name, or move it away",
            )
        count += 1
        if count > _MOST_FILES:
            raise NotACheckpointError(
                f"holds more than {_MOST_FILES} files beside {' and '.join(parts)}",
                path=str(root),
                hint=f"move away what does not belong to the checkpoint, or convert {root / parts[0]} alone",
            )
        yield SourceFile(path=name, num_bytes=_open_to_carry(path, root))


def _walk(folder: Path, parts: tuple[str, ...], depth: int) -> Iterator[Path]:
    for child in sorted(folder.iterdir(), key=lambda path: path.name):
        if (depth == 0 and child.name in parts) or is_unfinished(child):
            continue
        if not child.is_symlink() and child.is_dir():
            if child.name.startswith("."):  # of tools, such as .git, or of a run that works on the folder
                continue
            if depth == _MOST_DEPTH:
                raise NotACheckpointError(f"lies more than {_MOST_DEPTH} folders deep", path=str(child))
            yield from _walk(child, parts, depth + 1)
        else:
            yield child


def _open_to_carry(path: Path, root: Path) -> int:
    """Return the size of a file that a conversion carries; its identity is recorded.

    Raises:
        NotACheckpointError: it is no regular file, or cannot be read.
    """
    hint = "copy the folder with what it links to (cp -rL FOLDER NEW_FOLDER), or move this away"
    try:
        if not isinstance(path, RemotePath) and not stat.S_ISREG(mode := path.lstat().st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "a pipe or device"
            raise NotACheckpointError(f"is {kind}: only regular files are carried", path=str(path), hint=hint)
        with open_file(path, root=root) as file:
            return file.num_bytes
    except OSError as error:
        raise make_read_error(error, str(path), is_indexed=False) from error
