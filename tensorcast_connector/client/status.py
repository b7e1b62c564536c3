"""How the cluster is doing: what the store lists, and what each worker says of itself, asked all at once."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensorcast_connector.config import HELLO_TIMEOUT_S, SIGNALS_TIMEOUT_S, parse_address
from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.errors import ConfigError, DeadlineExceeded, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Network
from tensorcast_connector.store.client import read_cluster
from tensorcast_connector.types import Address, WorkerId
from tensorcast_connector.wire.messages import GetSignals, GetStatistics, GetStory, Signals, Statistics, Story
from tensorcast_connector.wire.store_messages import WorkerRecord


class Used(NamedTuple):
    """Memory of one kind at a worker, in bytes: what is taken, and what may be at most."""

    used: int
    most: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker: how it is listed, and what it said.

    Attributes:
        signals: None if it did not answer.
        asked_at_s: when it was asked, by the caller's clock: what it says is at most `age_s(now)` old.
        error: why it did not answer; empty if it did.
        artifact_bytes: of its artifacts, uploads included; None if it does not say.
    """

    record: WorkerRecord
    signals: Signals | None
    asked_at_s: float
    error: str
    artifact_bytes: Used | None = None

    def age_s(self, now: float) -> float | None:
        """How old the signals are at `now` at most: their age when they were sent, and all the time since the question."""
        return None if self.signals is None else self.signals.age_s + now - self.asked_at_s


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What the store lists, and each worker."""

    view: ClusterView
    read_at_s: float  # by the caller's clock, from before the store was asked
    workers: dict[WorkerId, WorkerStatus]

    def shards_of(self, worker_id: str) -> list[int]:
        """The shards whose home is that worker, as the store lists them."""
        return sorted(shard for shard, holder in self.view.shards.items() if holder.worker_id == worker_id)

    def homeless(self) -> list[int]:
        """The shards that nobody is the home of."""
        return [shard for shard in range(self.view.shard_count) if shard not in self.view.shards]


class StatusReader:
    """Asks the store and the workers of one cluster.

    Args:
        stores: addresses of store processes of one cluster.
        name: who asks, for the logs of those who are asked.
        now: the caller's clock in seconds.
    """

    def __init__(
        self, network: Network, stores: Sequence[Address], name: str, chance: random.Random, now: Callable[[], float]
    ) -> None:  # fmt: skip
        self._network = network
        self._stores = list(stores)
        self._name = name
        self._chance = chance
        self._now = now

    async def status(self, timeout_s: float = SIGNALS_TIMEOUT_S) -> ClusterStatus:
        """The cluster now. A worker that does not answer within `timeout_s` is listed without signals.

        Raises:
            TensorcastError: no store answers; says why. ConfigError: what answers is no store.
        """
        read_at_s = self._now()
        try:
            view = await read_cluster(self._network, self._stores, self._name, self._chance)
        except ProtocolError as error:
            raise await self._explained(error) from error
        except Unavailable as error:
            rest = "no store answers; lookups, reads and transfers of the workers go on without it"
            raise type(error)(f"{error}: {rest}") from error
        asked = [self._worker(record, timeout_s) for record in view.workers.values()]
        found = await asyncio.gather(*asked)
        return ClusterStatus(view, read_at_s, dict(zip(view.workers, found, strict=True)))

    async def _explained(self, error: ProtocolError) -> TensorcastError:
        """What answers does not speak as a store does: is it one?"""
        for address in self._stores:
            try:
                server, server_id = await who_is(self._network, address, self._name, self._chance)
            except TensorcastError:
                continue
            if server != "store":
                return ConfigError(
                    f"store={str(address)!r} is a {server} ({server_id}); give the address that "
                    "`tensorcast store` or `tensorcast up` prints"
                )
        return error

    async def _worker(self, record: WorkerRecord, timeout_s: float) -> WorkerStatus:
        asked_at_s = self._now()
        try:
            address = parse_address(record.address, "address")
            client = RpcClient(self._network, address, "client", self._name, self._chance)
            client.start()
            try:
                async with asyncio.timeout(timeout_s):  # of all together; the limits inside are longer
                    await client.wait_connected(2 * timeout_s, patient=False)
                    asked_at_s = self._now()
                    signals = await client.call(GetSignals(), Signals, 2 * timeout_s)
                    values = (await client.call(GetStatistics(), Statistics, 2 * timeout_s)).values
            except TimeoutError:
                raise DeadlineExceeded(f"{address} did not answer within {timeout_s:g} s") from None
            finally:
                await client.close()
        except TensorcastError as error:
            return WorkerStatus(record, None, asked_at_s, str(error))
        if signals.worker_id != record.worker_id:
            return WorkerStatus(record, None, asked_at_s, f"{signals.worker_id} serves at its address now")
        used, most = values.get("artifact_bytes_used"), values.get("artifact_bytes_max")
        artifacts = Used(used, most) if isinstance(used, int) and isinstance(most, int) else None
        return WorkerStatus(record, signals, asked_at_s, "", artifacts)


async def who_is(network: Network, address: Address, name: str, chance: random.Random) -> tuple[str, str]:
    """Who answers at `address`: "store" or "worker", and its id.

    Raises:
        TensorcastError: nobody, or nobody of ours.
    """
    client = RpcClient(network, address, "client", name, chance)
    client.start()
    try:
        await client.wait_connected(HELLO_TIMEOUT_S, patient=False)
        return client.server, client.server_id
    finally:
        await client.close()


async def read_story(network: Network, worker: Address, text: str, name: str, chance: random.Random) -> list[str]:
    """What the worker at `worker` has recorded of `text`; see core/story.py.

    Raises:
        TensorcastError: it does not answer; says why. ConfigError: what answers is no worker.
    """
    client = RpcClient(network, worker, "client", name, chance)
    client.start()
    try:
        await client.wait_connected(SIGNALS_TIMEOUT_S, patient=False)
        return (await client.call(GetStory(text), Story, SIGNALS_TIMEOUT_S)).lines
    except ProtocolError as error:
        if client.server == "worker":
            raise
        raise ConfigError(f"worker={str(worker)!r} is a {client.server}; stories are told by workers") from error
    finally:
        await client.close()
