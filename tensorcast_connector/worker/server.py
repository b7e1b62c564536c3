"""The worker process put together: arena, pages, peers, membership, and its two listeners."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from tensorcast_connector.config import (
    ARTIFACT_SPARE_BYTES,
    NAME_CHARS_MAX,
    SLAB_BYTES,
    SLOT_ALIGN_BYTES,
    parse_address,
    parse_devices,
)
from tensorcast_connector.core.residence import Residence
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.transport import Listener, Network, Stream
from tensorcast_connector.settings import WorkerConfig, parse_roles
from tensorcast_connector.types import Address, WorkerId
from tensorcast_connector.wire.messages import PROTOCOL_VERSION
from tensorcast_connector.wire.store_messages import (
    WorkerRecord,
)
from tensorcast_connector.worker.arena import Arena, available_memory_bytes, check_fits
from tensorcast_connector.worker.artifacts import Artifacts
from tensorcast_connector.worker.census import Census, Reports
from tensorcast_connector.worker.devices import Devices
from tensorcast_connector.worker.gateway import Gateway
from tensorcast_connector.worker.observer import Observer
from tensorcast_connector.worker.pages import Pages
from tensorcast_connector.worker.peers import Peers
from tensorcast_connector.worker.probe import Probe, Requests
from tensorcast_connector.worker.recorder import Recorder
from tensorcast_connector.worker.records import ArtifactPeers
from tensorcast_connector.worker.retention import Retention
from tensorcast_connector.worker.service import EngineService, PeerService
from tensorcast_connector.worker.signals import Sampler

logger = logging.getLogger(__name__)


@dataclass
class Worker:
    """A running worker. `close` leaves the cluster and frees everything."""

    worker_id: WorkerId
    socket: Address
    address: Address
    roles: tuple[str, ...]
    pages: Pages
    peers: Peers
    observer: Observer
    probe: Probe
    artifacts: Artifacts
    devices: Devices
    gateway: Gateway
    retention: Retention
    _arena: Arena
    _sampler: Sampler
    _listeners: list[Listener]

    async def close(self) -> None:
        """Stops serving, leaves the cluster, frees the arena."""
        await self.gateway.close()
        await self.peers.leave()
        await self._sampler.close()
        await self.retention.close()
        for listener in self._listeners:
            await listener.close()
        await self.pages.close()
        await self.devices.close()
        await self.artifacts.close()
        await self.peers.close()
        self._arena.close()


def _socket_of(config: WorkerConfig) -> Address:
    return parse_address(f"unix:{config.socket.removeprefix('unix:')}", "socket")


def check_config(config: WorkerConfig) -> None:
    """What can be told before anything is started, or made by others that are to run beside it; raises ConfigError."""
    if not config.name.isprintable() or not config.name or "/" in config.name or len(config.name) > NAME_CHARS_MAX:
        raise ConfigError(
            f"name={config.name!r}: a worker needs a name of at most {NAME_CHARS_MAX} characters without slashes"
        )
    advertise = parse_address(config.advertise, "advertise", other_hosts=True) if config.advertise else None
    for name, text in (("listen", config.listen), ("advertise", config.advertise)):
        if text and parse_address(text, name, other_hosts=True).scheme != "tcp":
            raise ConfigError(f"{name}={text!r}: other workers can only reach a TCP address, HOST:PORT")
    if advertise is not None and advertise.scheme == "tcp" and not advertise.port:
        raise ConfigError(f"advertise={config.advertise!r}: port 0 is any port, which nobody can dial")
    if parse_address(config.listen, "listen").host in ("0.0.0.0", "::") and not config.advertise:
        raise ConfigError(
            f"listen={config.listen!r} is every interface; say with advertise=HOST:PORT what other workers dial"
        )
    _socket_of(config)
    check_fits(config.arena_bytes, available_memory_bytes())
    dialled = advertise or parse_address(config.listen, "listen")
    stores = [parse_address(each.strip(), "store") for each in config.store.split(",")]
    if dialled.is_loopback and not all(each.is_loopback for each in stores):
        raise ConfigError(
            f"listen={config.listen!r} can be reached from this host only, and the store is elsewhere ({config.store}); "
            "say with listen=HOST:PORT, or advertise=HOST:PORT, where the other workers reach this one"
        )


async def start_worker(
    config: WorkerConfig, network: Network, chance: random.Random, now: Callable[[], float],
    wall: Callable[[], float] = time.time,
) -> Worker:  # fmt: skip
    """Starts a worker; it serves its engines at once and joins the cluster when the store answers.

    Args:
        chance: seeded by the system, since the incarnation in the worker's id is drawn from it.
        now: this host's clock in seconds, which goes on during suspend and never jumps.
        wall: seconds since 1970; only shown to people.

    Raises:
        ConfigError: an address cannot be used, or the arena does not fit.
    """
    check_config(config)
    listen = parse_address(config.listen, "listen")
    socket = _socket_of(config)
    arena = Arena(config.arena_bytes, available_memory_bytes())
    made: list[_Made] = []
    listeners: list[Listener] = []

    async def on_peer(stream: Stream) -> None:
        await made[0].workers.on_stream(stream)

    try:
        listeners.append(await network.listen(listen, on_peer))
        address = parse_address(config.advertise, "advertise") if config.advertise else listeners[0].address
        made.append(_put_together(config, network, arena, address, chance, now, wall))
        await made[0].devices.start()
        listeners.append(await network.listen(socket, made[0].engines.on_stream))
    except BaseException:
        for listener in listeners:
            await listener.close()
        for each in made:
            await each.devices.close()
            await each.artifacts.close()
        arena.close()
        raise
    return made[0].start(socket, address, arena, listeners)


@dataclass(frozen=True, slots=True)
class _Made:
    """The parts of a worker that does not run yet."""

    worker_id: WorkerId
    roles: tuple[str, ...]
    segments: Segments
    pages: Pages
    peers: Peers
    observer: Observer
    probe: Probe
    artifacts: Artifacts
    devices: Devices
    gateway: Gateway
    retention: Retention
    sampler: Sampler
    engines: EngineService
    workers: PeerService

    def start(self, socket: Address, address: Address, arena: Arena, listeners: list[Listener]) -> Worker:
        """Joins the cluster in the background."""
        loop = asyncio.get_running_loop()

        def on_allocated(ready_bytes: int) -> None:
            loop.call_soon_threadsafe(self.segments.extend, ready_bytes)

        arena.allocate_rest(on_allocated)
        self.peers.start()
        self.sampler.start()
        self.retention.start()
        fields = {"event": "serving", "worker_id": self.worker_id, "socket": str(socket), "address": str(address)}
        logger.info("worker %s serves engines at %s and workers at %s", self.worker_id, socket, address, extra=fields)
        return Worker(
            self.worker_id, socket, address, self.roles, self.pages, self.peers, self.observer, self.probe,
            self.artifacts, self.devices, self.gateway, self.retention, arena, self.sampler, listeners,
        )  # fmt: skip


def _put_together(
    config: WorkerConfig, network: Network, arena: Arena, address: Address, chance: random.Random,
    now: Callable[[], float], wall: Callable[[], float],
) -> _Made:  # fmt: skip
    worker_id, roles = WorkerId(f"{config.name}/{chance.getrandbits(32):08x}"), parse_roles(config.roles)
    stores = [parse_address(each.strip(), "store") for each in config.store.split(",")]
    record = WorkerRecord(worker_id, config.name, str(address), config.arena_bytes, PROTOCOL_VERSION, roles)
    segments = Segments(config.arena_bytes, SLAB_BYTES, SLOT_ALIGN_BYTES, arena.allocated_bytes)
    recorder, reports = Recorder(now, wall), Reports(now, wall)
    pages = Pages(arena, segments, recorder.record)
    peers = pages.elsewhere = Peers(record, pages, network, stores, chance, now, recorder.record)
    residence, view = Residence(config.artifact_bytes, tenant_bytes_max=config.tenant_bytes_max), peers.metadata.view
    spare_bytes = min(ARTIFACT_SPARE_BYTES, config.artifact_bytes // 8)
    artifacts = Artifacts(worker_id, residence, view, ArtifactPeers(peers), now, spare_bytes)
    devices = Devices(parse_devices(config.devices, "devices"), config.device_bytes, view, now)
    peers.on_view += [artifacts.reconcile, devices.reconcile]
    at_engines, at_workers = Requests(), Requests()
    probe = Probe(pages, peers, segments, at_engines, at_workers, now, wall, devices.table.statistics)
    sampler = Sampler(worker_id, roles, address.host, probe.read)
    sampler.measure()

    def statistics() -> dict[str, int | str]:
        return {**pages.statistics(), **peers.statistics(), **artifacts.statistics(), **devices.statistics()}

    observer = Observer(recorder, sampler, now, statistics, reports.all)
    retention = Retention(pages, config.page_age_max_s, now)
    census = Census(worker_id, peers, retention, observer.signals)
    gateway = Gateway(worker_id, artifacts, devices, peers, census, chance, "gateway" in roles, now, wall)
    return _Made(
        worker_id, roles, segments, pages, peers, observer, probe, artifacts, devices, gateway, retention, sampler,
        EngineService(worker_id, arena, pages, peers, observer, at_engines, gateway, reports, retention),
        PeerService(worker_id, pages, peers, observer, at_workers, gateway),
    )  # fmt: skip
