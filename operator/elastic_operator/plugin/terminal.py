"""Drives the terminal: colours, and the screen of `kubectl etj watch`. Both use rich, which is imported here only.

Without rich, output is plain, and `watch` prints one line for each change.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from elastic_operator.plugin.pages.colours import find_spans

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Screen(Protocol):
    """A full screen that shows one frame after another."""

    def show(self, frame: RenderableType) -> None:
        """Replace the frame."""


def has_rich() -> bool:
    """Return whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def uses_colour(choice: str, environment: Mapping[str, str]) -> bool:
    """Return whether to colour stdout.

    Args:
        choice: `--color`: `always`, `never`, or `auto` for a terminal without NO_COLOR (https://no-color.org).
        environment: environment variables.
    """
    if choice == "never" or not has_rich():
        return False
    is_capable = sys.stdout.isatty() and environment.get("TERM") != "dumb" and not environment.get("NO_COLOR")
    return choice == "always" or is_capable


def has_screen(environment: Mapping[str, str]) -> bool:
    """Return whether stdout is a terminal that can show one frame after another."""
    return has_rich() and sys.stdout.isatty() and environment.get("TERM") != "dumb"


def print_coloured(text: str) -> None:
    """Print a formatted text with colours; lines are not wrapped, and nothing in the text is markup."""
    from rich.text import Text

    styled = Text(text, no_wrap=True, overflow="ignore")
    for begin, end, style in find_spans(text):
        styled.stylize(style, begin, end)
    _console(is_terminal=True).print(styled, soft_wrap=True)


@contextlib.contextmanager
def open_screen(*, is_coloured: bool) -> Iterator[Screen]:
    """Open the terminal's alternate screen; at the end, leave the last frame on the normal one."""
    from rich.live import Live

    console = _console(is_terminal=True, is_coloured=is_coloured)
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    last: list[RenderableType] = []

    class LiveScreen:
        def show(self, frame: RenderableType) -> None:
            last[:] = [frame]
            live.update(frame, refresh=True)

    try:
        with live:
            yield LiveScreen()
    finally:
        for frame in last:
            console.print(frame)


def _console(*, is_terminal: bool, is_coloured: bool = True) -> Console:
    from rich.console import Console

    return Console(
        file=sys.stdout,
        force_terminal=is_terminal,
        no_color=not is_coloured,
        markup=False,
        emoji=False,
        highlight=False,
        color_system="standard",
    )
