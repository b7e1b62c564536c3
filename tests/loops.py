"""Fixture for every test with an event loop: no task outlives it, and no error went unnoticed."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
async def quiet_loop() -> AsyncIterator[None]:
    """What asyncio would only log, such as "Task exception was never retrieved", fails the test."""
    loop = asyncio.get_running_loop()
    problems: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    before = asyncio.all_tasks()
    yield
    for _ in range(5):  # connections that were closed end within a few turns
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"
    gc.collect(1)
    await asyncio.sleep(0)
    assert not problems, problems
