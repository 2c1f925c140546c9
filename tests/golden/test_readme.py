"""The README's conversion: its commands are run, and print what is printed there."""

from pathlib import Path

from tests.golden.test_tour import make_home, run, steady
from tests.pages import README, blocks, steps


def test_the_conversion_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    folder = make_home(tmp_path.resolve())
    shown = [
        step
        for block in blocks(README.read_text(encoding="utf-8"))
        if block.language == "console" and block.marker != "not run"
        for step in steps(block)
        if step.command.startswith("reshard ")
    ]
    assert shown
    for step in shown:
        assert steady(run(step.command, folder)) == steady(step.output), step.command
