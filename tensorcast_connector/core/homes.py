"""Which worker is the home of each shard, as far as this process has seen: routing and fence in one.

What was learnt under a higher token always wins, whichever way it came: the store's watch, a new home that asks for
inventories, a former home that redirects. Nothing is accepted any more under a lower one. A home whose lease has ended
stays listed until somebody has a higher token: it can still be asked, and does not answer if it is dead.
"""

from collections.abc import Iterable

from tensorcast_connector.core.placement import BYTE_VALUES, shard_of
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.messages import ShardAt


class Homes:
    """Owner of the highest token seen per shard.

    Args:
        shards: how many there are in the cluster; 0 while that is not known.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._best: dict[int, tuple[Token, WorkerId]] = {}
        # By the last byte of a key, which decides its shard: one step less for each of hundreds of keys.
        self.by_byte: list[WorkerId | None] = [None] * BYTE_VALUES

    def __repr__(self) -> str:
        return f"<Homes of {len(self._best)} of {self.shards} shards>"

    def observe(self, shard: int, token: Token, home: WorkerId) -> bool:
        """Somebody claims that `home` has `shard` under `token`; whether that is not outdated."""
        if not 0 <= shard < self.shards:
            return False
        best = self._best.get(shard)
        if best is None or token > best[0]:
            self._best[shard] = token, home
            for byte in range(shard_of(bytes([shard]), self.shards), BYTE_VALUES, self.shards):
                self.by_byte[byte] = home
            return True
        return best == (token, home)

    def observe_all(self, shards: Iterable[ShardAt]) -> None:
        """The same for what came with a redirect; an empty home says nothing."""
        for shard, incarnation, revision, home in shards:
            if home:
                self.observe(shard, Token(incarnation, revision), WorkerId(home))

    def home(self, shard: int) -> WorkerId | None:
        """Whom to ask about `shard`; None if nobody is known."""
        best = self._best.get(shard)
        return None if best is None else best[1]

    def token(self, shard: int) -> Token | None:
        """The highest token seen."""
        best = self._best.get(shard)
        return None if best is None else best[0]

    def at(self, shard: int) -> ShardAt:
        """For a redirect: what is known of `shard`; an empty home if nothing is."""
        token, home = self._best.get(shard, (Token(0, 0), ""))
        return shard, token.incarnation, token.revision, home

    def of(self, home: WorkerId) -> dict[int, Token]:
        """The shards that `home` is believed to hold."""
        return {shard: token for shard, (token, who) in self._best.items() if who == home}

    def workers(self) -> set[WorkerId]:
        """Everybody who is the home of something."""
        return {home for _, home in self._best.values()}

    def check(self) -> None:
        """Raises AssertionError unless both tables agree."""
        for byte, home in enumerate(self.by_byte):
            assert home == (self.home(shard_of(bytes([byte]), self.shards)) if self.shards else None)
