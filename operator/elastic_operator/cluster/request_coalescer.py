"""Coalesces concurrent reads of single jobs into one list of all jobs: requests cost more than long answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from elastic_operator.observed.observation import Key

FEW = 8
"""Maximum number of concurrent reads that are sent one by one; the answer for one job arrives sooner than a list."""

GATHER_SECONDS = 0.01
"""Time that a read waits for others to join. Tasks that were woken together call within a few milliseconds."""

_T = TypeVar("_T")


class RequestCoalescer(Generic[_T]):
    """Coalesces reads of one kind. A request starts only after `get` was called, so no result is older than the call.

    Args:
        one: reads the objects of one job.
        everything: reads the objects of all jobs; jobs without objects may be missing.
        nothing: returns the result for a job without objects.
    """

    def __init__(
        self,
        one: Callable[[Key], Awaitable[_T]],
        everything: Callable[[], Awaitable[Mapping[Key, _T]]],
        nothing: Callable[[], _T],
    ) -> None:
        self._one = one
        self._everything = everything
        self._nothing = nothing
        self._waiting: dict[Key, asyncio.Future[_T]] = {}
        self._gathering: asyncio.Task[None] | None = None
        self._busy: set[asyncio.Task[None]] = set()
        self._list: asyncio.Task[None] | None = None

    async def get(self, key: Key) -> _T:
        """Read the objects of one job; raises what the request raised, in all calls that share it."""
        if key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().create_future()
            if self._gathering is None:
                self._gathering = asyncio.create_task(self._gather())
        # Shielded: a cancelled caller must not cancel the request of the others that share it.
        return await asyncio.shield(self._waiting[key])

    async def _gather(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        while len(self._waiting) > FEW and self._list is not None and not self._list.done():
            await asyncio.wait((self._list,))  # concurrent lists would be slower, and more callers join meanwhile
        waiting, self._waiting, self._gathering = self._waiting, {}, None
        if len(waiting) > FEW:
            self._list = self._start(self._answer_all(waiting))
        else:
            for key, future in waiting.items():
                self._start(self._answer(key, future))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)
        return task

    async def _answer(self, key: Key, future: asyncio.Future[_T]) -> None:
        try:
            result = await self._one(key)
        except Exception as error:
            _fail(future, error)
        else:
            _resolve(future, result)

    async def _answer_all(self, waiting: Mapping[Key, asyncio.Future[_T]]) -> None:
        try:
            results = await self._everything()
        except Exception as error:
            for future in waiting.values():
                _fail(future, error)
        else:
            for key, future in waiting.items():
                _resolve(future, results[key] if key in results else self._nothing())


def _resolve(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # a cancelled caller never reads it; without this asyncio would log an error
