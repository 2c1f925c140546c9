"""Output of `python -m testbed env`: a shell finds the programs, also the second time."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from testbed import components, helm, shellenv


def test_programs_are_found_however_often_a_shell_evaluates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETJ_CACHE_DIR", str(tmp_path))
    for program in (components.bin_dir() / "kubectl", tmp_path / f"helm-{helm.VERSION}" / "helm"):
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho v{helm.VERSION}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for _ in range(3):
        text = f"{shellenv.exports(tmp_path / 'admin.conf')}\nprintf '%s' \"$PATH\""
        path = subprocess.run(["bash", "-c", text], stdout=subprocess.PIPE, text=True, check=True).stdout
        monkeypatch.setenv("PATH", path)
        for name in ("kubectl", "helm"):
            found = shutil.which(name)
            assert found is not None
            assert Path(found).resolve().is_relative_to(tmp_path), name
            assert subprocess.run([found], stdout=subprocess.PIPE, check=True, env=os.environ).stdout


@pytest.mark.parametrize("arguments", [(), ("kind",)])
def test_the_command_that_is_printed_runs_the_testbed(arguments: tuple[str, ...]) -> None:
    inner = shellenv.command(*arguments).removeprefix('eval "$(').removesuffix(')"')
    printed = subprocess.run(["bash", "-c", f"{inner} --help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert f"{' '.join(('testbed', *arguments, 'env'))}" in printed
