"""Ours: the real client against a real worker, which is the home of all shards.

    python -m benchmarks.programs.ours STORE HOME MEMBERS

What reports pages are members of the cluster like any worker: listed at the store under a lease of their own, with a port
where the home can ask for their inventory. They have no pages to send, so that only the metadata is measured. The last
HOLDERS of them report pages, the others report that they have none.
"""

import asyncio
import itertools
import random
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from benchmarks.programs.measure import HOLDERS, Measured, obey
from tensorcast_connector.config import PING_INTERVAL_S, SHARDS, parse_address
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.net.rpc import serve_stream
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Listener, Network, Stream
from tensorcast_connector.store.client import read_cluster
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import PeerRequest, encode, unpack_indexes
from tensorcast_connector.wire.keys import pack
from tensorcast_connector.wire.messages import (
    AskInventory,
    Fenced,
    FindKeys,
    Hello,
    Message,
    Ok,
    PagesFound,
    Reported,
    ReportKeys,
    ShardGrant,
)
from tensorcast_connector.wire.store_messages import KeepAlive, LeaseGranted, RegisterWorker, RevokeLease, WorkerRecord

TIMEOUT_S = 10.0
LEASE_S = 60
RETRY_S = 0.01


class Inventory:
    """A Service for the home, and its own Session: what it asks for comes, or has come, as reports."""

    server = "worker"
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(PeerRequest)

    def __init__(self, server_id: str) -> None:
        self.server_id = server_id

    def open_session(self, stream: Stream, hello: Hello) -> "Inventory":  # noqa: ARG002 - the interface of a Service
        """A new connection."""
        return self

    def handle(self, message: Message) -> Message:
        """See Session."""
        return Fenced([]) if isinstance(message, AskInventory) else Ok()

    def close(self) -> None:
        """Nothing is held."""

    async def on_stream(self, stream: Stream) -> None:
        """An OnStream."""
        await serve_stream(stream, self)


class Member:
    """One that reports pages."""

    def __init__(self, network: Network, store: Address, home: Address, name: str, chance: random.Random) -> None:
        self._network = network
        self._id = f"{name}/{chance.getrandbits(32):08x}"
        self._store = RpcClient(network, store, "worker", self._id, chance)
        self._numbers = itertools.count(1)
        self._lease_id = 0
        self._listener: Listener
        self.grants: list[ShardGrant] = []
        self.home = RpcClient(network, home, "worker", self._id, chance)

    async def join(self, grants: list[ShardGrant]) -> None:
        """Until the home takes reports of all shards."""
        anywhere = Address("tcp", host="127.0.0.1", port=0)
        self._listener = await self._network.listen(anywhere, Inventory(self._id).on_stream)
        record = WorkerRecord(self._id, self._id.partition("/")[0], str(self._listener.address), 0)
        for client in (self._store, self.home):
            client.start()
            await client.wait_connected(TIMEOUT_S)
        self._lease_id = (await self._store.call(RegisterWorker(record, LEASE_S), LeaseGranted, TIMEOUT_S)).lease_id
        self.grants = grants
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    return await self.report([], [], reset=[shard for shard, *_ in grants])
                except Unavailable:  # it has not heard of us yet
                    await asyncio.sleep(RETRY_S)

    async def report(self, added: list[bytes], removed: list[bytes], reset: list[int] | None = None) -> None:
        """See Index."""
        fresh, gone = pack(added), pack(removed)
        size = fresh.key_bytes or gone.key_bytes
        report = ReportKeys(self._id, next(self._numbers), self.grants, reset or [], size, fresh.packed, gone.packed)
        reply = await self.home.call(report, Reported, TIMEOUT_S)
        if reply.moved or reply.unknown:
            raise ValueError(f"the home did not take a report: {reply}")

    async def stay(self) -> None:
        """Renews the lease for ever."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            await self._store.call(KeepAlive(self._lease_id), Message, TIMEOUT_S)

    async def leave(self) -> None:
        """Ends the lease, and the home forgets the pages."""
        await self._store.call(RevokeLease(self._lease_id), Ok, TIMEOUT_S)
        for client in (self._store, self.home):
            await client.close()
        await self._listener.close()


class Client:
    """An Index."""

    def __init__(self, members: list[Member]) -> None:
        self._holders = members[-HOLDERS:]
        self._home = self._holders[0].home
        self._shards = [shard for shard, *_ in members[0].grants]

    async def find(self, keys: list[bytes]) -> PagesFound:
        """See Index."""
        return await self._home.call(self._question(keys), PagesFound, TIMEOUT_S)

    def _question(self, keys: list[bytes]) -> FindKeys:
        packed = pack(keys)
        return FindKeys(self._shards, packed.key_bytes, packed.packed)

    async def found(self, keys: list[bytes]) -> int:
        """See Index."""
        reply = await self.find(keys)
        return sum(1 for index in unpack_indexes(reply.which) if reply.holders[index])

    async def sizes(self, keys: list[bytes]) -> dict[str, int]:
        """How many bytes the messages of this lookup have."""
        return {"request": len(encode(self._question(keys))), "reply": len(encode(await self.find(keys)))}

    async def report(self, holder: int, added: list[bytes], removed: list[bytes]) -> None:
        """See Index."""
        await self._holders[holder].report(added, removed)


async def grants_of_the_home(network: Network, store: Address, chance: random.Random) -> list[ShardGrant]:
    """The tokens of all shards, once they are granted."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            view = await read_cluster(network, [store], "benchmark", chance)
            if len(view.shards) == SHARDS:
                return [(shard, *holder.token) for shard, holder in sorted(view.shards.items())]
            await asyncio.sleep(RETRY_S)


async def measure(store: Address, home: Address, count: int) -> None:
    """Until the input ends."""
    network, chance = SocketNetwork(), random.Random()
    grants = await grants_of_the_home(network, store, chance)
    members = [Member(network, store, home, f"member-{number}", chance) for number in range(count)]
    for member in members:
        await member.join(grants)
    staying = [asyncio.get_running_loop().create_task(member.stay()) for member in members]
    client = Client(members)
    measured = Measured(client)

    async def sizes(_: Mapping[str, Any]) -> Mapping[str, Any]:
        """Bytes of the messages of a lookup, there and back."""
        return await client.sizes(measured.next_lookup())

    await obey({**measured.commands(), "sizes": sizes})
    for task in staying:
        task.cancel()
    await asyncio.gather(*staying, return_exceptions=True)
    for member in members:
        await member.leave()


def main() -> None:
    """See the module."""
    store, home, members = sys.argv[1:]
    asyncio.run(measure(parse_address(store, "store"), parse_address(home, "home"), int(members)))


if __name__ == "__main__":
    main()
