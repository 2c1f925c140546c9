"""CHANGELOG.md has the form of Keep a Changelog; a page of another form is refused by its line."""

from __future__ import annotations

import pytest

from release.changelog import KINDS, UNRELEASED, ChangelogError, format_notes, read_changelog
from tests.pages import ROOT

PAGE = """# Changelog

Text.

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added

- **A:** one
  line more
- two

### Fixed

- three

## [0.1.0] - 2026-11-01

### Removed

- four
"""


def test_the_page_of_this_repository_has_the_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = read_changelog(text)
    assert next(iter(versions)) == UNRELEASED
    assert "https://keepachangelog.com/en/1.1.0/" in text
    for kinds in versions.values():
        assert all(kinds.values()), "no kind without an entry"
        assert list(kinds) == [kind for kind in KINDS if kind in kinds]
        assert all(entry.startswith("**") and ":** " in entry for found in kinds.values() for entry in found)


def test_entries_are_read_by_version_and_kind() -> None:
    versions = read_changelog(PAGE)
    assert list(versions) == ["Unreleased", "0.2.0", "0.1.0"]
    assert versions["0.2.0"] == {"Added": ["**A:** one\nline more", "two"], "Fixed": ["three"]}
    notes = format_notes(versions["0.2.0"])
    assert notes == "### Added\n\n- **A:** one\n  line more\n- two\n\n### Fixed\n\n- three\n"


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("### Fixed", "### Mended", "CHANGELOG.md:15: expected one of Added, .*, found '### Mended'"),
        ("### Fixed", "### Added", "CHANGELOG.md:15: expected one of Added, .*, once"),
        ("### Fixed", "#### Fixed", "CHANGELOG.md:15: expected no heading but versions and kinds"),
        (
            "## [0.1.0] - 2026-11-01",
            "## 0.1.0",
            r"CHANGELOG.md:19: expected \[Unreleased\] or \[VERSION\] - YYYY-MM-DD",
        ),
        ("## [0.1.0]", "## [0.2.0]", "CHANGELOG.md:19: expected each version once"),
        (
            "## [0.1.0]",
            "## [0.3.0]",
            "expected Unreleased first and then versions in falling order, found .*0.2.0, 0.3.0",
        ),
        ("## [Unreleased]\n", "", "expected Unreleased first"),
        ("- three", "three", "CHANGELOG.md:17: expected an entry"),
        ("- four", "* four", "CHANGELOG.md:23: expected an entry"),
        ("### Removed\n", "\n", "CHANGELOG.md:23: expected a kind before the first entry"),
    ],
)
def test_another_form_is_refused(right: str, wrong: str, message: str) -> None:
    assert right in PAGE
    with pytest.raises(ChangelogError, match=message):
        read_changelog(PAGE.replace(right, wrong, 1))
