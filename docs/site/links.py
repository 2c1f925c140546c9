"""Targets of links on the documentation site. Pure: paths in, text out.

A page links to files of the repository, as readers of the repository need it. On the site, a link to another page
becomes a link to that page of the site. A link to any other file of the repository becomes a link to the repository's
address; without an address it becomes text that names the file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from typing import Any

ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
"""Pages in the root of the repository, and their names on the site."""

FOLDER = "docs"
DECISIONS = "adr/index.md"
"""Page of the site that lists the decisions; the repository has a folder in its place."""

_CODE_OR_LINK = re.compile(
    r"(?P<code>^ *```.*?^ *```$|`[^`\n]+`|<!--.*?-->)"
    r"|(?P<picture>!?)\[(?P<label>(?:[^\]\[]|!?\[[^\]]*\](?:\([^)\s]+\))?)*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
_EXTERNAL = re.compile(r"[a-z]+:|#")


def name_on_site(path: str) -> str:
    """Return the name that a file of the repository has on the site; empty if it is not on the site.

    Args:
        path: relative to the root of the repository, with `/`.

    >>> name_on_site("docs/install.md"), name_on_site("README.md"), name_on_site("docs/adr"), name_on_site("Makefile")
    ('install.md', 'index.md', 'adr/index.md', '')
    """
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path == posixpath.dirname(f"{FOLDER}/{DECISIONS}"):
        return DECISIONS
    is_page = path.startswith(f"{FOLDER}/") and path.endswith((".md", ".png", ".svg"))
    return path.removeprefix(f"{FOLDER}/") if is_page else ""


def rewrite_links(text: str, page: str, repository: str = "") -> str:
    """Return the Markdown text of a page with links that are right on the site; code stays as it is.

    Args:
        text: of the page.
        page: its path, relative to the root of the repository.
        repository: address below which the files of the repository can be read; empty if there is none.
    """

    def replace(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        label = rewrite_links(found["label"], page, repository)
        target = _target_on_site(found["target"], page, repository)
        if target:
            return f"{found['picture']}[{label}]({target})"
        path = _resolve(found["target"], page)
        return label if path.endswith(label.strip("`")) else f"{label} (`{path}`)"

    return _CODE_OR_LINK.sub(replace, text)


def _resolve(target: str, page: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))


def _target_on_site(target: str, page: str, repository: str) -> str:
    if _EXTERNAL.match(target):
        return target
    path, anchor = _resolve(target, page), target.partition("#")[2]
    suffix = f"#{anchor}" if anchor else ""
    if name := name_on_site(path):
        return posixpath.relpath(name, posixpath.dirname(name_on_site(page)) or ".") + suffix
    return f"{repository.rstrip('/')}/{path}{suffix}" if repository else ""


def add_decisions(navigation: list[Any], names: Iterable[str]) -> list[Any]:
    """Return the navigation with the decisions below the page that lists them.

    Args:
        navigation: `nav` of mkdocs.yml.
        names: file names of the decisions, in order.
    """
    pages = [posixpath.join(posixpath.dirname(DECISIONS), name) for name in names]

    def extend(entry: Any) -> Any:
        if isinstance(entry, list):
            return [DECISIONS, *pages] if entry == [DECISIONS] else [extend(item) for item in entry]
        return {title: extend(item) for title, item in entry.items()} if isinstance(entry, dict) else entry

    return [extend(entry) for entry in navigation]


def list_decisions(pages: Iterable[tuple[str, str]]) -> str:
    """Return the page that lists the decisions.

    Args:
        pages: file name and text of each, in order.
    """
    entries = [f"- [{re.sub(r'^# +', '', text.splitlines()[0])}]({name})" for name, text in pages]
    head = "# Decisions\n\nWhy things are as they are, in the order of the decisions.\n\n"
    return head + "\n".join(entries) + "\n"
