"""Detect that a file was changed or replaced by another one of the same name, without reading it."""

from __future__ import annotations

import dataclasses
import datetime
import os


@dataclasses.dataclass(frozen=True, slots=True)
class FileIdentity:
    """Size, times and inode of a file, or the version of an object.

    Attributes:
        num_bytes: size.
        mtime_ns: time of the last change of the content, by the file system; 0 for objects.
        inode: inode number; 0 for objects.
        ctime_ns: time of the last change of content, name, mode or owner; no program can set it. 0 for objects.
        version: version that the store states (ETag, generation, time); empty for files.
    """

    num_bytes: int
    mtime_ns: int = 0
    inode: int = 0
    ctime_ns: int = 0
    version: str = ""

    @classmethod
    def of_status(cls, status: os.stat_result) -> FileIdentity:
        """Make the identity of a local file from its stat(2) result."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)

    def difference(self, now: FileIdentity, *, is_stated: bool = False) -> str:
        """Describe what proves that the content was changed; empty if nothing does.

        A different `ctime_ns` proves nothing, because `chown` and `chmod` change it, too.

        Args:
            now: the identity to compare with.
            is_stated: a commit states a checksum of the content, so the inode is not compared. Some network file
                systems give an unchanged file a new inode when it is opened again.
        """
        if now.num_bytes != self.num_bytes:
            return f"has {now.num_bytes} bytes, had {self.num_bytes}"
        if now.mtime_ns != self.mtime_ns:
            return f"was written at {_time(now.mtime_ns)}, before that at {_time(self.mtime_ns)}"
        if now.version != self.version:
            return f"is version {now.version!a:.100}, was {self.version!a:.100}"
        if now.inode != self.inode and not is_stated:
            return f"is another file: inode {now.inode}, was {self.inode}"
        return ""


def _time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    try:
        time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return f"{seconds}.{rest:09d} s"
    return f"{time:%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
