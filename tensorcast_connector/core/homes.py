"""Which worker is the home of each shard, as far as this process has seen: routing and fence in one.

What was learnt under a higher token always wins, whichever way it came: the store's watch, a new home that asks for
inventories, a former home that redirects. Nothing is accepted any more under a lower one. A home whose lease has ended
stays listed until somebody has a higher token: it can still be asked, and does not answer if it is dead.
"""

from collections.abc import Iterable, KeysView, Mapping

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
        self.version = 0  # rises with every change
        self._of: dict[WorkerId, dict[int, Token]] = {}  # the same by home
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
            if best is not None:
                former = self._of[best[1]]
                del former[shard]
                if not former:
                    del self._of[best[1]]
            self.version += 1
            self._best[shard] = token, home
            self._of.setdefault(home, {})[shard] = token
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

    def of(self, home: WorkerId) -> Mapping[int, Token]:
        """The shards that `home` is believed to hold."""
        return self._of.get(home, {})

    def workers(self) -> KeysView[WorkerId]:
        """Everybody who is the home of something."""
        return self._of.keys()

    def check(self) -> None:
        """Raises AssertionError unless the tables agree."""
        by_home = {(shard, token, home) for home, shards in self._of.items() for shard, token in shards.items()}
        assert by_home == {(shard, token, home) for shard, (token, home) in self._best.items()}
        assert all(self._of.values())
        homes = [self.home(shard) for shard in range(self.shards)] or [None]
        assert self.by_byte == (homes * BYTE_VALUES)[:BYTE_VALUES]
