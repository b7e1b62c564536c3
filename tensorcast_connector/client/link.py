"""A caller's connections to its gateway: requests, shared memory on the same host, bytes over TCP."""

import random
from typing import TypeVar

from tensorcast_connector.config import (
    ARTIFACT_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    FETCH_CONNECTIONS_PER_PEER,
    STORE_TIMEOUT_S,
)
from tensorcast_connector.errors import ConfigError, InvalidArgument
from tensorcast_connector.net.bulk import BulkClient
from tensorcast_connector.net.descriptors import DescriptorChannel
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Network
from tensorcast_connector.types import Address
from tensorcast_connector.wire.caller_messages import MakeResident
from tensorcast_connector.wire.messages import CALLER_ROLE, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Hello, Message, Ok

R = TypeVar("R", bound=Message)


class GatewayLink:
    """See the module. It reconnects by itself.

    Args:
        name: who calls, for people.
    """

    def __init__(self, network: Network, address: Address, tenant: str, name: str) -> None:
        self._address = address
        self._hello = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, CALLER_ROLE, name, tenant)
        self._channel = DescriptorChannel(address.path, self._hello)  # for reading
        self._putting: set[DescriptorChannel] = set()  # one of each put, which no other task's fate ends
        self._idle: DescriptorChannel | None = None  # for the next put
        self._client = RpcClient(network, address, CALLER_ROLE, name, random.Random(), tenant=tenant)
        self._bulk = BulkClient(network, address, name, FETCH_CONNECTIONS_PER_PEER, tenant)
        self.closed = False
        self.revision = 0  # of the store, at which this caller's last write was done
        self.tenant = tenant

    def __repr__(self) -> str:
        return f"<GatewayLink {self._address}>"

    async def open(self) -> None:
        """Waits until the gateway has answered.

        Raises:
            Unavailable: it does not.
            ConfigError: what answers is no worker.
        """
        self._client.start()
        await self._client.wait_connected(CONNECT_TIMEOUT_S, patient=False)
        if self._client.server != "worker":
            raise ConfigError(
                f"worker={str(self._address)!r} is a {self._client.server}; give the address that `tensorcast worker` or "
                "`tensorcast up` prints"
            )

    async def close(self) -> None:
        """Ends it; may be called twice."""
        self.closed = True
        self._bulk.close()
        for channel in (self._channel, self._idle, *self._putting):
            if channel is not None:
                channel.close()
        await self._client.close()

    @property
    def address(self) -> Address:
        """Where the gateway is."""
        return self._address

    @property
    def local(self) -> bool:
        """Whether the gateway is on this host, so that tensors are shared memory."""
        return self._address.scheme == "unix"

    @property
    def worker_id(self) -> str:
        """The gateway."""
        return self._client.server_id

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidArgument("the session is closed")

    async def call(self, message: Message, expected: type[R], timeout_s: float = STORE_TIMEOUT_S) -> R:
        """One request to the gateway.

        Raises:
            InvalidArgument: the session is closed.
            TensorcastError: as the gateway answers.
        """
        self._check_open()
        return await self._client.call(message, expected, timeout_s)

    async def descriptor(self, message: Message, expected: type[R]) -> tuple[int, R]:
        """Shared memory of the gateway: the descriptor that comes with the answer to `message`, which the caller closes."""
        self._check_open()
        return await self._channel.call(message, expected, ARTIFACT_TIMEOUT_S)

    def begin_put(self) -> DescriptorChannel:
        """The connection of one put: what it uploads there goes with it, until it is committed. End it by `end_put`."""
        self._check_open()
        channel, self._idle = self._idle or DescriptorChannel(self._address.path, self._hello), None
        self._putting.add(channel)
        return channel

    def end_put(self, channel: DescriptorChannel, done: bool) -> None:
        """Keeps it for the next put, if one is wanted; `done`: nothing that was uploaded is left there."""
        self._putting.discard(channel)
        if done and self._idle is None and not self.closed:
            self._idle = channel
        else:
            channel.close()

    async def prepare(self, artifact_id: str) -> None:
        """Makes an artifact resident at the gateway."""
        await self.call(MakeResident(artifact_id), Ok, ARTIFACT_TIMEOUT_S)

    async def fetch(self, artifact_id: str, parts: list[tuple[int, memoryview]]) -> None:
        """Parts of an artifact that is resident at the gateway, each from its offset into the memory beside it."""
        self._check_open()
        await self._bulk.fetch_bytes(artifact_id, parts)
