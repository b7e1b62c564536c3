"""Things in the order of their last use, linked to each other: a million of them need no table beside them, which would have to
be copied when it is full, and nothing that Python's collector of cycles would have to look through."""

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar


class Linked(Protocol):
    """What can be in an order, in one at a time. Both are None while it is in none, and belong to the order else."""

    older: Any
    newer: Any


Item = TypeVar("Item", bound=Linked)


class _Ends:
    """Newer than the newest and older than the oldest."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older: Any = self
        self.newer: Any = self


class UseOrder(Generic[Item]):
    """See the module."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends = _Ends()

    def __repr__(self) -> str:
        return f"<UseOrder of {sum(1 for _ in self.newest_first())}>"

    def __contains__(self, each: Item) -> bool:
        return each.newer is not None

    @property
    def oldest(self) -> Item | None:
        """None: there is nothing."""
        found: Item = self._ends.newer
        return None if found is self._ends else found

    def touch(self, each: Item) -> None:
        """It is the newest now, and in here if it was not."""
        ends = self._ends
        if each.newer is not None:
            each.older.newer, each.newer.older = each.newer, each.older
        newest = ends.older
        each.older, each.newer = newest, ends
        newest.newer = ends.older = each

    def drop(self, each: Item) -> None:
        """It is in here no more."""
        each.older.newer, each.newer.older = each.newer, each.older
        each.older = each.newer = None

    def newest_first(self) -> Iterator[Item]:
        """All of them. Nothing may change meanwhile."""
        each = self._ends.older
        while each is not self._ends:
            yield each
            each = each.older
