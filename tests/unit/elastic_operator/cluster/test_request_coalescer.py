"""Looks that are wanted together are made together, and are never older than the wish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from elastic_operator.cluster.request_coalescer import FEW, GATHER_SECONDS, RequestCoalescer
from elastic_operator.observed.observation import Key


class World:
    """Counts looks; job `ns/7` has the value 7 plus what has changed since."""

    def __init__(self) -> None:
        self.singles = 0
        self.lists = 0
        self.change = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def until(self, is_met: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_met():
                await asyncio.sleep(0.001)

    async def one(self, key: Key) -> int:
        self.singles += 1
        found = int(key[1]) + self.change
        await self.gate.wait()
        if self.error:
            raise self.error
        return found

    async def everything(self) -> Mapping[Key, int]:
        self.lists += 1
        found = {("ns", str(number)): number + self.change for number in range(100)}
        await self.gate.wait()
        if self.error:
            raise self.error
        return found


def batch(world: World) -> RequestCoalescer[int]:
    return RequestCoalescer(world.one, world.everything, lambda: -1)


@pytest.mark.parametrize(("count", "singles", "lists"), [(1, 1, 0), (FEW, FEW, 0), (FEW + 1, 0, 1), (100, 0, 1)])
def test_few_look_alone_and_many_together(count: int, singles: int, lists: int) -> None:
    world = World()

    async def run() -> list[int]:
        looks = batch(world)
        return await asyncio.gather(*(looks.get(("ns", str(number))) for number in range(count)))

    assert asyncio.run(run()) == list(range(count))
    assert (world.singles, world.lists) == (singles, lists)


def test_a_job_that_the_list_does_not_hold_has_nothing() -> None:
    world = World()

    async def run() -> list[int]:
        looks = batch(world)
        return await asyncio.gather(*(looks.get(("other", str(number))) for number in range(FEW + 1)))

    assert set(asyncio.run(run())) == {-1}


@pytest.mark.parametrize("count", [1, 50])
def test_a_look_is_never_older_than_the_wish(count: int) -> None:
    """Asked while an earlier look is under way, the answer must show what happened in between."""
    world = World()

    async def run() -> list[int]:
        looks = batch(world)
        world.gate.clear()
        first = asyncio.gather(*(looks.get(("ns", str(number))) for number in range(count)))
        await world.until(lambda: world.singles + world.lists > 0)
        world.change = 1000
        second = asyncio.gather(*(looks.get(("ns", str(number))) for number in range(count)))
        await asyncio.sleep(0)
        world.gate.set()
        await first
        return await second

    assert asyncio.run(run()) == [1000 + number for number in range(count)]


def test_one_list_is_made_at_a_time_and_the_next_answers_all_that_came_meanwhile() -> None:
    world = World()
    world.gate.clear()

    async def run() -> None:
        looks = batch(world)
        waves = [asyncio.gather(*(looks.get(("ns", str(number))) for number in range(50)))]
        await world.until(lambda: world.lists == 1)
        waves += [asyncio.gather(*(looks.get(("ns", str(number))) for number in range(50))) for _ in range(4)]
        await asyncio.sleep(3 * GATHER_SECONDS)
        assert world.lists == 1, "the second list waits for the first"
        world.gate.set()
        await asyncio.gather(*waves)

    asyncio.run(run())
    assert world.lists == 2


@pytest.mark.parametrize("count", [2, 50])
def test_an_error_reaches_everybody_and_the_next_look_works(count: int) -> None:
    world = World()

    async def run() -> tuple[list[object], int]:
        looks = batch(world)
        world.error = OSError("away")
        failed = await asyncio.gather(*(looks.get(("ns", str(n))) for n in range(count)), return_exceptions=True)
        world.error = None
        return failed, await looks.get(("ns", "5"))

    failed, found = asyncio.run(run())
    assert [str(item) for item in failed] == ["away"] * count
    assert found == 5


def test_one_that_gives_up_takes_nothing_from_the_others() -> None:
    world = World()

    async def run() -> list[int]:
        looks = batch(world)
        tasks = [asyncio.create_task(looks.get(("ns", "3"))) for _ in range(3)]
        await asyncio.sleep(0.005)
        tasks[0].cancel()
        return await asyncio.gather(*tasks[1:])

    assert asyncio.run(run()) == [3, 3]
    assert world.singles == 1
