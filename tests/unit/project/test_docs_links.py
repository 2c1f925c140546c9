"""Every link of the documentation leads somewhere, and every page is reached from the README."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.pages import PAGES, README, ROOT, anchors, blocks, differs, links, steps


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    headings = functools.cache(anchors)
    wrong = []
    for link in (link for page in PAGES for link in links(page)):
        if not link.target.exists():
            wrong.append(f"{name(link.page)}: {link.target} does not exist")
        elif link.anchor and link.anchor not in headings(link.target):
            wrong.append(
                f"{name(link.page)}: {name(link.target)} has no heading #{link.anchor}, "
                f"but {sorted(headings(link.target))}"
            )
    assert wrong == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    todo = [README]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page):
            # A folder's pages are listed where it is opened.
            todo += sorted(link.target.glob("*.md")) if link.target.is_dir() else [link.target]
        todo = [item for item in todo if item.suffix == ".md" and item.exists()]
    assert [name(page) for page in PAGES if page not in reached] == []


def test_a_block_that_is_not_run_says_why() -> None:
    marked = [
        (name(page), block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8")) if block.marker
    ]
    assert [
        (page, block.line)
        for page, block in marked
        if block.marker not in ("not run", "values") or len(block.reason) < 10
    ] == []


def test_links_and_headings_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `a-b`, c & d\n[x](y.md#z) [![p](q.png)](#e) `[no](no.md)` [web](https://example.org)\n"
        "```console\n# no heading\n[no](no.md)\n```\n## Twice\n## Twice\n"
    )
    assert [(link.target.name, link.anchor) for link in links(page)] == [("y.md", "z"), ("page.md", "e")]
    assert anchors(page) == {"a-b-c--d", "twice", "twice-1"}


def test_commands_go_over_several_lines_and_have_outputs() -> None:
    (block,) = blocks("<!-- not run: because of this -->\n```console\n$ a \\\n>   b\nout\n$ c\n```\n")
    assert (block.marker, block.reason, block.line) == ("not run", "because of this", 2)
    assert [(step.command, step.output) for step in steps(block)] == [("a \\\n  b", "out"), ("c", "")]


@pytest.mark.parametrize(
    ("shown", "printed", "difference"),
    [
        ("a  1", "x\na 22\ny", ""),
        ("gpt ... ready", "gpt is not yet ready", ""),
        ("...\nlast", "first\nlast", ""),
        ("one\ntwo", "two\none", "two"),
        ("Running", "Failed", "Running"),
        ("tp=1,pp=3", "tp=1,pq=3", "tp=1,pp=3"),
        ("3/3", "13", "3/3"),
    ],
)
def test_the_comparison_of_outputs_sees_differences(shown: str, printed: str, difference: str) -> None:
    assert differs(shown, printed) == difference
