"""Page keys in a message: of one length, one behind the other in one piece of bytes, which is read without looking at each."""

from collections.abc import Iterator, Sequence
from typing import overload

from tensorcast_connector.errors import ProtocolError


class Keys(Sequence[bytes]):
    """Packed keys as a sequence, for whoever wants each of them; otherwise nothing is unpacked.

    Args:
        packed: the keys.
        key_bytes: the length of each. Without keys it does not matter.

    Raises:
        ProtocolError: these are not whole keys.
    """

    __slots__ = ("_count", "key_bytes", "packed")

    def __init__(self, packed: bytes, key_bytes: int) -> None:
        if packed and (key_bytes <= 0 or len(packed) % key_bytes):
            raise ProtocolError(f"{len(packed)} bytes are no whole number of page keys of {key_bytes} bytes")
        self.packed = packed
        self.key_bytes = key_bytes
        self._count = len(packed) // key_bytes if packed else 0

    def __repr__(self) -> str:
        return f"<{self._count} keys of {self.key_bytes} bytes>"

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(self._count))]
        if not -self._count <= at < self._count:
            raise IndexError(at)
        first = at % self._count * self.key_bytes
        return self.packed[first : first + self.key_bytes]

    def __iter__(self) -> Iterator[bytes]:
        packed, size = self.packed, self.key_bytes
        return (packed[at : at + size] for at in range(0, len(packed), size or 1))

    def last_bytes(self) -> set[int]:
        """What the keys end with: their shards come from it."""
        return set(self.packed[self.key_bytes - 1 :: self.key_bytes]) if self.packed else set()


def pack(keys: Sequence[bytes]) -> Keys:
    """Keys of one length, which is for the caller to see to: only their sum is looked at here.

    Raises:
        ProtocolError: by it they are not.
    """
    packed = b"".join(keys)
    packed_keys = Keys(packed, len(keys[0]) if keys else 0)
    if len(packed_keys) != len(keys):
        raise ProtocolError("page keys of different lengths in one message")
    return packed_keys


def by_length(keys: Sequence[bytes]) -> list[list[int]]:
    """The places of the keys of each length."""
    places: dict[int, list[int]] = {}
    for at, key in enumerate(keys):
        places.setdefault(len(key), []).append(at)
    return list(places.values())
