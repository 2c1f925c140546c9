"""A bounded number of open files. A checkpoint may have more files than a process may open (commonly 1024)."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_SHARE = 4  # a quarter of the files that the process may open: source, target and everything else need some
_MOST = 4096


def default_limit() -> int:
    """Return the number of files that a source or a target keeps open, computed from this process' limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // _SHARE))


@dataclasses.dataclass(slots=True)
class _Lent(Generic[T]):
    handle: T
    users: int = 0


class Handles(Generic[T]):
    """Opens files by number when they are needed, and closes the least recently used ones.

    Any number of threads may borrow files; a borrowed file stays open.
    """

    def __init__(self, opener: Callable[[int], T], closer: Callable[[T], None], limit: int | None = None) -> None:
        self._opener, self._closer = opener, closer
        self._limit = default_limit() if limit is None else limit
        self._lent: OrderedDict[int, _Lent[T]] = OrderedDict()
        self._closed = False
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._lent)

    @contextlib.contextmanager
    def borrow(self, number: int) -> Iterator[T]:
        """Provide the open file of this number, which stays open until the context is left.

        Raises:
            RuntimeError: `close` was called before.
        """
        with self._lock:  # taken for every read and write; entering the condition instead is many times slower
            if self._closed:
                raise RuntimeError(f"file {number} was borrowed after all files were closed")
            if number not in self._lent:
                self._make_room()
                self._lent[number] = _Lent(self._opener(number))
            lent = self._lent[number]
            self._lent.move_to_end(number)
            lent.users += 1
        try:
            yield lent.handle
        finally:
            self._give_back(lent)

    def _give_back(self, lent: _Lent[T]) -> None:
        with self._lock:
            lent.users -= 1
            if self._closed:
                self._returned.notify_all()

    def close(self) -> None:
        """Wait until all files have been returned, close them, and refuse to open files from now on.

        An interrupt may leave a thread running that the pool does not know, because Python registers a thread only
        after it has started. Such a thread must not open files that are being removed, and must not write to a
        descriptor that belongs to another file by then.
        """
        with self._returned:
            self._closed = True
            self._returned.wait_for(lambda: not any(lent.users for lent in self._lent.values()))
            while self._lent:
                self._closer(self._lent.popitem()[1].handle)

    def _make_room(self) -> None:
        idle = [number for number, lent in self._lent.items() if not lent.users] if len(self) >= self._limit else []
        for number in idle[: len(self) - self._limit + 1]:
            self._closer(self._lent.pop(number).handle)
