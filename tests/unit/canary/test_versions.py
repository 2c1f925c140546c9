"""The canary finds what is newer than the pins."""

from pathlib import Path

import pytest

from canary.versions import FRAMEWORKS, Change, find_changes, loosen_pins, newest_release, read_pins
from tests.pages import ROOT


def write_project(tmp_path: Path, *requirements: str) -> Path:
    path = tmp_path / "pyproject.toml"
    listed = ", ".join(f'"{requirement}"' for requirement in requirements)
    path.write_text(f"[project]\ndependencies = []\noptional-dependencies = {{ engine = [{listed}] }}\n")
    return path


@pytest.mark.parametrize(
    ("requirement", "loosened"),
    [
        ("torch==2.13.0", "torch>=2.13.0"),
        ("ruff==0.17.5", "ruff==0.17.5"),  # a tool of ours: another version finds other things, which says nothing
        ("kopf>=1.45.2,<1.46", "kopf>=1.45.2,<1.46"),  # a promise of ours about a library
        ("ninja", "ninja"),
    ],
)
def test_only_pins_of_frameworks_are_loosened(tmp_path, requirement, loosened):
    assert loosen_pins(write_project(tmp_path, requirement)) == [loosened]


def test_every_framework_is_pinned_in_this_project():
    loosened = {line.split(">=")[0] for line in loosen_pins(ROOT / "pyproject.toml")}
    assert loosened >= FRAMEWORKS
    assert read_pins((ROOT / "requirements.lock").read_text().splitlines()).keys() >= FRAMEWORKS


def test_pins_are_read_with_and_without_hashes():
    lines = [
        "# made by",
        "torch==2.13.0",
        "types_PyYAML==6.0 \\",
        "    --hash=sha256:00",
        "isal==1.9 ; python_version > '3'",
    ]
    assert read_pins(lines) == {"torch": "2.13.0", "types-pyyaml": "6.0", "isal": "1.9"}


def test_changes_are_told_frameworks_first():
    pinned = {"babel": "1", "torch": "2.13.0", "same": "1", "gone": "1"}
    assert find_changes(pinned, {"babel": "2", "torch": "2.15.0", "same": "1", "new": "1"}) == [
        Change("torch", "2.13.0", "2.15.0"),
        Change("babel", "1", "2"),
        Change("gone", "1", None),
        Change("new", None, "1"),
    ]


def test_versions_are_compared_as_numbers_and_candidates_do_not_count():
    assert newest_release(["k8s.io/kubernetes", "v1.9.11", "v1.36.3", "v1.37.0-rc.1", "v1.36.10"]) == "1.36.10"
    assert newest_release([]) is None
