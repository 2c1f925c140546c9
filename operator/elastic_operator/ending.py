"""How tasks are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

AGAIN_SECONDS = 1.0


async def end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they are over.

    One cancellation may not be enough: a connection that is just being made turns it into an error like any other, and
    who made it tries again.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN_SECONDS)
