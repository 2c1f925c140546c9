"""How tasks and the program are ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

AGAIN_SECONDS = 1.0

logger = logging.getLogger(__name__)


async def end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they are over.

    One cancellation may not be enough: a connection that is just being made turns it into an error like any other, and
    who made it tries again.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN_SECONDS)


def heed_at_the_end(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of a loop that is about to end.

    A watch that is cut in the middle cannot always be closed in order (in kopf a generator of aiohttp's answer does not
    stop then). Nothing is left undone by it, and an error with a traceback at every other stop hides real ones.
    """
    if "asyncgen" in context:
        logger.debug("%s", context["message"], exc_info=context.get("exception"))
    else:
        loop.default_exception_handler(context)
