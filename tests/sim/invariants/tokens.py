"""The tokens granted for one shard strictly increase for ever: over crashes, restarts and lost databases."""

from typing import Any

from tensorcast_connector.types import Token
from tests.sim.invariants.base import Invariant


class TokensIncrease(Invariant):
    """See the module. Looks at every state of the store that somebody may rely on."""

    def __init__(self) -> None:
        self._current: dict[int, tuple[Token, str]] = {}
        self._highest: dict[int, Token] = {}
        self._seen: object = None

    def acknowledged(self, world: Any, store: Any, message: Any, reply: Any) -> None:
        """A new holder, or the same one again, has a higher token than everybody before."""
        if store.snapshot is self._seen:
            return
        self._seen = store.snapshot
        for shard, granted in store.snapshot.shards().items():
            if granted == self._current.get(shard):
                continue
            token, holder = granted
            highest = self._highest.get(shard, Token(0, 0))
            world.require(token > highest, f"shard {shard} is granted to {holder} under {token} after {highest}")
            self._current[shard], self._highest[shard] = granted, token
