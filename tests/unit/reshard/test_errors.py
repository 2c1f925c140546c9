"""The exit code of every class of errors: what a machine does next follows from it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from reshard import cli, virtual, witnessed  # noqa: F401  # so that every module with a class of errors is imported
from reshard.contract import ExitCode
from reshard.errors import ReshardError, StoreError, make_read_error
from tests.fuzz.guard import CODES


def walk(kind: type[ReshardError]) -> Iterator[type[ReshardError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from walk(below)


def test_every_class_of_errors_has_its_exit_code() -> None:
    assert {kind.__name__: kind.exit_code for kind in walk(ReshardError)} == {
        "ReshardError": ExitCode.INTERNAL,
        **CODES,
    }


def test_only_bytes_that_contradict_themselves_are_called_damaged() -> None:
    assert [name for name, code in CODES.items() if code == ExitCode.SOURCE_INVALID] == ["CorruptSourceError"]


def test_every_exit_code_of_an_error_is_in_use() -> None:
    assert {*CODES.values(), ExitCode.OK, ExitCode.INTERNAL, ExitCode.INTERRUPTED} == set(ExitCode)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), ExitCode.SOURCE_INVALID),  # the checkpoint's own index names it
        (NotADirectoryError(errno.ENOTDIR, "no folder"), ExitCode.SOURCE_INVALID),
        (IsADirectoryError(errno.EISDIR, "a folder"), ExitCode.SOURCE_INVALID),
        (OSError(errno.EINVAL, "is a pipe"), ExitCode.SOURCE_INVALID),
        (OSError(errno.ENXIO, "is a socket"), ExitCode.SOURCE_INVALID),
        (OSError(errno.ELOOP, "a link"), ExitCode.UNSUPPORTED),
        (PermissionError(errno.EACCES, "not yours"), ExitCode.SOURCE_UNAVAILABLE),
        (OSError(errno.EIO, "input/output error"), ExitCode.SOURCE_UNAVAILABLE),
        (OSError(errno.ESTALE, "stale file handle"), ExitCode.SOURCE_UNAVAILABLE),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), ExitCode.SOURCE_UNAVAILABLE),
        (OSError("without a number"), ExitCode.SOURCE_UNAVAILABLE),
        (StoreError("the store answers 503"), ExitCode.SOURCE_UNAVAILABLE),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(error: OSError, code: ExitCode) -> None:
    assert make_read_error(error, "ckpt/data").exit_code == code
