"""Many looks at single jobs, wanted at the same time, become one look at all: requests cost more than long answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from elastic_operator.observed.observation import Key

FEW = 8
"""So many looks are made one by one: a single job's objects come sooner than everybody's."""

GATHER_SECONDS = 0.01
"""How long a look waits for others. Tasks that were woken together ask within a few milliseconds."""

_T = TypeVar("_T")


class RequestCoalescer(Generic[_T]):
    """One kind of look. Every look begins after it was asked for, alone or with others: it is never older than that.

    Args:
        one: look at the objects of one job.
        everything: look at those of all jobs; jobs without any may be missing.
        nothing: what a job without any has.
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
        """Look at one job.

        Raises:
            whatever the look raises; all that were answered by the same look see it.
        """
        if key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().create_future()
            if self._gathering is None:
                self._gathering = asyncio.create_task(self._gather())
        # Shielded: one that gives up must not take the look away from another that shares it.
        return await asyncio.shield(self._waiting[key])

    async def _gather(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        while len(self._waiting) > FEW and self._list is not None and not self._list.done():
            await asyncio.wait((self._list,))  # one list at a time: more would only be slower, and more come meanwhile
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
            found = await self._one(key)
        except Exception as error:
            _fail(future, error)
        else:
            _resolve(future, found)

    async def _answer_all(self, waiting: Mapping[Key, asyncio.Future[_T]]) -> None:
        try:
            found = await self._everything()
        except Exception as error:
            for future in waiting.values():
                _fail(future, error)
        else:
            for key, future in waiting.items():
                _resolve(future, found[key] if key in found else self._nothing())


def _resolve(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever asked may be gone: then nobody looks at it, and that is all right
