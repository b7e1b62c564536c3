"""Once a worker has accepted token t+1 of a shard, it accepts no effect under t or less."""

from typing import Any

from tensorcast_connector.types import Token
from tests.sim.invariants.base import Invariant


class Fencing(Invariant):
    """See the module. Effects are applied reports and accepted questions for inventories; a redirect is only remembered."""

    def __init__(self) -> None:
        self._highest: dict[str, dict[int, Token]] = {}  # worker -> shard -> token
        self._shards: dict[str, int] = {}

    def learned(self, world: Any, worker: Any, shard: int, token: Token) -> None:
        """The highest token that `worker` has accepted, whatever way it came."""
        highest = self._highest.setdefault(worker.name, {})
        highest[shard] = max(token, highest.get(shard, token))

    def effect(self, world: Any, worker: Any, what: str, shard: int, token: Token) -> None:
        """It is not below that."""
        highest = self._highest.get(worker.name, {}).get(shard, token)
        world.require(
            token >= highest, f"{worker.name} accepts a {what} for shard {shard} under {token} after {highest}"
        )

    def after_event(self, world: Any, process: Any) -> None:
        """Nor does the worker ever send anybody to a home with a lower one.

        A database with another number of shards begins anew: the numbers of the shards mean something else.
        """
        metadata = getattr(process, "metadata", None)
        if metadata is not None and self._shards.get(process.name) != metadata.homes.shards:
            self._shards[process.name] = metadata.homes.shards
            self._highest[process.name] = {}
        for shard, highest in self._highest.get(process.name, {}).items():
            token = process.metadata.homes.token(shard)
            world.require(
                token is not None and token >= highest,
                f"{process.name} believes in {token} for shard {shard} after {highest}",
            )
