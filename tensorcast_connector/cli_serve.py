"""`tensorcast store`, `worker` and `up`: started, run until they are stopped, and closed again."""

import asyncio
import json
import logging
import platform
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tensorcast_connector.cli_database import boottime_s, open_kv, where
from tensorcast_connector.cli_network import network_of
from tensorcast_connector.config import parse_address, parse_metrics
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.admission import allow_open_files
from tensorcast_connector.settings import StoreConfig, WorkerConfig
from tensorcast_connector.store.alive import Presence
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.measured_kv import MeasuredKv
from tensorcast_connector.store.server import Store, listen, open_store
from tensorcast_connector.worker.server import start_worker

if TYPE_CHECKING:
    from tensorcast_connector.net.metrics_server import Source

logger = logging.getLogger("tensorcast")


class Parts:
    """The store and the worker that run in this process, and where they serve.

    Args:
        stack: closes them, the last one first.
        wall: seconds since 1970.

    Attributes:
        ready: the addresses, as the ready file has them.
    """

    def __init__(self, stack: AsyncExitStack, wall: Callable[[], float] = time.time) -> None:
        self._stack = stack
        self._wall = wall
        self._sources: list[Source] | None = None  # of metrics, if they are served
        self._refused: Counter[str] = Counter()  # connections, by kind of reason
        self.ready: dict[str, str] = {}

    async def store(self, config: StoreConfig) -> str:
        """Starts a store; its address. Nothing is made for one that cannot listen: callers wait until its database is open."""
        opened: asyncio.Future[Store] = asyncio.get_running_loop().create_future()
        listener = await listen(network_of(config, self._refused), parse_address(config.listen, "listen"), opened)
        self._stack.push_async_callback(listener.close)
        kv = await open_kv(self._stack, config)
        if config.etcd:
            presence = Presence(kv, f"{listener.address} on {platform.node()}")
            self._stack.push_async_callback(presence.close)
            await presence.announce()
        await ensure_incarnation(kv, int(self._wall()))
        measured = MeasuredKv(kv, time.monotonic)
        store = await open_store(measured, where(config), config.shards)
        opened.set_result(store)
        self._stack.push_async_callback(listener.close)  # once more, so that it is closed before its database
        if self._sources is not None:
            from tensorcast_connector.store.metrics import StoreMetrics

            self._has(StoreMetrics(store, measured))
        self.ready["store"] = str(listener.address)
        fields = {"event": "serving", "address": str(listener.address), "database": where(config)}
        logger.info("store serves at %s, database in %s", listener.address, where(config), extra=fields)
        return str(listener.address)

    async def worker(self, config: WorkerConfig) -> str:
        """Starts a worker; the address of its socket."""
        worker = await start_worker(config, network_of(config, self._refused), random.Random(), boottime_s)
        self._stack.push_async_callback(worker.close)
        if self._sources is not None:
            from tensorcast_connector.worker.metrics import WorkerMetrics

            self._has(WorkerMetrics(worker))
        self.ready |= {"worker": str(worker.socket), "peer": str(worker.address), "worker_id": worker.worker_id}
        return str(worker.socket)

    def _has(self, source: "Source") -> None:
        """Metrics, as long as it runs."""
        assert self._sources is not None
        self._sources.append(source)
        self._stack.callback(self._sources.remove, source)

    async def metrics(self, metrics: str) -> None:
        """Serves the metrics of all that is started from now on, if there is an address for it."""
        address = parse_metrics(metrics)
        if address is None:
            return
        # Here, since the HTTP server takes a while to load.
        from tensorcast_connector.net.connection_metrics import ConnectionMetrics
        from tensorcast_connector.net.metrics_server import serve_metrics

        self._sources = []
        listener = await serve_metrics(address, self._sources, [ConnectionMetrics(self._refused)])
        self._stack.push_async_callback(listener.close)
        self.ready["metrics"] = str(listener.address)


# --- the three commands; each raises TensorcastError ------------------------------------------------------------------


def serve_store(config: StoreConfig, ready_file: str) -> None:
    """`tensorcast store`, on uvloop where there is one: all that it does is small messages."""

    async def start(parts: Parts) -> None:
        await parts.metrics(config.metrics)
        await parts.store(config)

    with asyncio.Runner(loop_factory=_small_messages_loop()) as runner:
        runner.run(_until_stopped(start, ready_file))


def _small_messages_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def serve_worker(config: WorkerConfig, ready_file: str) -> None:
    """`tensorcast worker`."""

    async def start(parts: Parts) -> None:
        await parts.metrics(config.metrics)
        await parts.worker(config)

    asyncio.run(_until_stopped(start, ready_file))


def serve_both(store: StoreConfig, worker: WorkerConfig, ready_file: str) -> None:
    """`tensorcast up`: the worker's store is the one started here."""

    async def start(parts: Parts) -> None:
        await parts.metrics(worker.metrics)
        address = await parts.store(store)
        socket = await parts.worker(replace(worker, store=address))
        sys.stdout.write(f"engines on this host: --kv-transfer-config worker = {socket}\n{_for_other_hosts(address)}\n")
        sys.stdout.flush()

    asyncio.run(_until_stopped(start, ready_file))


def _for_other_hosts(store: str) -> str:
    if parse_address(store, "store").is_loopback:
        return "other hosts cannot join: the store listens on this host only (see --store-listen and --listen)"
    return f"workers on other hosts: tensorcast worker --store {store} --listen HOST:PORT"


async def _until_stopped(start: Callable[[Parts], Awaitable[None]], ready_file: str) -> None:
    """Runs what `start` starts until SIGTERM or SIGINT."""
    allow_open_files()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    if ready_file:
        _write(ready_file, None)  # one that was left behind
        _check_ready(ready_file)
    async with AsyncExitStack() as stack:
        parts = Parts(stack)
        await start(parts)
        if ready_file:
            stack.enter_context(_there(ready_file, parts.ready))
        await stopped.wait()
        logger.info("stopping")


@contextmanager
def _there(path: str, addresses: dict[str, str]) -> Iterator[None]:
    """The ready file is there while its addresses are served."""
    try:
        _write(path, addresses)
        yield
    finally:
        _write(path, None)


def _check_ready(path: str) -> None:
    """That the ready file can be written, before anything is made that would be left behind. Raises ConfigError."""
    partial = Path(f"{path}.partial")
    try:
        partial.write_text("")
        partial.unlink()
    except OSError as error:
        raise ConfigError(f"ready file {path}: {error.strerror}") from error


def _write(path: str, addresses: dict[str, str] | None) -> None:
    """Writes the ready file as a whole, or removes it."""
    try:
        if addresses is None:
            Path(path).unlink(missing_ok=True)
        else:
            partial = Path(f"{path}.partial")
            partial.write_text(json.dumps(addresses) + "\n")
            partial.rename(path)
    except OSError as error:
        raise ConfigError(f"ready file {path}: {error.strerror}") from error
