"""CONTRIBUTING.md names files and make targets that exist, and says the limits that the tests hold."""

from __future__ import annotations

import re

from tests.pages import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOTS = [
    ROOT,
    *(ROOT / folder for folder in ("operator", "reshard_job", "trainer", "charts/elastic-training-operator")),
    *(ROOT / folder for folder in ("operator/elastic_operator", "reshard_job/reshard", "trainer/elastic_trainer")),
]


def absent(text: str) -> list[str]:
    """Files and folders in backticks that are in none of the places that the page takes for granted."""
    names = re.findall(r"`((?:[\w.*-]+/)+[\w.*-]*|[\w*-]+\.(?:py|yaml|toml|md|tpl))`", text)
    return [name for name in names if not any(any(root.glob(name.rstrip("/"))) for root in ROOTS)]


def test_every_file_that_is_named_exists() -> None:
    assert absent(TEXT) == []
    assert absent("`api/spec.py` `tests/none.py` `docs/adr/` `chart.yaml` `1/2`") == [
        "tests/none.py",
        "chart.yaml",
        "1/2",
    ]


def test_every_make_target_and_every_tier_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([a-z0-9-]+)", TEXT))
    assert named <= targets
    assert {target for target in targets if target.startswith(("test", "lint"))} - {
        "testbed-up",
        "testbed-down",
    } <= named


def test_the_limits_are_those_of_the_tests() -> None:
    ratchets = (ROOT / "tests/unit/project/test_repository.py").read_text(encoding="utf-8")
    modules, lines = re.findall(r"at most (\d+) modules; a module has at most (\d+) lines", TEXT)[0]
    assert f"test_a_folder_holds_at_most_{modules}_modules" in ratchets
    assert f"<= {lines}" in ratchets
