"""Find checkpoints, and refuse paths that cannot be what the command needs before anything is opened."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from reshard.commits.commit import read_commit
from reshard.commits.latest import read_names
from reshard.commits.root_owner import read_owner
from reshard.commits.staging import is_unfinished, unfinished_folder
from reshard.commits.takeover import find_job_commits
from reshard.contract import COMMIT_FILE
from reshard.errors import (
    NotACheckpointError,
    NotOwnerError,
    ReshardError,
    SourceError,
    TargetError,
    UncommittedError,
    UnsupportedError,
    UsageError,
    make_read_error,
)
from reshard.folders import find_inner, find_training_folder, is_checkpoint
from reshard.formats import FORMATS, WEIGHT_FORMATS, format_of, known_formats, recognise

_MOST_TAGS = 20
_RESUME = "the command that made it, with --resume, goes on with what is done, and without it begins again"
_MOST_NAME_BYTES = 255  # of Linux' file systems
_MOST_PATH_BYTES = 3800  # PATH_MAX is 4096; the files of the result have names too


def check_source(path: Path, *, is_committed: bool = False) -> None:
    """Refuse a path that is not the folder of one checkpoint.

    Args:
        path: as given by the user.
        is_committed: the user knows that a commit was there, so that its volume may be away for a while.

    Raises:
        UncommittedError: missing, although it was committed.
        NotACheckpointError: missing, a file, unreadable, or the folder above the checkpoints; says what is there.
    """
    try:
        if is_committed and not _exists(path):
            raise UncommittedError("there is no such folder", path=str(path), hint=_nearest(path))
        _check_source(path)
    except ReshardError:
        raise
    except OSError as error:
        raise make_read_error(error, str(path), is_indexed=False) from error


def find_training_states(path: Path) -> list[str]:
    """Find checkpoints in a folder of weights that is no known training folder, where both would be one unit."""
    if (path / COMMIT_FILE).exists() or not _is_of(path, weights=True) or find_training_folder(path) is not None:
        return []
    try:
        return [name for name in find_checkpoints(path) if _is_of(path / name, weights=False)]
    except OSError:  # a folder that cannot be read holds no checkpoint for us
        return []


def refuse_weights_beside(path: Path) -> None:
    """Refuse a folder of weights with a training state beside them: the training state is probably what is meant.

    Raises:
        NotACheckpointError: names the training states.
    """
    if tags := find_training_states(path):
        raise NotACheckpointError(
            "holds weights, and the state of the training in a folder beside them",
            path=str(path),
            problems=tags[:_MOST_TAGS],
            hint=f"name that folder, {path / _latest(path, tags)}, or say --format safetensors for the weights alone",
        )


def _is_of(path: Path, *, weights: bool) -> bool:
    # Only the formats in question are imported, so that a conversion starts sooner.
    names = [name for name in FORMATS if (name in WEIGHT_FORMATS) is weights]
    return any(format_of(name).sniff(path) is None for name in names)


def _check_source(path: Path) -> None:
    if not _exists(path):
        if os.path.islink(path):  # noqa: PTH114  (takes names of any length)
            raise NotACheckpointError(
                f"is a symbolic link to {path.readlink()}, which is not there", path=str(path), hint=_nearest(path)
            )
        raise NotACheckpointError("there is no such folder", path=str(path), hint=_nearest(path))
    if not path.is_dir():
        raise NotACheckpointError(
            "is a file: expected the folder of one checkpoint", path=str(path), hint=f"name its folder: {path.parent}"
        )
    if is_unfinished(path):
        raise NotACheckpointError(
            "is the unfinished result of a run that was killed, or that still works on it", path=str(path), hint=_RESUME
        )
    if not any(path.iterdir()):
        raise NotACheckpointError("is empty", path=str(path))
    if (path / COMMIT_FILE).exists() or is_checkpoint(path):
        return
    tags = find_checkpoints(path)
    if tags:
        latest = _latest(path, tags)
        raise NotACheckpointError(
            f"holds {len(tags)} checkpoint{'s' if len(tags) > 1 else ''}, and is none itself",
            path=str(path),
            problems=[*tags[:_MOST_TAGS], *([f"and {len(tags) - _MOST_TAGS} more"] if len(tags) > _MOST_TAGS else [])],
            hint=f"name one of them, for instance {path / latest}",
        )
    raise NotACheckpointError(
        "holds no checkpoint that this version knows",
        path=str(path),
        problems=[f"{name}: {reason}" for name, reason in recognise(path)],
        hint=next(
            (f"{child.name} in it is unfinished: {_RESUME}" for child in path.iterdir() if is_unfinished(child)),
            f"the formats are {known_formats()}",
        ),
    )


def _nearest(path: Path) -> str:
    """Return a hint that names the longest part of a path that exists."""
    above = next((parent for parent in path.absolute().parents if _exists(parent)), None)
    return f"of this path, {above} is there" if above is not None and above != Path(above.anchor) else ""


def find_checkpoints(path: Path) -> list[str]:
    """Return the names of the folders in `path` that hold a checkpoint, in the order of the numbers in the names."""
    names = []
    for child in path.iterdir():
        if child.name.startswith(".") or not child.is_dir():
            continue
        if (child / COMMIT_FILE).exists() or is_checkpoint(child):
            names.append(child.name)
    return sorted(names, key=_natural)


def _latest(path: Path, tags: list[str]) -> str:
    """Return the folder that the framework's own file names, else the last one."""
    try:
        return next((name for name in read_names(path) if name in tags), tags[-1])
    except (OSError, NotACheckpointError):  # the result is only a hint for people
        return tags[-1]


