"""Checkpoint roots as numbers: each number stands for the exact content of the folder, which is made on demand.

The search keeps the number in its states. Before the trainer's code runs, `mount` makes the folder hold that content;
afterwards `read` returns the number of what the code has left there.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from reshard.contract import COMMIT_FILE

Content = tuple[tuple[str, bytes | None], ...]


class CheckpointRoot:
    """One folder, and the numbers of all contents that it has had."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._numbers: dict[Content, int] = {(): 0}
        self._contents: list[dict[str, bytes | None]] = [{}]
        self._commits: dict[int, frozenset[str]] = {}
        self._mounted = 0

    def mount(self, number: int) -> None:
        """Make the folder hold the content with this number."""
        if number == self._mounted:
            return
        now, wanted = self._contents[self._mounted], self._contents[number]
        for name in sorted(now, reverse=True):
            if name not in wanted:
                path = self.folder / name
                path.rmdir() if now[name] is None else path.unlink()
        for name, content in sorted(wanted.items()):
            path = self.folder / name
            if content is None:
                path.mkdir(exist_ok=True)
            elif now.get(name) != content:
                path.write_bytes(content)
        self._mounted = number

    def read(self) -> int:
        """Return the number of the content that the folder has now."""
        found: dict[str, bytes | None] = {}
        for place, folders, files in os.walk(self.folder):
            base = Path(place)
            found.update({(base / name).relative_to(self.folder).as_posix(): None for name in folders})
            found.update(
                {(base / name).relative_to(self.folder).as_posix(): (base / name).read_bytes() for name in files}
            )
        content = tuple(sorted(found.items()))
        number = self._numbers.setdefault(content, len(self._contents))
        if number == len(self._contents):
            self._contents.append(found)
        self._mounted = number
        return number

    def commits(self, number: int) -> frozenset[str]:
        """Return the folders of all published commits, as absolute paths."""
        if number not in self._commits:
            self._commits[number] = self._find_commits(number)
        return self._commits[number]

    def _find_commits(self, number: int) -> frozenset[str]:
        names = (name.rpartition("/") for name in self._contents[number])
        return frozenset(str(self.folder / folder) for folder, _, name in names if name == COMMIT_FILE)

    def step(self, number: int, uri: str) -> int:
        """Return the step of a published commit."""
        name = f"{Path(uri).relative_to(self.folder).as_posix()}/{COMMIT_FILE}"
        return int(json.loads(self._contents[number][name] or b"")["step"])

    def document(self, number: int, name: str) -> dict[str, Any]:
        """Return a JSON file in the root; empty if it is not there."""
        found: dict[str, Any] = json.loads(self._contents[number].get(name) or b"{}")
        return found

    def has_newer_marker(self, number: int, attempt: int) -> bool:
        """Return whether a later attempt has announced itself."""
        markers = (name.split("/") for name in self._contents[number])
        return any(
            len(parts) == 2 and parts[1].startswith("ATTEMPT") and int(parts[0][1:]) > attempt for parts in markers
        )

    def close(self) -> None:
        shutil.rmtree(self.folder)
