"""A network in memory with chance and faults, in place of net/sockets.py: hand it to whatever takes a `Network`.

    network = FakeNetwork(random.Random(seed))
    store = await serve_store(network, Address("tcp", host="store", port=0), kv, "store")
    network.cut(store.address)

Bytes arrive in pieces of random size after a random number of turns of the event loop; the same seed and the same calls
give the same pieces. Nothing waits for real time. Memory passed to `send` is read only when it is delivered, so code that
reuses it too early is found out. Nothing goes wrong unless asked: `cut`, `refuse`, `silence` and `flip_byte`.
"""

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable

from tensorcast_connector.errors import ConfigError, TensorcastError, Unavailable
from tensorcast_connector.net.transport import Buffer, Listener, OnStream, Stream
from tensorcast_connector.types import Address

logger = logging.getLogger(__name__)
TURNS_MAX = 3
PIECE_BYTES_MAX = 64 << 10
UNREAD_BYTES_MAX = 256 << 10  # beyond this a receiver that does not read stops the sender
BACKLOG_BYTES_MAX = 4 << 10  # `send` returns while no more than this much is on its way


class _Pipe:
    """One direction of a connection."""

    def __init__(self, network: "FakeNetwork", sender: Address | None) -> None:
        self._network = network
        self._sender = sender  # the listener that the bytes come from; None: they come from a dialler
        self._queue: deque[tuple[memoryview, bool]] = deque()  # and whether the memory is somebody else's
        self._finishing = False
        self._ticking = False
        self._turns = 0
        self.queued_bytes = 0
        self.arrived = bytearray()
        self.finished = False
        self.broken = ""
        self.changed = asyncio.Event()

    def put(self, data: Buffer, borrowed: bool) -> None:
        if not self._finishing and not self.broken and len(data):
            view = memoryview(data).cast("B")
            self._queue.append((view, borrowed))
            self.queued_bytes += view.nbytes
            self.tick()

    def finish(self) -> None:
        """The end of the stream arrives after what is on its way; memory that is not ours may be reused from now on."""
        if any(borrowed for _, borrowed in self._queue):
            self.break_off("closed in the middle of a transfer")
        self._finishing = True
        self.tick()

    def break_off(self, why: str) -> None:
        """Nothing more arrives."""
        if not self.finished and not self.broken:
            self.broken = why
            self._queue.clear()
            self.queued_bytes = 0
            self.changed.set()

    def tick(self) -> None:
        """Something may be deliverable: goes on until nothing is."""
        if not self._ticking:
            self._ticking = True
            self._turns = self._network.chance.randint(0, TURNS_MAX)
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        if self._turns:
            self._turns -= 1
            asyncio.get_running_loop().call_soon(self._turn)
            return
        self._ticking = False
        if self.broken or self._network.is_silent(self):
            return
        if self._queue and len(self.arrived) < UNREAD_BYTES_MAX:
            self._deliver()
        if self._finishing and not self._queue:
            self.finished = True
        elif self._queue and len(self.arrived) < UNREAD_BYTES_MAX:
            self.tick()
        self.changed.set()

    def _deliver(self) -> None:
        chance = self._network.chance
        count = 1 + int(PIECE_BYTES_MAX * chance.random() ** 4)  # mostly small, sometimes large
        head, borrowed = self._queue.popleft()
        piece = bytearray(head[:count])
        if head.nbytes > count:
            self._queue.appendleft((head[count:], borrowed))
        self.queued_bytes -= len(piece)
        if self._sender is not None:
            self._network.corrupt(self._sender, piece)
        self.arrived += piece

    async def wait(self) -> None:
        """For the next change."""
        self.changed.clear()
        await self.changed.wait()