def find_newest(path: Path) -> Path:
    """Return the newest checkpoint in a folder of several, or `path` itself if it is one or none is known to be newest.

    For a training with DeepSpeed or Megatron-LM, it is the checkpoint that the framework would load. For a job, whose
    folder holds `a<attempt>/step-<step>`, it is the commit of the latest step, and among those the one of the latest
    attempt. For the folder of a training stack, it is the checkpoint inside alone.

    Raises:
        NotACheckpointError: the framework's file names no checkpoint, or the folder cannot be read.
    """
    try:
        if path.is_dir() and (inner := find_inner(path)) is not None:
            return inner
        if not path.is_dir() or (path / COMMIT_FILE).exists() or is_checkpoint(path):
            return path
        name = next(read_names(path), None)
        if name is None:
            return max(_commits(path), default=(0, 0, path))[2]
        tags = find_checkpoints(path)
    except OSError as error:
        raise make_read_error(error, str(path), is_indexed=False) from error
    if name in tags:
        return path / name
    raise NotACheckpointError(
        f"its file that names the newest checkpoint says {name!a:.100}, and there is no checkpoint of that name",
        path=str(path),
        problems=tags[-_MOST_TAGS:],
        hint="name the folder of one checkpoint" + (f", for instance {path / tags[-1]}" if tags else ""),
    )


def _commits(path: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (step, attempt, folder) of every commit in the folder of a job.

    Of a folder that has had several owners only the commits of the present one count, if there are any: a former owner
    may have trained longer, or publish late.
    """
    commits: list[tuple[str, tuple[int, int, Path]]] = []
    for attempt, folder in find_job_commits(path):
        with contextlib.suppress(SourceError, UnsupportedError):  # a damaged marker does not count
            commit = read_commit(folder)
            commits.append((commit.owner, (commit.step, attempt, folder)))
    owner = None
    with contextlib.suppress(NotOwnerError):
        owner = read_owner(path)
    own = [item for writer, item in commits if owner is not None and owner.previous and writer == owner.uid]
    yield from own or (item for _, item in commits)


def _natural(name: str) -> tuple[int, str]:
    digits = "".join(character for character in name if character.isdigit())
    return (int(digits) if digits.isascii() and digits else 0, name)


def _exists(path: Path) -> bool:
    """Return True if the path exists; a name that is too long for the file system does not exist."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def _check_names(target: Path) -> None:
    """Refuse names that are too long for file systems; the unfinished result has a longer name than the target."""
    for part in target.parts:
        most = (
            _MOST_NAME_BYTES
            if part != target.name
            else _MOST_NAME_BYTES - len(unfinished_folder(Path("x"), "0" * 16).name) + 1
        )
        if (num_bytes := len(os.fsencode(part))) > most:
            raise TargetError(
                f"a name of {num_bytes} bytes, {part[:20]}...: at most {most} fit",
                path=f"{str(target)[:100]}...",
                hint="choose a shorter name",
            )
    if (num_bytes := len(os.fsencode(target.absolute()))) > _MOST_PATH_BYTES:
        raise TargetError(
            f"has {num_bytes} bytes: at most {_MOST_PATH_BYTES} fit",
            path=f"{str(target)[:100]}...",
            hint="choose a shorter path",
        )


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that would touch the source, or that cannot become a folder.

    A target folder that exists is checked later, when its commit is read: it may be the result of this conversion.

    Raises:
        UsageError: source and target are the same, or one lies in the other.
        TargetError: the target is a file, lies below a file, is a mounted volume, has a name that is too long, or its
            path cannot be read.
    """
    _check_names(target)
    try:
        _check_place(source, target)
    except OSError as error:
        raise TargetError(
            f"cannot be looked at: {error.strerror or error}", path=error.filename or str(target)
        ) from error


def _check_place(source: Path, target: Path) -> None:
    for path in (target, *target.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise TargetError("is a file: no folder can be made there", path=str(path))
            break
        if path.is_symlink():
            raise TargetError(f"is a symbolic link to {path.readlink()}, which is not there", path=str(path))
    here, there = source.resolve(), target.resolve()
    if here == there:
        raise UsageError("source and target are the same folder", path=str(target), hint="name a new folder")
    if here in there.parents:
        raise UsageError(
            f"the target lies inside the source {source}, which is never changed",
            path=str(target),
            hint="name a folder outside of it",
        )
    if there in here.parents:
        raise UsageError(
            f"the target holds the source {source}", path=str(target), hint="name a new folder beside the source"
        )
    if target.is_mount():
        raise TargetError(
            "is where a volume is mounted: a result appears by a rename, which cannot replace that",
            path=str(target),
            hint=f"name a folder in it, for instance {target / source.name}",
        )
