"""A task that turns its cancellation into an error and goes on is ended all the same."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from elastic_operator import ending


@pytest.mark.parametrize("num_swallowed", [0, 1, 3])
def test_a_swallowed_cancellation_is_repeated(num_swallowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN_SECONDS", 0.01)

    async def stubborn() -> None:
        for _ in range(num_swallowed):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        await asyncio.sleep(3600)

    async def run() -> bool:
        tasks = [asyncio.create_task(stubborn()) for _ in range(3)]
        await asyncio.sleep(0)
        await ending.end(tasks)
        return all(task.cancelled() for task in tasks)

    assert asyncio.run(asyncio.wait_for(run(), timeout=20))


def test_a_task_that_fails_on_the_way_out_hinders_nobody() -> None:
    async def failing() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise OSError("on the way out")

    async def run() -> None:
        task = asyncio.create_task(failing())
        await asyncio.sleep(0)
        await ending.end([task])
        assert isinstance(task.exception(), OSError)

    asyncio.run(run())
