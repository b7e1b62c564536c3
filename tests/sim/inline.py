"""Coroutines that never wait, run without an event loop."""

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def inline(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not suspend; its exceptions are raised here."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    coroutine.close()
    raise AssertionError(f"{coroutine!r} waits for something")
