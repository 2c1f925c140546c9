"""The frame of every page: head, style, skip link, header and footer, and the policy that forbids scripts. Pure."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import parse_qs, quote, urlencode

from elastic_operator.observed.observation import Key
from elastic_operator.plugin.pages.report import html_parts
from elastic_operator.plugin.pages.report.html_parts import text
from elastic_operator.plugin.pages.text import format_clock, make_printable

REFRESH_SECONDS = 15
"""A page that is left open is read again this often."""

MAX_CELL = 300
"""Characters of one text of the cluster in a table of the fleet."""

_MAX_PAGE = 1_000_000

STYLE = (
    html_parts.STYLE
    + """
:root{--job:#1d4ed8;--other:#7c8794;--out:#b91c1c;--good:#15803d;--work:#a16207;--bad:#b91c1c;--link:#0b57d0;
--card:#f6f8fa;--focus:#c2410c}
@media(prefers-color-scheme:dark){:root{--job:#60a5fa;--other:#8b949e;--out:#f87171;--good:#4ade80;--work:#facc15;
--bad:#f87171;--link:#8ab4f8;--card:#161b22;--focus:#fdba74}}
body{max-width:80rem}h1{margin:.5em 0}figure{max-width:60rem}a{color:var(--link)}
a:focus-visible{outline:3px solid var(--focus);outline-offset:2px}
.skip{position:absolute;left:-999rem}.skip:focus{position:static;display:inline-block;margin:.3rem 0}
header{display:flex;flex-wrap:wrap;gap:.2rem 1.5rem;align-items:baseline;color:var(--soft);font-size:.9em}
nav{margin:.3em 0}nav a,nav span{display:inline-block;margin-right:1rem;padding:.15rem 0}
.warning{border-left:4px solid var(--bad);padding:.3rem .8rem;background:var(--card)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));gap:.8rem;margin:1rem 0;padding:0}
.cards div{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.6rem .8rem}
.cards dt{color:var(--soft);font-size:.9em}.cards dd{margin:0}.cards .big{font-size:1.6em;line-height:1.2}
.phase::before{content:"";display:inline-block;width:.65em;height:.65em;border-radius:50%;margin-right:.4em;
background:var(--soft)}.good::before{background:var(--good)}.work::before{background:var(--work);border-radius:0}
.bad::before{background:var(--bad);border-radius:0;transform:rotate(45deg)}
th{overflow-wrap:normal}th[scope=row]{font-weight:600;min-width:6rem;overflow-wrap:anywhere}
.wide td:first-child{min-width:6rem}
td ul{list-style:none;margin:0;padding:0}td small{color:var(--soft);display:block}
svg.gpus{width:auto;max-width:100%;height:.9rem;vertical-align:-.1rem;margin-right:.5rem}
.gj{fill:var(--job)}.go{fill:none;stroke:var(--other)}.goi{fill:var(--other)}.gx{fill:none;stroke:var(--out)}
.gf{fill:none;stroke:var(--soft)}.legend{color:var(--soft);font-size:.9em}.legend span{margin-right:1.2rem;
white-space:nowrap}
@media(min-width:64rem){.stack th[scope=row],td[data-label=Phase]{min-width:9rem}
td[data-label=Topology]{min-width:14rem}}
@media(max-width:45rem){.onbar{display:none}}"""
)
"""Kept constant: the policy names its hash."""

_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E%3Cpath fill='%231d4ed8' "
    "d='M0 0h3v3H0zM5 0h3v3H5zM0 5h3v3H0z'/%3E%3C/svg%3E"
)

_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()

POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content-Security-Policy of all pages: no script, no request, no frame, one style and one icon."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Choices of a page's reader.

    Attributes:
        page: page of the table of jobs, from 1.
        nodes: page of the table of nodes, from 1.
        is_refreshing: the page is read again by itself.
    """

    page: int = 1
    nodes: int = 1
    is_refreshing: bool = True

    def link(self, **changes: int | bool) -> str:
        """Return the query of the same page with changes, escaped for an attribute; `?` without any."""
        view = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        query = {
            **({"page": view.page} if view.page > 1 else {}),
            **({"nodes": view.nodes} if view.nodes > 1 else {}),
            **({} if view.is_refreshing else {"refresh": "off"}),
        }
        return text(f"?{urlencode(query)}")

    def job(self, key: Key, root: str = "") -> str:
        """Return the link to a job's page, escaped for an attribute; relative, so that a prefix may be before it.

        Args:
            key: the job.
            root: relative path of the fleet's page.
        """
        query = "" if self.is_refreshing else "?refresh=off"
        return text(f"{root}jobs/{quote(key[0], safe='')}/{quote(key[1], safe='')}{query}")


def read_view(query: str) -> View:
    """Read the query of a URL; whatever is not understood is ignored."""
    try:
        found = parse_qs(query, max_num_fields=8)
    except ValueError:
        return View()
    return View(
        page=_number(found, "page"), nodes=_number(found, "nodes"), is_refreshing=found.get("refresh") != ["off"]
    )


def _number(found: Mapping[str, list[str]], name: str) -> int:
    value = found.get(name, ["1"])[0]
    return min(max(1, int(value)), _MAX_PAGE) if value.isascii() and value.isdigit() and len(value) < 10 else 1


def write_document(
    title: str, body: Iterable[str], *, time: float, view: View, version: str, is_live: bool = True
) -> bytes:
    """Write a page in ASCII.

    Args:
        title: what the page is about, not escaped.
        body: HTML of the main part.
        time: when the snapshot was taken.
        view: what the reader chose.
        version: version of the operator.
        is_live: the watches are open.
    """
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if view.is_refreshing else ""
    if view.is_refreshing:
        link = f'<a href="{view.link(is_refreshing=False)}">Stop refreshing</a>'
        refreshes = f"<span>Refreshes every {REFRESH_SECONDS} s</span> {link}"
    else:
        link = f'<a href="{view.link(is_refreshing=True)}">Refresh every {REFRESH_SECONDS} s</a>'
        refreshes = f"<span>Does not refresh</span> {link}"
    stale = (
        '<p class="warning" role="status">The watches of the API server are interrupted: this may be old.</p>'
        if not is_live
        else ""
    )
    page = "\n".join([
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">{refresh}',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f'<link rel="icon" href="{_ICON}">',
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        '<a class="skip" href="#main">Skip to the content</a>',
        f"<header><span>As of {format_clock(time)}</span> {refreshes}</header>",
        '<main id="main" tabindex="-1">',
        stale,
        *body,
        "</main>",
        f"<footer>elastic-operator {text(version)}, read-only</footer>\n</body>\n</html>\n",
    ])  # fmt: skip
    return page.encode("ascii", "xmlcharrefreplace")


def write_table(caption: str, header: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table whose rows become cards on a narrow screen.

    Args:
        caption: what the table shows, escaped.
        header: names of the columns.
        rows: HTML of the rows.
    """
    head = "".join(f'<th scope="col">{name}</th>' for name in header)
    body = "\n".join(rows)
    columns = f"<thead><tr>{head}</tr></thead>"
    return f'<table class="stack"><caption>{caption}</caption>{columns}\n<tbody>{body}</tbody></table>'


def cell(value: str) -> str:
    """Return a text of the cluster on one line, printable, of at most MAX_CELL characters, and escaped."""
    shown = make_printable(value[: 4 * MAX_CELL])
    return text(shown if len(shown) <= MAX_CELL else f"{shown[:MAX_CELL]}...")
