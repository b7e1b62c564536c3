"""Work on a thread outlives nobody who waits for it."""

import asyncio
import threading
from pathlib import Path

import pytest

from tensorcast_connector.client import session as sessions
from tensorcast_connector.client.image import FileImage
from tensorcast_connector.client.threads import in_thread
from tests.client.checkpoints import random_file


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_the_result_or_the_error() -> None:
    assert await in_thread(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_waits_until_the_thread_has_ended(fails: bool) -> None:
    begun, go_on, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    dropped: list[str] = []

    def work() -> str:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(30)
        ended.set()
        if fails:
            raise ValueError
        return "late"

    stopped = threading.Event()
    waiting = asyncio.create_task(in_thread(work, stop=stopped.set, drop=dropped.append))
    await begun.wait()
    for _ in range(2):  # also who is cancelled twice
        waiting.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert stopped.is_set() and not waiting.done() and not ended.is_set()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set() and dropped == ([] if fails else ["late"])


async def test_files_that_are_opened_for_nobody_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_file(tmp_path / "x.safetensors", {"a": 100})
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Slow(FileImage):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            loop.call_soon_threadsafe(begun.set)
            go_on.wait(30)

    monkeypatch.setattr(sessions, "FileImage", Slow)
    before = open_files()
    session = sessions.Session.__new__(sessions.Session)  # nothing of it is used before the files are open
    putting = asyncio.create_task(session.put(tmp_path / "x.safetensors"))
    await begun.wait()
    putting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert open_files() == before
