"""A published result survives a power failure: every folder that it made is synced before its marker."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from reshard.cli.main import main
from reshard.contract import ExitCode
from reshard.storage.durable import make_folder

SOURCE = Path(__file__).parent / "deepspeed-0.19.8/pipeline-tp2-pp2/step-00000002"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Every fsync of this process: the path, by its published name, and whether a marker was there by then."""
    calls: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        staged = re.match(r"(.*)/\.([^/]+)\.partial-[0-9a-f]+(/.*)?$", path)
        marker = Path(path) / "COMMIT.json"
        name = f"{staged[1]}/{staged[2]}{staged[3] or ''}" if staged else path
        calls.append((name, marker.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


@pytest.mark.parametrize("format_", ["deepspeed", "universal"])
def test_every_folder_that_a_publication_makes_is_synced(
    tmp_path: Path, synced: list[tuple[str, bool]], format_: str
) -> None:
    target = tmp_path / "new" / "parents" / "out"
    assert main(["run", str(SOURCE), str(target), "--to", "dp=1", "--format", format_]) == ExitCode.OK
    before_the_marker = {path for path, marked in synced if not marked}
    made = {str(path) for path in (target, *target.rglob("*")) if path.is_dir()}
    assert len(made) > (10 if format_ == "universal" else 0)
    assert made <= before_the_marker
    assert {str(tmp_path), str(tmp_path / "new"), str(target.parent)} <= before_the_marker
    assert (str(target), True) in synced, "the marker's own name"
    assert synced[-1][0] == str(target.parent), "the name under which it appears"


def test_a_new_folder_is_synced_in_the_one_above_it(tmp_path: Path, synced: list[tuple[str, bool]]) -> None:
    make_folder(tmp_path / "a" / "b")
    assert [path for path, _ in synced] == [str(tmp_path), str(tmp_path / "a")]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2
