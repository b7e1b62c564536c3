"""How a worker is doing, for callers that place work: pressures of memory, network and queue, with their age.

Measured once an interval and kept; a request for it costs nothing but the answer. There is no disk tier yet, so the
disk's pressure is always None.
"""

import asyncio
import fcntl
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorcast_connector.config import CONNECTIONS_MAX, REQUESTS_IN_FLIGHT_MAX, SIGNALS_INTERVAL_S
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import Signals
from tensorcast_connector.worker.probe import Link, Sample

logger = logging.getLogger(__name__)
NETWORK_INTERFACES = Path("/sys/class/net")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the first IPv4 address of an interface
_IFNAME_BYTES_MAX = 15


def signals_of(worker_id: WorkerId, roles: Sequence[str], before: Sample | None, sample: Sample) -> Signals:
    """The signals at `sample`, with rates since `before`; their age is 0."""
    usage = sample.usage
    values: dict[str, Any] = {
        "pages": usage.pages,
        "pages_held": usage.pages_held,
        "pages_reserved": usage.pages_reserved,
        "arena_used_bytes": usage.bytes_used,
        "arena_pinned_bytes": usage.bytes_pinned,
        "arena_total_bytes": usage.bytes_total,
        "evictions": usage.evictions,
        "memory_available_bytes": sample.memory_available_bytes,
        "requests_in_flight": sample.requests_in_flight,
        "requests_in_flight_per_connection_limit": REQUESTS_IN_FLIGHT_MAX,
        "sends_in_flight": sample.sends_in_flight,
        "fetches_waiting": sample.fetches_waiting,
        "engines": sample.engines,
    }
    if sample.devices:
        values["devices"] = {name: dict(counts) for name, counts in sample.devices.items()}
    queue = max(sample.requests_of_busiest / REQUESTS_IN_FLIGHT_MAX, sample.sends_in_flight / CONNECTIONS_MAX)
    network = _network(before, sample, values)
    return Signals(
        worker_id=worker_id, roles=list(roles), shards=list(sample.shards), as_of_unix_s=sample.as_of_unix_s, age_s=0.0,
        memory=usage.pressure, disk=None, network=network, queue=min(1.0, queue), values=values,
    )  # fmt: skip


def _network(before: Sample | None, sample: Sample, values: dict[str, Any]) -> float | None:
    """Adds the rates to `values`; the pressure is that of the busier direction."""
    link = sample.link
    if link is not None:
        values.update(interface=link.interface, link_bits_per_s=link.bits_per_s)
    if before is None or sample.at_s <= before.at_s:
        return None
    interval_s = sample.at_s - before.at_s
    values["interval_s"] = interval_s
    values["pages_fetched_bytes_per_s"] = (sample.fetched_bytes - before.fetched_bytes) / interval_s
    values["pages_sent_bytes_per_s"] = (sample.sent_bytes - before.sent_bytes) / interval_s
    if link is None or before.link is None or link.interface != before.link.interface:
        return None
    # A counter that went back was reset with its interface; then nothing is known of this interval.
    received = (link.received_bytes - before.link.received_bytes) / interval_s
    sent = (link.sent_bytes - before.link.sent_bytes) / interval_s
    if received < 0 or sent < 0:
        return None
    values.update(link_received_bytes_per_s=received, link_sent_bytes_per_s=sent)
    return min(1.0, max(received, sent) * 8 / link.bits_per_s) if link.bits_per_s else None


def read_link(interface: str, root: Path = NETWORK_INTERFACES) -> Link | None:
    """What the kernel says of `interface`; None if there is no such interface (any more)."""
    folder = root / interface
    try:
        received = int((folder / "statistics" / "rx_bytes").read_text())
        sent = int((folder / "statistics" / "tx_bytes").read_text())
    except (OSError, ValueError):
        return None
    try:
        megabits = int((folder / "speed").read_text())
    except (OSError, ValueError):  # it has no speed
        megabits = 0
    return Link(interface, megabits * 1_000_000 if megabits > 0 else None, received, sent)


def interface_of(address: str) -> str | None:
    """The interface whose (first) IP address is `address`; None if there is none, as behind an address translation."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = [line.split() for line in IPV6_ADDRESSES.read_text().splitlines()] if IPV6_ADDRESSES.exists() else []
        return next((fields[5] for fields in lines if fields[0] == packed), None)
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_IFNAME_BYTES_MAX])
            try:
                if fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
            except OSError:  # it has no IPv4 address
                continue
    return None


async def find_interface(host: str) -> str | None:
    """The interface that carries `host`, a name or an IP address; None if it is not of this host."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return next((name for each in found if (name := interface_of(str(each[4][0])))), None)
    except (OSError, UnicodeError) as error:
        logger.debug("no interface for %s: %s", host, error)
        return None


class Sampler:
    """Measures one worker at an interval, and keeps the last result.

    Args:
        worker_id, roles: of the worker.
        host: where other workers dial it; tells the interface.
        read: the raw counts now, given those of the interface.
    """

    def __init__(
        self, worker_id: WorkerId, roles: Sequence[str], host: str, read: Callable[[Link | None], Sample]
    ) -> None:  # fmt: skip
        self._worker_id = worker_id
        self._roles = roles
        self._host = host
        self._read = read
        self._interface: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sample: Sample | None = None
        self._signals: Signals | None = None

    def start(self) -> None:
        """Goes on measuring in the background."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._find()), loop.create_task(self._run())]

    async def close(self) -> None:
        """Stops measuring."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _find(self) -> None:
        """A name server may take its time; until then there is no interface."""
        self._interface = await find_interface(self._host)

    async def _run(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(SIGNALS_INTERVAL_S)
            try:
                self.measure()
                failing = False
            except Exception:  # the last signals stay, and show their age
                if not failing:
                    logger.exception("this worker cannot be measured; going on")
                failing = True

    def measure(self) -> None:
        """Takes a sample; rates are since the one before."""
        sample = self._read(read_link(self._interface) if self._interface else None)
        self._signals = signals_of(self._worker_id, self._roles, self._sample, sample)
        self._sample = sample

    def signals(self, now: float) -> Signals:
        """The last result, with its age at `now` by the worker's clock; only after a first `measure`."""
        assert self._signals is not None and self._sample is not None
        return msgspec.structs.replace(self._signals, age_s=max(0.0, now - self._sample.at_s))
