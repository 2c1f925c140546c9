"""The status page in a real browser: light and dark, narrow and wide, by keyboard, with a hostile tenant.

`ETJ_SCREENSHOTS=FOLDER` keeps the screenshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elastic_operator.web import server
from elastic_operator.web.pages.snapshot import Snapshot
from elastic_operator.web.site import Site
from tests.chromium import Tab, find_chromium, open_tab
from tests.unit.elastic_operator.web.fleet_data import quiet_fleet, small_fleet
from tests.unit.elastic_operator.web.test_pages import hostile

BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}
WIDTHS = (360, 1440)
PNG = b"\x89PNG\r\n\x1a\n"


@contextlib.asynccontextmanager
async def serve(snapshot: Snapshot) -> AsyncIterator[str]:
    """The URL of a site that shows a snapshot."""
    site = Site(lambda: "")
    site.take_snapshot = lambda: snapshot
    listening = await server.serve(0, site.respond)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
    finally:
        listening.close()
        site.close()


async def look(tab: Tab, url: str, name: str, folder: Path) -> None:
    """Open a page in both schemes and widths; nothing may be wrong, and nothing may be wider than the screen."""
    for scheme, background in BACKGROUNDS.items():
        for width in WIDTHS:
            await tab.open(url, width=width, scheme=scheme)
            assert tab.errors == []
            assert tab.requests == [url], "the page needs nothing else"
            assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") == background
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            assert await tab.evaluate("document.querySelectorAll('script').length") == 0
            picture = await tab.take_screenshot()
            assert picture.startswith(PNG)
            assert len(picture) > 20_000, "something is drawn"
            (folder / f"{name}-{scheme}-{width}.png").write_bytes(picture)


async def tab_through(tab: Tab) -> list[str]:
    """Press the Tab key until the focus leaves the page; return the links that had the focus, each visible."""
    found: list[str] = []
    for _ in range(60):
        await tab.press("Tab", 9)
        link = await tab.evaluate("document.activeElement.getAttribute('href')")
        if link is None:
            break
        assert await tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        box = "document.activeElement.getBoundingClientRect()"
        assert await tab.evaluate(f"{box}.left >= 0 && {box}.width > 0 && {box}.top < innerHeight && {box}.bottom > 0")
        found.append(link)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = Path(os.environ.get("ETJ_SCREENSHOTS") or tmp_path)
    found.mkdir(parents=True, exist_ok=True)
    return found


def test_both_pages_in_a_browser(folder: Path) -> None:
    find_chromium()

    async def run() -> None:
        async with open_tab() as tab:
            async with serve(small_fleet()) as url:
                await look(tab, url, "fleet", folder)
                await look(tab, f"{url}jobs/demo/gpt?refresh=off", "job-recovering", folder)
                await tab.open(url, width=1440, scheme="light")
                links = await tab_through(tab)
                assert links[:3] == ["#main", "?refresh=off", "jobs/nlp/moe"]
                assert links.count("jobs/demo/gpt") == 3, "in the table of jobs, and where its pods run"
                await tab.open(url, width=1440, scheme="light")
                for _ in range(3):
                    await tab.press("Tab", 9)
                await tab.wait_for("Page.loadEventFired", lambda: tab.press("Enter", 13))
                assert await tab.evaluate("location.pathname") == "/jobs/nlp/moe"
                assert "../../?" in await tab_through(tab)
            async with serve(quiet_fleet()) as url:
                await look(tab, f"{url}jobs/demo/gpt", "job", folder)
            async with serve(hostile()) as url:
                for page in (url, f"{url}jobs/demo/gpt"):
                    await tab.open(page, width=360, scheme="dark")
                    assert (tab.errors, tab.requests) == ([], [page])
                    assert await tab.evaluate("document.title") in ("Elastic training jobs", "demo/gpt")
                    assert await tab.evaluate("document.querySelectorAll('script, img, iframe').length") == 0
                    assert await tab.evaluate("document.documentElement.scrollWidth") <= 360

    asyncio.run(run())
