"""The mailbox between rank 0 and the operator: rank 0 writes annotations and reads requests.

There are three implementations: the attempt's Lease (`lease`), a JSON file for use without a cluster, and one that does
nothing.
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
    """Exchanges annotations with the operator."""

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Merge `annotations` into the mailbox, renew it, and return all its annotations.

        Raises:
            FencedError: access was revoked, because a newer attempt has started.
            OSError: the mailbox cannot be reached; try again at the next beat.
        """
        ...

    def read(self) -> Mapping[str, str]:
        """Return all annotations of the mailbox, without renewing it; raise as `exchange`."""
        ...


class NoMailbox:
    """A mailbox without an operator."""

    def read(self) -> Mapping[str, str]:
        """Return no annotations."""
        return {}

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Return `annotations` unchanged."""
        return annotations


class FileMailbox:
    """A JSON object in a file. Other programs write their requests with `exchange`, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def exchange(self, annotations: Mapping[str, str]) -> Mapping[str, str]:
        """Merge `annotations` into the file and return the result.

        The lock keeps concurrent writers from losing updates; the rename keeps readers from seeing a partial file.

        >>> FileMailbox(Path("mailbox.json")).exchange({"elastictraining.dev/request": "drain"})
        {'elastictraining.dev/request': 'drain'}
        """
        with open(self.path.with_name(f".{self.path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            merged = {**self._read(), **annotations}
            draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            draft.write_text(json.dumps(merged, indent=1, sort_keys=True), encoding="utf-8")
            draft.rename(self.path)
        return merged

    def read(self) -> Mapping[str, str]:
        """Return the content of the file."""
        return self._read()

    def _read(self) -> dict[str, str]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            value = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(value, dict):
                return {str(key): str(item) for key, item in value.items()}
        return {}
