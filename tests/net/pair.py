"""A listener with a scripted service and those that dial it, for the RPC tests."""

import random
from typing import Any

from tensorcast_connector.net import rpc
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Listener, Network, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import (
    encode,
)
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Hello,
)
from tests.net.service import Scripted

T = 5.0


class Pair:
    """A listener with a scripted service, and what dials it."""

    def __init__(self, network: Network, address: Address) -> None:
        self.network = network
        self.service = Scripted()
        self.listener: Listener | None = None
        self.address = address
        self.clients: list[RpcClient] = []

    async def listen(self) -> None:
        self.listener = await self.network.listen(self.address, self.service.on_stream)
        self.address = self.listener.address

    async def stop(self) -> None:
        assert self.listener is not None
        await self.listener.close()

    def client(self, **options: Any) -> RpcClient:
        client = RpcClient(self.network, self.address, "engine", "e", random.Random(1), **options)
        client.start()
        self.clients.append(client)
        return client

    async def connected(self, **options: Any) -> RpcClient:
        client = self.client(**options)
        await client.wait_connected(T)
        return client

    async def raw(self) -> Stream:
        return await self.network.dial(self.address, T)


async def frame(stream: Stream) -> tuple[Kind, int, bytes]:
    _, got = await rpc.receive_frame(stream)
    return got.kind, got.request_id, got.body


async def hello(stream: Stream, low: int = PROTOCOL_VERSION_MIN, high: int = PROTOCOL_VERSION) -> None:
    stream.write(encode_frame(Kind.REQUEST, 1, encode(Hello(low, high, "engine", "raw"))))
