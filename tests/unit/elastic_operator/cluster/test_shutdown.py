"""How tasks are ended that turn their cancellation into an error, and what is said of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from elastic_operator.cluster import shutdown


@pytest.mark.parametrize("num_swallowed", [0, 1, 3])
def test_a_swallowed_cancellation_is_repeated(num_swallowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "AGAIN_SECONDS", 0.01)

    async def stubborn() -> None:
        for _ in range(num_swallowed):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        await asyncio.sleep(3600)

    async def run() -> bool:
        tasks = [asyncio.create_task(stubborn()) for _ in range(3)]
        await asyncio.sleep(0)
        await shutdown.cancel_tasks(tasks)
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
        await shutdown.cancel_tasks([task])
        assert isinstance(task.exception(), OSError)

    asyncio.run(run())


def test_a_generator_that_cannot_be_closed_is_no_error_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def stubborn() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            raise RuntimeError("generator didn't stop after athrow()")

    async def run() -> list[AsyncIterator[int]]:
        generator = stubborn()
        await anext(generator)
        asyncio.get_running_loop().set_exception_handler(shutdown.handle_exception_at_exit)
        return [generator]  # alive until the loop ends it

    caplog.set_level(logging.DEBUG)
    kept = asyncio.run(run())
    assert kept
    found = [record for record in caplog.records if "asynchronous generator" in record.getMessage()]
    assert [record.levelno for record in found] == [logging.DEBUG]


def test_any_other_failure_at_the_end_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(shutdown.handle_exception_at_exit)
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [record.levelno for record in caplog.records if record.name == "asyncio"] == [logging.ERROR]