class FakeStream:
    """One end of a connection: a Stream."""

    def __init__(self, peer: str, incoming: _Pipe, outgoing: _Pipe) -> None:
        self.peer = peer
        self.tenant: str | None = None
        self._in = incoming
        self._out = outgoing
        self._closed = False
        self._held = False  # by `pause`

    def __repr__(self) -> str:
        return f"<FakeStream to {self.peer}{' closed' if self._closed else ''}>"

    async def receive(self) -> bytes:
        """See Stream."""
        while self._held or not self._in.arrived:
            self._check()
            if self._in.finished and not self._in.arrived:
                return b""
            await self._in.wait()
        data = bytes(self._in.arrived)
        self._in.arrived.clear()
        self._in.tick()
        return data

    async def deliver(self, take: Callable[[memoryview], bool]) -> None:
        """See Stream."""
        while data := await self.receive():
            wants_more = take(memoryview(data))
            while not wants_more:
                await self.send(b"")
                wants_more = take(memoryview(b""))

    def pause(self) -> None:
        """See Stream."""
        self._held = True

    def resume(self) -> None:
        """See Stream."""
        self._held = False
        self._in.changed.set()

    @property
    def flushed(self) -> bool:
        """See Stream."""
        return self._out.queued_bytes <= BACKLOG_BYTES_MAX or self._closed or bool(self._out.broken)

    @property
    def unsent_bytes(self) -> int:
        """See Stream."""
        return self._out.queued_bytes

    async def drained(self) -> None:
        """See Stream."""
        while not self.flushed:
            await self._out.wait()

    async def receive_into(self, target: memoryview) -> None:
        """See Stream."""
        while target.nbytes:
            if self._in.arrived:
                count = min(len(self._in.arrived), target.nbytes)
                target[:count] = memoryview(self._in.arrived)[:count]
                target = target[count:]
                del self._in.arrived[:count]
                self._in.tick()
                continue
            self._check()
            if self._in.finished:
                raise Unavailable(f"{self.peer} left with {target.nbytes} bytes still to come")
            await self._in.wait()

    def _check(self) -> None:
        if self._closed:
            raise Unavailable(f"connection to {self.peer} broke: closed on this side")
        if self._in.broken:
            raise Unavailable(f"connection to {self.peer} broke: {self._in.broken}")

    def write(self, data: Buffer) -> None:
        """See Stream."""
        if not self._closed:
            self._out.put(bytes(data), borrowed=False)

    async def send(self, data: Buffer) -> None:
        """See Stream. The memory is read as the bytes are delivered, not now."""
        if not self._closed:
            self._out.put(data, borrowed=True)
        left = 0 if len(data) else BACKLOG_BYTES_MAX
        while self._out.queued_bytes > left and not self._closed and not self._out.broken:
            await self._out.wait()
        if self._closed or self._out.broken:
            raise Unavailable(f"connection to {self.peer} broke: {self._out.broken or 'closed on this side'}")

    async def send_descriptor(self, descriptor: int) -> None:  # noqa: ARG002 - the seam's signature
        """See Stream. There is nothing here that could pass one."""
        raise Unavailable("file descriptors can only be passed over a Unix socket")

    def close(self) -> None:
        """See Stream."""
        if not self._closed:
            self._closed = True
            self._out.finish()
            self._in.break_off("closed on the other side")
            self._in.changed.set()
            self._out.changed.set()

    def cut(self, why: str) -> None:
        """The connection breaks both ways; each side learns of it by itself."""
        self._in.break_off(why)
        self._out.break_off(why)


