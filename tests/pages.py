"""Reads the documentation: pages, links, anchors, fenced blocks with their markers, tables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(
    r"(?:^<!-- (?P<marker>[a-z ]+): (?P<reason>[^\n]*) -->\n+)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_EXTERNAL = re.compile(r"[a-z]+:")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        language: word after the fence.
        line: line number of the fence.
        marker, reason: of a comment `<!-- marker: reason -->` on the line before; empty without one.
    """

    language: str
    text: str
    line: int
    marker: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link to a file of the checkout."""

    page: Path
    target: Path
    anchor: str


def blocks(text: str) -> Iterator[Block]:
    """Fenced blocks in order."""
    for found in _FENCE.finditer(text):
        yield Block(
            language=found["language"],
            text=found["text"],
            line=text.count("\n", 0, found.start("language")) + 1,
            marker=found["marker"] or "",
            reason=found["reason"] or "",
        )


def prose(text: str) -> str:
    """The page without fenced blocks and code."""
    return re.sub(r"`[^`\n]*`", "`code`", _FENCE.sub("", text))


def links(page: Path) -> Iterator[Link]:
    """Links of a page that stay inside of the checkout."""
    for destination in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if not _EXTERNAL.match(destination):
            name, _, anchor = destination.partition("#")
            yield Link(page=page, target=(page.parent / name).resolve() if name else page, anchor=anchor)


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page, as GitHub makes them, and of explicit anchors."""
    text = page.read_text(encoding="utf-8")
    seen: dict[str, int] = {}
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for title in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", text), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def section(text: str, title: str) -> str:
    """Text below `## title`, up to the next heading of that level."""
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows, without headings."""
    lines = text.splitlines()
    head = {number - 1 for number, line in enumerate(lines) if re.fullmatch(r"\|[-| :]+\|", line)}
    body = [
        line
        for number, line in enumerate(lines)
        if line.startswith("|") and number not in head and number - 1 not in head
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command of a `console` block and what it prints, as far as the page shows it."""

    command: str
    output: str


def steps(block: Block) -> Iterator[Step]:
    """Commands of a block: a line `$ ...`, continued by lines `> ...`."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        num_more = next((number for number, line in enumerate(lines[1:]) if not line.startswith("> ")), len(lines) - 1)
        command = [lines[0], *(line.removeprefix("> ") for line in lines[1 : num_more + 1])]
        yield Step(command="\n".join(command), output="\n".join(lines[num_more + 1 :]).strip("\n"))


def differs(shown: str, printed: str) -> str:
    """The first line of a page that a program did not print in this order; empty if there is none.

    `...` stands for any text, every number for any other, and columns may be of any width. A program may print more.
    """
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        pattern = ".*".join(re.escape(_steady(part)) for part in line.split("..."))
        if pattern.strip(".*\\ ") and not any(re.fullmatch(pattern, _steady(found)) for found in lines):
            return line
    return ""


def _steady(line: str) -> str:
    return re.sub(r"\d+", "#", " ".join(line.split()))
