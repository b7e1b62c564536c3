"""One batch lookup of page locations: which homes to ask for which keys, one redirect, and the answers put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorcast_connector.core.homes import Homes
from tensorcast_connector.core.placement import shard_of, shard_of_byte
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.codec import unpack_indexes
from tensorcast_connector.wire.keys import by_length, pack
from tensorcast_connector.wire.messages import FindKeys, PagesFound


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to one home."""

    home: WorkerId
    positions: Sequence[int]  # in the keys of the lookup
    message: FindKeys
    redirected: bool = False


class Lookup:
    """The holders of `keys`. A home that does not answer makes its keys a miss.

    Args:
        homes: whom to ask; learns from redirects.
    """

    def __init__(self, keys: Sequence[bytes], homes: Homes) -> None:
        self._keys = keys
        self._homes = homes
        self._one_length = len(set(map(len, keys))) <= 1
        self.holders: list[Sequence[str]] = [()] * len(keys)

    def first(self) -> list[Ask]:
        """Whom to ask."""
        return self._asks(range(len(self._keys)), redirected=False)

    def _asks(self, positions: Sequence[int], redirected: bool) -> list[Ask]:
        keys, home_of = self._keys, self._homes.by_byte
        groups: dict[WorkerId | None, list[int]] = {home: [] for home in dict.fromkeys(home_of)}
        if len(groups) == 1:
            groups = {home_of[0]: list(positions)}
        else:
            for at in positions:
                groups[home_of[keys[at][-1]]].append(at)
        return [
            Ask(home, part, self._message(part), redirected)
            for home, places in groups.items()
            if home is not None
            for part in self._of_one_length(places)
        ]

    def _of_one_length(self, positions: list[int]) -> list[list[int]]:
        if self._one_length:
            return [positions] if positions else []
        return [[positions[at] for at in part] for part in by_length([self._keys[at] for at in positions])]

    def _message(self, positions: Sequence[int]) -> FindKeys:
        keys = pack(self._keys if len(positions) == len(self._keys) else [self._keys[at] for at in positions])
        count = self._homes.shards
        shards = {shard_of_byte(byte, count) for byte in keys.last_bytes()}
        return FindKeys(list(shards), keys.key_bytes, keys.packed)

    def answered(self, ask: Ask, reply: PagesFound) -> list[Ask]:
        """One home's answer; whom to ask instead, if shards have moved and it was not redirected already.

        Raises:
            ProtocolError: it does not fit the question; its keys are a miss.
        """
        holders = reply.holders
        try:
            found = [holders[index] for index in unpack_indexes(reply.which)]
        except (ValueError, IndexError) as error:
            raise ProtocolError(f"{ask.home} answers a lookup of pages with nonsense: {error}") from None
        if len(found) != len(ask.positions):
            raise ProtocolError(f"{ask.home} answers for {len(found)} keys, and was asked for {len(ask.positions)}")
        if len(found) == len(self._keys):
            self.holders = found  # type: ignore[assignment]  # a list of lists is a list of sequences
        else:
            for at, who in zip(ask.positions, found, strict=True):
                self.holders[at] = who
        self._homes.observe_all(reply.moved)
        if not reply.moved or ask.redirected:
            return []
        moved = {shard for shard, *_ in reply.moved if self._homes.home(shard) != ask.home}
        again = [at for at in ask.positions if shard_of(self._keys[at], self._homes.shards) in moved]
        return [each for each in self._asks(again, redirected=True) if each.home != ask.home]