class FakeListener:
    """A Listener."""

    def __init__(self, network: "FakeNetwork", address: Address, on_stream: OnStream) -> None:
        self._network = network
        self._on_stream = on_stream
        self._tasks: dict[asyncio.Task[None], FakeStream] = {}
        self.address = address

    def __repr__(self) -> str:
        return f"<FakeListener {self.address} {len(self._tasks)} connections>"

    def accept(self, stream: FakeStream) -> None:
        """Serves a new connection."""
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks[task] = stream
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _serve(self, stream: FakeStream) -> None:
        try:
            await self._on_stream(stream)
        except Unavailable:
            pass
        except TensorcastError as error:
            logger.warning("connection from %s closed: %s", stream.peer, error)
        except Exception:
            logger.exception("serving %s failed", stream.peer)
        finally:
            stream.close()

    def streams(self) -> list[FakeStream]:
        """The accepted ends of the connections that are being served."""
        return list(self._tasks.values())

    async def close(self) -> None:
        """See Listener."""
        self._network.forget(self)
        for task, stream in list(self._tasks.items()):
            stream.close()
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class FakeNetwork:
    """A Network. See the module.

    Args:
        chance: decides on pieces and turns, and nothing else does.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._listeners: dict[str, FakeListener] = {}
        self._refused: set[str] = set()
        self._silent: set[str] = set()
        self._muted: list[tuple[str, _Pipe]] = []
        self._flips: dict[str, int] = {}
        self._ports = itertools.count(1)
        self._diallers = itertools.count(1)

    def __repr__(self) -> str:
        return f"<FakeNetwork {sorted(self._listeners)}>"

    # --- the Network seam ---

    async def dial(self, address: Address, timeout_s: float) -> Stream:  # noqa: ARG002 - the seam's signature
        """See Network. It takes a few turns of the event loop, never `timeout_s`."""
        for _ in range(self.chance.randint(0, TURNS_MAX)):
            await asyncio.sleep(0)
        listener = self._listeners.get(str(address))
        if listener is None or str(address) in self._refused:
            raise Unavailable(f"cannot connect to {address}: refused")
        there, back = _Pipe(self, None), _Pipe(self, address)
        if str(address) in self._silent:
            self._muted += [(str(address), there), (str(address), back)]
        listener.accept(FakeStream(f"dialler {next(self._diallers)}", there, back))
        return FakeStream(str(address), back, there)

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        """See Network."""
        if address.scheme == "tcp" and address.port == 0:
            address = Address("tcp", host=address.host, port=next(self._ports))
        if str(address) in self._listeners:
            raise ConfigError(f"cannot listen on {address}: address already in use")
        listener = self._listeners[str(address)] = FakeListener(self, address, on_stream)
        return listener

    def forget(self, listener: FakeListener) -> None:
        """The listener has closed."""
        if self._listeners.get(str(listener.address)) is listener:
            del self._listeners[str(listener.address)]

    # --- faults ---

    def connections(self, address: Address) -> list[FakeStream]:
        """The accepted ends of the connections to `address`, oldest first; `cut` one of them breaks that connection."""
        listener = self._listeners.get(str(address))
        return [] if listener is None else listener.streams()

    def cut(self, address: Address) -> None:
        """Breaks every connection to `address`; new ones are accepted."""
        for stream in self.connections(address):
            stream.cut("cut")

    def refuse(self, address: Address) -> None:
        """From now on nobody can connect to `address`; connections that are open stay."""
        self._refused.add(str(address))

    def silence(self, address: Address) -> None:
        """From now on `address` accepts connections on which nothing ever arrives."""
        self._silent.add(str(address))

    def heal(self, address: Address) -> None:
        """Ends `refuse` and `silence`; what was held back arrives."""
        self._refused.discard(str(address))
        self._silent.discard(str(address))
        muted = [pipe for name, pipe in self._muted if name == str(address)]
        self._muted = [(name, pipe) for name, pipe in self._muted if name != str(address)]
        for pipe in muted:
            pipe.tick()

    def flip_byte(self, address: Address, after_bytes: int = 0) -> None:
        """Inverts one byte of what the listener at `address` sends from now on: the one after so many more."""
        self._flips[str(address)] = after_bytes

    def is_silent(self, pipe: _Pipe) -> bool:
        """For the pipes."""
        return any(each is pipe for _, each in self._muted)

    def corrupt(self, sender: Address, piece: bytearray) -> None:
        """For the pipes: applies `flip_byte`."""
        after = self._flips.get(str(sender))
        if after is not None and after < len(piece):
            piece[after] ^= 0xFF
            del self._flips[str(sender)]
        elif after is not None:
            self._flips[str(sender)] = after - len(piece)
