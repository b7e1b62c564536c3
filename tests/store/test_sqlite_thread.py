"""The thread of a SQLite database: in order, one at a time, and what was given up before it began is not done."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tensorcast_connector.store.sqlite_thread import SqliteThread
from tests.waiting import until


@pytest.fixture
def thread() -> Iterator[SqliteThread]:
    """One that the test does not shut down."""
    thread = SqliteThread()
    yield thread
    thread.shutdown()


def nothing() -> None:
    """Follows nothing."""


async def test_results_and_errors_come_back_in_order(thread: SqliteThread) -> None:
    order: list[int] = []
    done: list[str] = []

    def work(number: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        order.append(number)
        if number % 3 == 2:
            raise KeyError(number)
        return number

    def told() -> None:
        assert threading.current_thread() is threading.main_thread()
        done.append("told")

    running = [thread.run(lambda number=number: work(number), told) for number in range(9)]  # type: ignore[misc]
    found = await asyncio.gather(*running, return_exceptions=True)
    assert order == list(range(9)) and [each for each in found if isinstance(each, int)] == [0, 1, 3, 4, 6, 7]
    assert all(isinstance(found[at], KeyError) for at in (2, 5, 8)) and done == ["told"] * 9


async def test_what_is_cancelled_before_it_began_is_not_done_and_what_began_is_told_of(thread: SqliteThread) -> None:
    going, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        going.set()
        go_on.wait(30)
        seen.append("first")

    def told() -> None:
        seen.append("told")

    one = asyncio.create_task(thread.run(first, told))
    other = asyncio.create_task(thread.run(lambda: seen.append("other"), nothing))
    await until(going.is_set)
    one.cancel()
    other.cancel()
    await asyncio.gather(one, other, return_exceptions=True)
    go_on.set()
    await thread.run(lambda: seen.append("last"), nothing)
    assert sorted(seen) == ["first", "last", "told"]


def test_a_loop_that_has_ended_stops_nobody_else(thread: SqliteThread) -> None:
    going, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        going.set()
        go_on.wait(30)

    async def leave() -> None:
        leaving = asyncio.create_task(thread.run(slow, nothing))
        await until(going.is_set)
        leaving.cancel()

    asyncio.run(leave())
    go_on.set()
    assert asyncio.run(thread.run(lambda: 5, nothing)) == 5
