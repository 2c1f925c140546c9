"""Never more open files than allowed, and none closed while somebody uses it."""

import random
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard.system.file_handles import Handles, default_limit


class Files:
    """Opener that counts open files."""

    def __init__(self):
        self.open: set[int] = set()
        self.opened: list[int] = []
        self.closed: list[int] = []

    def opener(self, number: int) -> int:
        assert number not in self.open
        self.open.add(number)
        self.opened.append(number)
        return number

    def closer(self, number: int) -> None:
        self.open.remove(number)
        self.closed.append(number)


def test_those_not_used_for_longest_are_closed():
    files = Files()
    handles = Handles(files.opener, files.closer, limit=2)
    for number in (1, 2, 1, 3, 1, 2):
        with handles.borrow(number) as found:
            assert found == number
            assert len(handles) <= 2
    assert files.opened == [1, 2, 3, 2]
    assert files.closed == [2, 3]
    handles.close()
    assert not files.open


def test_what_is_borrowed_stays_open():
    files = Files()
    handles = Handles(files.opener, files.closer, limit=1)
    with handles.borrow(1), handles.borrow(2), handles.borrow(1):
        assert files.open == {1, 2}
    with handles.borrow(3):
        assert files.open == {3}


def test_what_cannot_be_opened_leaves_nothing_behind():
    def opener(_number: int) -> int:
        raise OSError("gone")

    handles = Handles(opener, lambda _: None, limit=1)
    with pytest.raises(OSError, match="gone"), handles.borrow(1):
        pass
    assert len(handles) == 0


def test_many_threads_share_few_files():
    files, errors = Files(), []
    handles = Handles(files.opener, files.closer, limit=4)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(300):
            number = chance.randrange(12)
            with handles.borrow(number) as found:
                time.sleep(0)
                if found not in files.open:
                    errors.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    with handles.borrow(0):
        assert len(handles) <= 8 + 1
    handles.close()
    assert not files.open
    assert sorted(files.opened) == sorted(files.closed)


def test_the_limit_follows_that_of_the_process():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert default_limit() == max(1, min(4096, soft // 4))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert default_limit() == 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_waits_for_what_is_lent_and_lends_nothing_more() -> None:
    closed: list[int] = []
    handles: Handles[int] = Handles(lambda number: number, closed.append)
    borrowed, returned = threading.Event(), threading.Event()

    def borrow() -> None:
        with handles.borrow(7):
            borrowed.set()
            returned.wait(20)
            assert closed == []

    def close() -> None:
        handles.close()
        assert returned.is_set()

    with ThreadPoolExecutor(2) as pool:
        lent = pool.submit(borrow)
        assert borrowed.wait(20)
        ending = pool.submit(close)
        with pytest.raises(RuntimeError, match="after all files were closed"):
            while True:  # until closing has begun
                with handles.borrow(1):
                    pass
        assert not ending.done()
        returned.set()
        lent.result(20)
        ending.result(20)
    assert closed == [7]
    with pytest.raises(RuntimeError, match="after all files were closed"), handles.borrow(1):
        pass
