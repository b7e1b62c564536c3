"""A caller's connections to its gateway: requests, shared memory on the same host, bytes over TCP."""

import asyncio
import os
import random
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from tensorcast_connector.client.ownership import check_process
from tensorcast_connector.config import (
    ARTIFACT_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    FETCH_CONNECTIONS_PER_PEER,
    SIGNALS_TIMEOUT_S,
    STORE_TIMEOUT_S,
    parse_address,
)
from tensorcast_connector.errors import ConfigError, InvalidArgument, ProtocolError, TensorcastError, WrongRole
from tensorcast_connector.net.bulk import BulkClient
from tensorcast_connector.net.descriptors import DescriptorChannel
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Network
from tensorcast_connector.types import Address
from tensorcast_connector.wire.caller_messages import (
    AbortUpload,
    Arrival,
    AskArrival,
    ListSignals,
    MakeResident,
    SignalsListed,
)
from tensorcast_connector.wire.messages import CALLER_ROLE, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Hello, Message, Ok

R = TypeVar("R", bound=Message)
_NOT_ENCODED = (TypeError, ValueError, OverflowError, RecursionError)  # what msgpack raises for what it cannot write


def _refused(message: Message, error: Exception) -> Exception:
    """What to raise instead of `error`: which argument of the caller's cannot be sent, if it is one, else the same."""
    for each in msgspec.structs.fields(message):
        value = getattr(message, each.name)
        try:
            msgspec.msgpack.encode(value)
            msgspec.convert(value, each.type)
        except (msgspec.MsgspecError, *_NOT_ENCODED) as reason:
            return InvalidArgument(f"{each.name}={value!r:.64}: {reason}")
    return error


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
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None  # that uses it
        self._closed = False
        self.plans: dict[str, list[bytes]] = {}  # that run, by their idempotency key; several if they are the same
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
        self._loop = asyncio.get_running_loop()
        self._client.start()
        await self._client.wait_connected(CONNECT_TIMEOUT_S, patient=False)
        if self._client.server != "worker":
            raise ConfigError(
                f"worker={str(self._address)!r} is a {self._client.server}; give the address that `tensorcast worker` or "
                "`tensorcast up` prints"
            )

    async def close(self) -> None:
        """Ends it; may be called twice.

        Raises:
            InvalidArgument: another event loop uses it.
        """
        if self.closed:
            return
        self.check_here()
        self._closed = True
        self._bulk.close()
        for channel in (self._channel, self._idle, *self._putting):
            if channel is not None:
                channel.close()
        await self._client.close()

    @property
    def closed(self) -> bool:
        """Whether it has ended, maybe with its event loop, or is another process's: then nothing of it is to be touched."""
        return self._closed or os.getpid() != self._process or (self._loop is not None and self._loop.is_closed())

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
        check_process(self._process)
        self.check_here()
        if self.closed:
            raise InvalidArgument("the session is closed")

    def check_here(self) -> None:
        """Raises InvalidArgument on any event loop but the one that made it, where nothing would ever be answered."""
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise InvalidArgument("a session belongs to the event loop that it was made on; connect anew on this one")

    async def call(self, message: Message, expected: type[R], timeout_s: float = STORE_TIMEOUT_S) -> R:
        """One request to the gateway.

        Raises:
            InvalidArgument: the session is closed, or something in the message is not what it may be; names it.
            TensorcastError: as the gateway answers.
        """
        self._check_open()
        try:
            return await self._client.call(message, expected, timeout_s)
        except (ProtocolError, *_NOT_ENCODED) as error:
            raise _refused(message, error) from error

    async def descriptor(self, message: Message, expected: type[R]) -> tuple[int, R]:
        """Shared memory of the gateway: the descriptor that comes with the answer to `message`, which the caller closes."""
        self._check_open()
        try:
            return await self._channel.call(message, expected, ARTIFACT_TIMEOUT_S)
        except (ProtocolError, *_NOT_ENCODED) as error:
            raise _refused(message, error) from error

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

    async def call_lately(self, message: Message, expected: type[R], timeout_s: float = STORE_TIMEOUT_S) -> R:
        """The same of a request that gateways of the same protocol version may be too old for.

        Raises:
            ConfigError: this one is.
        """
        try:
            return await self.call(message, expected, timeout_s)
        except ProtocolError as error:
            name = type(message).__name__
            if f"{name!r}" not in str(error):
                raise
            raise ConfigError(
                f"worker={str(self._address)!r} is older than this program and does not know {name}; upgrade it"
            ) from error

    async def arrival(self, sizes: Mapping[str, int], worker: str) -> tuple[int, int]:
        """How many bytes of artifacts, by id, are at a worker, and how many they have; `sizes` are at least so much.

        Raises:
            Unavailable: there is no such worker.
        """
        message = AskArrival(list(sizes), worker)
        told = (await self.call_lately(message, Arrival, SIGNALS_TIMEOUT_S + STORE_TIMEOUT_S)).bytes
        found = zip(told, sizes.values(), strict=False)
        return sum(done for done, _ in told), sum(max(size, least) for (_, size), least in found)

    async def fetch(self, artifact_id: str, parts: list[tuple[int, memoryview]]) -> None:
        """Parts of an artifact that is resident at the gateway, each from its offset into the memory beside it."""
        self._check_open()
        await self._bulk.fetch_bytes(artifact_id, parts)


async def open_link(network: Network, address: Address, tenant: str, who: str) -> GatewayLink:
    """A link to the worker there, or to a gateway that it knows. Raises as client/session.connect."""
    link = GatewayLink(network, address, tenant, who)
    try:
        await link.open()
        try:
            await link.call(AbortUpload(""), Ok)  # which is nothing to a gateway
            return link
        except WrongRole as refused:
            listed = await link.call(ListSignals(0, 0), SignalsListed, SIGNALS_TIMEOUT_S + STORE_TIMEOUT_S)
            error: TensorcastError = refused
    except BaseException:
        await link.close()
        raise
    await link.close()
    for each in listed.workers:
        if "gateway" in each.roles and each.signals is not None:
            link = GatewayLink(network, parse_address(each.address, "address"), tenant, who)
            try:
                await link.open()
                return link
            except TensorcastError as failure:
                await link.close()
                error = failure
            except BaseException:
                await link.close()
                raise
    raise error
