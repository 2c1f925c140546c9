"""What tells a file from the one that was there before under its name, without reading either."""

from __future__ import annotations

import dataclasses
import datetime
import os


@dataclasses.dataclass(frozen=True, slots=True)
class FileIdentity:
    """Size, times and number of a file, or the version of an object.

    Attributes:
        num_bytes: size.
        mtime_ns: time of the last change of the content, as the file system says it; 0 for objects.
        inode: number in the file system; 0 for objects.
        ctime_ns: time of the last change of content, name, mode or owner; no program can set it. 0 for objects.
        version: what the store calls the content (ETag, generation, time); empty for files.
    """

    num_bytes: int
    mtime_ns: int = 0
    inode: int = 0
    ctime_ns: int = 0
    version: str = ""

    @classmethod
    def of_status(cls, status: os.stat_result) -> FileIdentity:
        """Return that of a local file from what stat(2) says."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)

    def difference(self, now: FileIdentity, *, is_stated: bool = False) -> str:
        """Say what shows that the content was changed; empty where nothing does.

        Another time of status is no proof: `chown` and `chmod` change it too.

        Args:
            now: the identity that it is compared with.
            is_stated: somebody states a checksum of the content, which proves more than the number of the file: some
                network file systems number an unchanged file anew when it is opened again.
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
        found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return f"{seconds}.{rest:09d} s"
    return f"{found:%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
