"""A headless Chromium for tests, spoken to by the DevTools protocol. Nothing is installed; without one, tests skip."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_START_SECONDS = 60.0
_ANSWER_SECONDS = 60.0
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--hide-scrollbars", "--force-device-scale-factor=1", "--remote-debugging-port=0", "--no-proxy-server",
)  # fmt: skip


def find_chromium() -> str:
    """Return the path of the browser; skip the test on a machine without one."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine: `apt-get install chromium` (Debian), or put one into the PATH")


class Tab:
    """One tab of the browser.

    Attributes:
        errors: messages of the console of level error or warning, and exceptions, since the last `open`.
        requests: URLs that the tab has requested since then.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last_id = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._waits: list[tuple[str, asyncio.Future[None]]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def read(self) -> None:
        """Read what the browser says until the connection ends."""
        async for message in self._socket:
            said = message.json()
            if (answer := self._answers.pop(said.get("id", 0), None)) is not None:
                answer.set_result(said)
            elif "method" in said:
                self._note(said["method"], said.get("params") or {})

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith("data:"):
                self.requests.append(params["request"]["url"])
        for name, wait in self._waits:
            if name == method and not wait.done():
                wait.set_result(None)
        self._waits = [item for item in self._waits if not item[1].done()]

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; return its result."""
        self._last_id += 1
        answer = self._answers[self._last_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._last_id, "method": method, "params": params})
        said = await asyncio.wait_for(answer, _ANSWER_SECONDS)
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    async def wait_for(self, method: str, act: Callable[[], Any]) -> None:
        """Do something, and wait for an event of the protocol that follows."""
        wait = asyncio.get_running_loop().create_future()
        self._waits.append((method, wait))
        await act()
        await asyncio.wait_for(wait, _ANSWER_SECONDS)

    async def open(self, url: str, *, width: int, scheme: str) -> None:
        """Open a page on a screen of a width, in the colour scheme `light` or `dark`."""
        self.errors.clear()
        self.requests.clear()
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.wait_for("Page.loadEventFired", lambda: self.call("Page.navigate", url=url))

    async def press(self, key: str, code: int) -> None:
        """Press and release a key, such as `Tab`."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; the page's own policy does not apply to it."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def take_screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(found["data"])


@contextlib.asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    """Start a browser with an empty profile, and stop it at the end."""
    program = find_chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, env={**os.environ, "HOME": profile},
        )  # fmt: skip
        try:
            port = await asyncio.wait_for(_read_port(Path(profile) / "DevToolsActivePort"), _START_SECONDS)
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = await answer.json(content_type=None)
                url = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    reading = asyncio.create_task(tab.read())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await tab.call(f"{domain}.enable")
                    yield tab
                    await socket.close()
                    await reading
        finally:
            process.terminate()
            await process.wait()


async def _read_port(path: Path) -> int:
    """Wait for the file in which the browser says where it listens."""
    while True:
        if path.exists() and (lines := path.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.05)
