"""Cancels tasks and handles errors while the process ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

AGAIN_SECONDS = 1.0

logger = logging.getLogger(__name__)


async def cancel_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended.

    The cancellation is repeated every second: a connection that is being opened turns a cancellation into an ordinary
    error, after which the task would try again.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN_SECONDS)


def handle_exception_at_exit(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an exception in a loop that is about to end: log errors of closed watches at debug level.

    kopf cannot always close the generator of an interrupted watch. This has no consequences, and a traceback at every
    other stop would hide real errors.
    """
    if "asyncgen" in context:
        logger.debug("%s", context["message"], exc_info=context.get("exception"))
    else:
        loop.default_exception_handler(context)
