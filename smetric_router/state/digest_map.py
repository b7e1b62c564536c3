"""A table from digests to values that may have millions of entries, without a moment in which everything waits for it.

One dictionary of that size is copied as a whole when it is full, up to a quarter of a second in which a router does nothing
else. Here it is many small ones, each copied at a time of its own, within a millisecond.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")

PARTS = 256
LOW = PARTS - 1
"""The bits of a digest that choose its part."""


class DigestMap(Generic[Value]):
    """See the module. `parts[digest & LOW]` is the dictionary in which a digest is; to be read by others only."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[dict[int, Value]] = [{} for _ in range(PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __repr__(self) -> str:
        return f"<DigestMap of {len(self)}>"

    def get(self, digest: int) -> Value | None:
        """The value; None: there is none."""
        return self.parts[digest & LOW].get(digest)

    def put(self, digests: Iterable[int], value: Value) -> None:
        """All of them have this value from now on."""
        parts = self.parts
        for digest in digests:
            parts[digest & LOW][digest] = value

    def drop(self, digests: Iterable[int]) -> None:
        """They have none any more. Raises KeyError for one that has none."""
        parts = self.parts
        for digest in digests:
            del parts[digest & LOW][digest]

    def values(self) -> list[Value]:
        """Of all digests."""
        return [value for part in self.parts for value in part.values()]
