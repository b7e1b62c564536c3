"""The raw counts of a worker at one moment, for its signals and its metrics. Reading them costs no more with more pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorcast_connector.core.segments import Segments
from tensorcast_connector.core.usage import Usage
from tensorcast_connector.worker.arena import available_memory_bytes
from tensorcast_connector.worker.pages import Pages
from tensorcast_connector.worker.peers import Peers


class Busy:
    """The requests in flight of one connection; `with busy:` around each that takes its time."""

    def __init__(self) -> None:
        self.requests = 0

    def __enter__(self) -> None:
        self.requests += 1

    def __exit__(self, *_: object) -> None:
        self.requests -= 1


class Requests:
    """The requests in flight of one listener."""

    def __init__(self) -> None:
        self._connections: set[Busy] = set()

    def opened(self) -> Busy:
        """A new connection."""
        busy = Busy()
        self._connections.add(busy)
        return busy

    def closed(self, busy: Busy) -> None:
        """It has ended."""
        self._connections.discard(busy)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    @property
    def in_flight(self) -> int:
        """Of all connections together."""
        return sum(each.requests for each in self._connections)

    @property
    def busiest(self) -> int:
        """Of the connection with most of them: the limit is one of each connection."""
        return max((each.requests for each in self._connections), default=0)


@dataclass(frozen=True, slots=True)
class Link:
    """What the kernel says of a network interface; counts are of all processes, since it was set up."""

    interface: str
    bits_per_s: int | None  # None: the kernel does not know, as of most virtual interfaces
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The raw counts of one moment."""

    at_s: float  # by the worker's clock
    as_of_unix_s: float
    usage: Usage
    memory_available_bytes: int | None
    link: Link | None
    fetched_bytes: int  # of pages, since the worker began
    sent_bytes: int
    requests_in_flight: int
    requests_of_busiest: int  # connection
    sends_in_flight: int
    fetches_waiting: int  # pages that are being fetched
    engines: int
    shards: Sequence[int]
    devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # counts of each, by name


@dataclass(frozen=True, slots=True)
class Probe:
    """Where the counts come from.

    Attributes:
        engines, workers: requests in flight of the two listeners.
        now: the worker's clock in seconds.
        wall: seconds since 1970, for people.
        devices: counts of the replicas on each device.
    """

    pages: Pages
    peers: Peers
    segments: Segments
    engines: Requests
    workers: Requests
    now: Callable[[], float]
    wall: Callable[[], float]
    devices: Callable[[], Mapping[str, Mapping[str, int]]] = dict

    def read(self, link: Link | None) -> Sample:
        """The counts now."""
        try:
            memory = available_memory_bytes()
        except OSError:  # there is no /proc to read it from
            memory = None
        counters = self.pages.counters
        return Sample(
            at_s=self.now(), as_of_unix_s=self.wall(), usage=self.segments.usage(), memory_available_bytes=memory,
            link=link, fetched_bytes=counters["bytes_fetched"], sent_bytes=counters["bytes_sent"],
            requests_in_flight=self.engines.in_flight + self.workers.in_flight,
            requests_of_busiest=max(self.engines.busiest, self.workers.busiest), sends_in_flight=self.pages.sends,
            fetches_waiting=self.pages.fetches, engines=self.peers.metadata.member.engines,
            shards=sorted(self.peers.metadata.leases.held), devices=self.devices(),
        )  # fmt: skip
