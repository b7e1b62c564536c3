"""The worker process put together: arena, pages, peers, membership, and its two listeners."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from tensorcast_connector.config import (
    NAME_CHARS_MAX,
    SLAB_BYTES,
    SLOT_ALIGN_BYTES,
    WorkerConfig,
    parse_address,
    parse_roles,
)
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.transport import Listener, Network, Stream
from tensorcast_connector.types import Address, WorkerId
from tensorcast_connector.wire.messages import PROTOCOL_VERSION
from tensorcast_connector.wire.store_messages import (
    WorkerRecord,
)
from tensorcast_connector.worker.arena import Arena, available_memory_bytes
from tensorcast_connector.worker.pages import Pages
from tensorcast_connector.worker.peers import Peers
from tensorcast_connector.worker.service import EngineService, PeerService

logger = logging.getLogger(__name__)


@dataclass
class Worker:
    """A running worker. `close` leaves the cluster and frees everything."""

    worker_id: WorkerId
    socket: Address
    address: Address
    pages: Pages
    peers: Peers
    _arena: Arena
    _listeners: list[Listener]

    async def close(self) -> None:
        """Stops serving, leaves the cluster, frees the arena."""
        await self.peers.leave()
        for listener in self._listeners:
            await listener.close()
        await self.pages.close()
        await self.peers.close()
        self._arena.close()


async def start_worker(
    config: WorkerConfig, network: Network, chance: random.Random, now: Callable[[], float]
) -> Worker:
    """Starts a worker; it serves its engines at once and joins the cluster when the store answers.

    Args:
        chance: seeded by the system, since the incarnation in the worker's id is drawn from it.
        now: this host's clock in seconds, which goes on during suspend and never jumps.

    Raises:
        ConfigError: an address cannot be used, or the arena does not fit.
    """
    if not config.name.isprintable() or not config.name or "/" in config.name or len(config.name) > NAME_CHARS_MAX:
        raise ConfigError(
            f"name={config.name!r}: a worker needs a name of at most {NAME_CHARS_MAX} characters without slashes"
        )
    stores = [parse_address(each.strip(), "store") for each in config.store.split(",")]
    listen = parse_address(config.listen, "listen")
    socket = parse_address(f"unix:{config.socket.removeprefix('unix:')}", "socket")
    advertise = parse_address(config.advertise, "advertise") if config.advertise else None
    if advertise is not None and advertise.scheme == "tcp" and not advertise.port:
        raise ConfigError(f"advertise={config.advertise!r}: port 0 is any port, which nobody can dial")
    if listen.host in ("0.0.0.0", "::") and not config.advertise:
        raise ConfigError(
            f"listen={config.listen!r} is every interface; say with advertise=HOST:PORT what other workers dial"
        )
    arena = Arena(config.arena_bytes, available_memory_bytes())
    segments = Segments(config.arena_bytes, SLAB_BYTES, SLOT_ALIGN_BYTES, arena.allocated_bytes)
    pages = Pages(arena, segments)
    worker_id = WorkerId(f"{config.name}/{chance.getrandbits(32):08x}")
    services: dict[str, PeerService | EngineService] = {}
    listeners: list[Listener] = []

    async def on_peer(stream: Stream) -> None:
        await services["peer"].on_stream(stream)

    async def on_engine(stream: Stream) -> None:
        await services["engine"].on_stream(stream)

    try:
        listeners.append(await network.listen(listen, on_peer))
        address = advertise or listeners[0].address
        record = WorkerRecord(
            worker_id, config.name, str(address), config.arena_bytes, PROTOCOL_VERSION, parse_roles(config.roles)
        )
        peers = Peers(record, pages, network, stores, chance, now)
        pages.elsewhere = peers
        services["peer"] = PeerService(worker_id, pages, peers)
        services["engine"] = EngineService(worker_id, arena, pages, peers)
        listeners.append(await network.listen(socket, on_engine))
    except BaseException:
        for listener in listeners:
            await listener.close()
        arena.close()
        raise
    loop = asyncio.get_running_loop()

    def on_allocated(ready_bytes: int) -> None:
        loop.call_soon_threadsafe(segments.extend, ready_bytes)

    arena.allocate_rest(on_allocated)
    peers.start()
    logger.info("worker %s serves engines at %s and workers at %s", worker_id, socket, address)
    return Worker(worker_id, socket, address, pages, peers, arena, listeners)
