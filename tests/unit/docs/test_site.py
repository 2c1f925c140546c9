"""The documentation site: every page is in the navigation once, and links of the repository's pages are right on it."""

from __future__ import annotations

import doctest
import functools
import json
import os
import posixpath
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site import links as site_links
from docs.site.links import DECISIONS, ROOT_PAGES, add_decisions, list_decisions, name_on_site, rewrite_links
from release.pins import read_versions
from tests.pages import PAGES, ROOT, anchors


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python functions, without calling any."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
SITE = {name_on_site(page.relative_to(ROOT).as_posix()): page for page in PAGES}
"""Every page, by its name on the site."""


def in_navigation(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from in_navigation(value)


def test_every_page_is_in_the_navigation_exactly_once() -> None:
    decisions = [path.name for path in sorted((ROOT / "docs/adr").glob("*.md"))]
    found = Counter(in_navigation(add_decisions(CONFIG["nav"], decisions)))
    assert sorted(set(SITE) - set(found)) == [], "add these pages to nav in mkdocs.yml"
    assert sorted(set(found) - set(SITE)) == [DECISIONS], "remove these from nav in mkdocs.yml"
    assert {name: count for name, count in found.items() if count > 1} == {}


def test_every_page_in_the_root_of_the_repository_is_on_the_site() -> None:
    assert {path.name for path in ROOT.glob("*.md")} == set(ROOT_PAGES)


def links_on_site(name: str) -> Iterator[tuple[str, str]]:
    """The page and the heading that each link of a page leads to."""
    page = SITE[name]
    text = rewrite_links(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())
    prose = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield posixpath.normpath(posixpath.join(posixpath.dirname(name), file)) if file else name, anchor


def test_links_between_pages_lead_to_pages_and_headings_on_the_site() -> None:
    headings = functools.cache(anchors)
    found = [(name, *link) for name in SITE for link in links_on_site(name)]
    assert [
        (name, page)
        for name, page, _ in found
        if page not in SITE and page != DECISIONS and not (ROOT / "docs" / page).is_file()
    ] == []
    assert [(name, page, anchor) for name, page, anchor in found if anchor and anchor not in headings(SITE[page])] == []


def test_nothing_is_fetched_while_the_site_is_built() -> None:
    assert CONFIG["theme"]["font"] is False
    assert "extra_css" not in CONFIG
    assert "extra_javascript" not in CONFIG
    assert CONFIG["plugins"] == ["search"]


def test_versions_of_the_sites_programs_are_pinned_and_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = {f"{name}=={version}" for name, version in read_versions(ROOT / "requirements.lock").items()}
    assert set(project["optional-dependencies"]["docs"]) <= locked


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("README.md", "[a](docs/install.md#x) ![b](docs/recovery.png)", "[a](install.md#x) ![b](recovery.png)"),
        ("README.md", "[all](docs/adr/)", "[all](adr/index.md)"),
        ("docs/install.md", "[a](../README.md) [b](../SECURITY.md#x)", "[a](index.md) [b](SECURITY.md#x)"),
        ("docs/adr/0001-x.md", "[a](../install.md) [b](0002-y.md)", "[a](../install.md) [b](0002-y.md)"),
        ("docs/install.md", "[w](https://example.org) [x](#here)", "[w](https://example.org) [x](#here)"),
        ("docs/trainer.md", "[`plain.py`](../examples/a/plain.py)", "`plain.py`"),
        ("docs/trainer.md", "[the example](../examples/a/plain.py)", "the example (`examples/a/plain.py`)"),
        ("docs/trainer.md", "`[a](../x.py)`\n```\n[a](../x.py)\n```\n", "`[a](../x.py)`\n```\n[a](../x.py)\n```\n"),
    ],
)
def test_links_are_rewritten(page: str, text: str, expected: str) -> None:
    assert rewrite_links(text, page) == expected


def test_files_are_links_where_the_repository_has_an_address() -> None:
    found = rewrite_links("[x](../Makefile#a)", "docs/a.md", "https://example.org/r/blob/HEAD/")
    assert found == "[x](https://example.org/r/blob/HEAD/Makefile#a)"


def test_decisions_are_listed_by_their_titles() -> None:
    assert "- [One](0001-one.md)" in list_decisions([("0001-one.md", "# One\n\ntext\n")])


def test_examples_in_docstrings_are_right() -> None:
    assert doctest.testmod(site_links).failed == 0


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: make setup")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    (version,) = json.loads((tmp_path / "versions.json").read_text(encoding="utf-8"))
    site = tmp_path / version["version"]
    assert f"url={version['version']}/" in (tmp_path / "index.html").read_text(encoding="utf-8")
    built = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    assert {re.sub(r"(^|/)index\.md$|\.md$", "", name) or "." for name in SITE} <= built
    assert not list(site.rglob("*.py"))


def test_the_folder_of_the_site_is_not_tracked() -> None:
    assert "/site/" in Path(ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
