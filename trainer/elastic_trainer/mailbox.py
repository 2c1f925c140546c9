"""The mailbox between rank 0 and the operator: annotations out, requests in.

Three carriers with one interface: the attempt's Lease, a JSON file where there is no cluster, and nothing at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Mailbox(Protocol):
    """Exchange annotations with the operator."""

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Write `annotations` (merged over what is there), renew, and return all annotations as they are now.

        Raises:
            FencedError: the mailbox was taken away: a newer attempt has been started.
            OSError: it cannot be reached now; try again at the next beat.
        """
        ...


class NoMailbox:
    """Nobody listens."""

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Return what was written."""
        return annotations


class FileMailbox:
    """A JSON object in a file; other programs put their requests into it with `exchange`, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Merge and replace the file by a rename, so that a reader never sees half of it and no writer is lost."""
        with open(self.path.with_name(f".{self.path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            merged = {**self._read(), **annotations}
            draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            draft.write_text(json.dumps(merged, indent=1, sort_keys=True), encoding="utf-8")
            draft.rename(self.path)
        return merged

    def _read(self) -> dict[str, str]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            value = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(value, dict):
                return {str(key): str(item) for key, item in value.items()}
        return {}
