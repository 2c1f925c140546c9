"""Functions that MkDocs calls while it builds the site; `mkdocs.yml` names this file.

The site is built into a folder for the version of the project, so that several versions stand beside each other. Build
another version from its own checkout into the same folder: `make docs SITE=FOLDER`.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.site.links import DECISIONS, FOLDER, ROOT_PAGES, add_decisions, list_decisions, rewrite_links

ROOT = Path(__file__).parents[2]
_REDIRECT = """\
<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<meta http-equiv="refresh" content="0; url={version}/">
<a href="{version}/">{title} {version}</a>
"""


def on_config(config: Any) -> Any:
    """Take version and address from pyproject.toml, build into the version's own folder, and list the decisions."""
    project = _project()
    config.site_dir = str(Path(config.site_dir) / project["version"])
    config.nav = add_decisions(config.nav, [path.name for path in _decisions()])
    config.repo_url = config.repo_url or project.get("urls", {}).get("Repository")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are in the root of the repository, and the list of the decisions."""
    for name, site_name in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, site_name, content=text))
    pages = [(path.name, path.read_text(encoding="utf-8")) for path in _decisions()]
    files.append(File.generated(config, DECISIONS, content=list_decisions(pages)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of one page."""
    del files
    name = page.file.src_uri
    if name == DECISIONS:
        return markdown
    paths = {site_name: path for path, site_name in ROOT_PAGES.items()}
    repository = f"{config.repo_url.rstrip('/')}/blob/HEAD" if config.repo_url else ""
    return rewrite_links(markdown, paths.get(name, f"{FOLDER}/{name}"), repository)


def on_post_build(config: Any) -> None:
    """Write the list of versions that the site's menu reads, and a first page that leads to the newest."""
    site = Path(config.site_dir).parent
    found = sorted((path.parent.name for path in site.glob("*/sitemap.xml")), key=_version_key, reverse=True)
    entries = [{"version": version, "title": version, "aliases": []} for version in found]
    (site / "versions.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    first = _REDIRECT.format(title=config.site_name, version=found[0])
    (site / "index.html").write_text(first, encoding="utf-8")


def _version_key(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.\-+]", version)]


def _decisions() -> list[Path]:
    return sorted((ROOT / FOLDER / Path(DECISIONS).parent).glob("*.md"))


def _project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found
