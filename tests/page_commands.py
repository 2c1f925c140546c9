"""Runs the commands of a page, and compares what they print with what the page says.

The reader's `my-values.yaml`, which says where the images are, is `testbed/values.yaml` here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from testbed import shellenv
from tests.pages import ROOT, Block, blocks, differs, steps

_LIMIT_SECONDS = 300


class Shell:
    """Runs commands one after the other; what they export stays."""

    def __init__(self, kubeconfig: Path) -> None:
        self._exports = shellenv.exports(kubeconfig)

    def __call__(self, command: str) -> str:
        if made := re.fullmatch(r'eval "\$\((.*)\)"', command):
            # What it prints is the same every time, and takes a second.
            self._exports += self(made[1]) + "\n"
            return ""
        if command.startswith("export "):
            self._exports += command + "\n"
        done = subprocess.run(
            [
                "bash",
                "-c",
                f"set -o pipefail\n{self._exports}{command.replace('my-values.yaml', 'testbed/values.yaml')}",
            ],
            cwd=ROOT,
            env={**os.environ, "LC_ALL": "C"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_LIMIT_SECONDS,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def commands(page: str, *, reason: str = "") -> Iterator[Block]:
    """Console blocks that can be run; with a reason, those that are left out for it instead."""
    for block in blocks(text_of(page)):
        if block.language == "console" and (block.reason == reason if reason else block.marker != "not run"):
            yield block


def follow(page: str, shell: Shell, *, first: int = 0, end: int = sys.maxsize, reason: str = "") -> int:
    """Do what a page says from one line until before another; the number of commands.

    Args:
        page: its file name.
        shell: runs the commands.
        first, end: numbers of lines.
        reason: run the blocks that other tests leave out for this reason, instead of all others.
    """
    count = 0
    for block in (item for item in commands(page, reason=reason) if first <= item.line < end):
        for step in steps(block):
            started = time.monotonic()
            printed = shell(step.command)
            print(f"$ {step.command}\n{printed}({time.monotonic() - started:.1f} s)")
            missing = differs(step.output, printed)
            assert not missing, f"{page}:{block.line}: $ {step.command}\nprinted\n{printed}and not\n{missing}"
            count += 1
    return count
