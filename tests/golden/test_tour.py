"""The tour does what its page says: every command is run, and prints what is printed there.

`python -m tests.golden.test_tour` writes the page's outputs and its picture again.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tour.md"
PICTURE = ROOT / "docs/boxes.svg"
HOME = "/home/me"
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_VOLATILE = (
    (re.compile(r"\d+(\.\d+)?(?= (ms|s|min|h)\b)"), "#"),
    (re.compile(r"\d+(\.\d+)? [KMG]iB/s"), "# /s"),
    (re.compile(r"peak memory \d+(\.\d+)? MiB"), "peak memory #"),
    (re.compile(r"\d+(\.\d+)? MiB synced"), "# synced"),
    (re.compile(r"\d+(\.\d+)? [KMGT]iB on the target"), "# on the target"),
    (re.compile(r"\d+ %"), "# %"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "#"),
    (re.compile(r"\d+ threads?"), "# threads"),
    (re.compile(r"\d+(\.\d+)? MiB of buffers"), "# of buffers"),
    (re.compile(r"# (ms|s|min|h)( # s)?"), "# s"),
    (re.compile(r" +"), " "),
)


class Step(NamedTuple):
    """A command of the page and what it prints."""

    command: str
    output: str


def steps(page: str) -> Iterator[Step]:
    for block in _BLOCK.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield Step(command, output.strip("\n"))


def run(command: str, folder: Path) -> str:
    """Return the output of a command that must succeed, in a folder that looks like a checkout at `HOME`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "LC_ALL": "C", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout.replace(str(folder), HOME).strip("\n")


def steady(text: str) -> str:
    """Without what differs from run to run."""
    for pattern, replacement in _VOLATILE:
        text = pattern.sub(replacement, text)
    return text


def make_home(folder: Path) -> Path:
    (folder / "tests").symlink_to(ROOT / "tests")
    return folder


@pytest.mark.slow
def test_every_command_of_the_tour_prints_what_the_page_says(tmp_path: Path) -> None:
    folder = make_home(tmp_path.resolve())
    found = list(steps(PAGE.read_text(encoding="utf-8")))
    assert len(found) >= 15
    for step in found:
        assert steady(run(step.command, folder)) == steady(step.output), step.command
    assert (folder / "boxes.svg").read_text(encoding="utf-8") == PICTURE.read_text(encoding="utf-8")
    assert not (folder / "never").exists()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_the_comparison_of_outputs_sees_differences() -> None:
    assert steady("read 3 files in 0.2 s") == steady("read 3 files in 12 ms")
    assert steady("read 3 files in 0.2 s") != steady("read 4 files in 0.2 s")


def main() -> None:
    """Write the page again."""
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = make_home(Path(name).resolve())

        def block(match: re.Match[str]) -> str:
            parts = []
            for step in steps(match[0]):
                output = run(step.command, folder)
                parts.append(f"$ {step.command}\n" + (f"{output}\n" if output else ""))
            return "```console\n" + "".join(parts) + "```"

        PAGE.write_text(_BLOCK.sub(block, page), encoding="utf-8")
        PICTURE.write_text((folder / "boxes.svg").read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
