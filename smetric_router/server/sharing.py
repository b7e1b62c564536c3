"""Tells other processes and replicas what is done to this index, and hears from them.

Who wants to hear connects: siblings over a Unix socket, replicas over TCP after both sides have proven to know the token. A
listener first gets what is there, the newest chunks last, then an empty frame, and then what comes; until the empty one it takes
no requests, for a short while at most. Frames are 4 bytes of length (big endian) and a msgpack list of `[kind, ...]`; the only
thing a listener says is what it wants to have again.

    sibling <-- own, and what was heard of replicas --> sibling        (each listens to each)
    replica <-- own, and what was heard of siblings --> replica        (the first process of each listens)

Nothing waits for a listener: one that does not read is left out until it does.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from smetric_router.server.logs import log
from smetric_router.state.cluster import ClusterState
from smetric_router.types import DrainingTold, Forgotten, Heard, Recorded, Settled, Told, Wanted

FRAME_BYTES_MAX = 8 << 20
FRAME_CHUNKS = 8_192
"""Chunks put into one frame of what is there."""
BEHIND_BYTES_MAX = 4 << 20
"""A listener with more unread bytes is left out."""
RECONNECT_S = (0.05, 2.0)
GREETING_TIMEOUT_S = 5.0
LEARN_TIMEOUT_S = 2.0
"""A process that begins takes requests after this, whatever it has not heard yet."""
LISTENERS_MAX = 1024
_NONCE_BYTES = 16
_KINDS: tuple[type, ...] = (Recorded, Settled, Forgotten, DrainingTold, Wanted)
_KIND_OF = {kind: at for at, kind in enumerate(_KINDS)}
_pack = msgspec.msgpack.Encoder().encode


class _Listener:
    """Who hears from us."""

    def __init__(self, writer: asyncio.StreamWriter, *, replica: bool) -> None:
        self.writer = writer
        self.replica = replica

    def send(self, frame: bytes) -> bool:
        """False: it is left out."""
        transport = self.writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() > BEHIND_BYTES_MAX:
            return False
        self.writer.write(frame)
        return True


class Sharing:
    """See the module.

    Args:
        snapshot_chunks_max: of the index, for a listener that begins.
        setting: what must be the same at all for digests and ordinals to mean the same; it is part of the proof.
        count: is told of `told` and `heard` things, `wanted` chains, frames `left_out`, and `garbage`.
    """

    def __init__(
        self,
        state: ClusterState,
        clock: Callable[[], float],
        *,
        snapshot_chunks_max: int,
        token: str,
        setting: str,
        count: Callable[[str, int], None],
    ) -> None:
        self._state = state
        self._clock = clock
        self._snapshot_chunks_max = snapshot_chunks_max
        self._key = hmac.digest(token.encode(), setting.encode(), "sha256")
        self._count = count
        self._listeners: set[_Listener] = set()
        self._own: list[Told] = []
        self._relayed: dict[bool, list[Told]] = {False: [], True: []}
        self._due = False
        self._asking: asyncio.StreamWriter | None = None  # who told what is being heard
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._unheard: set[str] = set()  # of whom it is not yet known what there is
        self._learnt = asyncio.Event()
        self.addresses: list[str] = []
        self.connected: set[str] = set()
        """Whom we hear."""
        state.telling.tell = self._tell

    def __repr__(self) -> str:
        return f"<Sharing {len(self._listeners)} listeners, hears {sorted(self.connected)}>"

    async def serve_unix(self, listener: socket.socket) -> None:
        """Lets siblings listen."""
        self._servers.append(await asyncio.start_unix_server(self._serve_sibling, sock=listener))

    async def serve_tcp(self, listener: socket.socket) -> None:
        """Lets replicas listen."""
        self._servers.append(await asyncio.start_server(self._serve_replica, sock=listener))

    def listen_to(self, siblings: Iterable[Path], replicas: Iterable[str]) -> None:
        """Begins to listen to these, and goes on for ever."""
        whom = {**{str(path): False for path in siblings}, **dict.fromkeys(replicas, True)}
        self._unheard.update(whom)
        for address, replica in whom.items():
            self._tasks.append(asyncio.create_task(self._listen(address, replica=replica)))

    async def learn(self) -> None:
        """Until it is known what all know that are there, but not for ever: a follow-up that came before would go astray."""
        if self._unheard:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEARN_TIMEOUT_S):
                    await self._learnt.wait()
        for address in self._unheard:
            log.warning("takes requests without having heard", extra={"fields": {"peer": address}})

    def _no_longer_unheard(self, address: str) -> None:
        self._unheard.discard(address)
        if not self._unheard:
            self._learnt.set()

    async def stop(self) -> None:
        """Ends it."""
        self._state.telling.tell = None
        for task in self._tasks:
            task.cancel()
        for server in self._servers:
            server.close()
        for each in list(self._listeners):
            each.writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- telling ---

    def _tell(self, told: Told | Wanted) -> None:
        if isinstance(told, Wanted):
            if self._asking is not None:
                self._asking.write(_frame([told]))
                self._count("wanted", 1)
            return
        if self._listeners:
            self._own.append(told)
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        own, self._own = self._own, []
        relayed, self._relayed = self._relayed, {False: [], True: []}
        for replica in (False, True):
            told = own + relayed[not replica]
            listeners = [each for each in self._listeners if each.replica is replica]
            if not told or not listeners:
                continue
            for frame in _frames(told):
                for each in listeners:
                    self._count("told" if each.send(frame) else "left_out", 1)

    async def _serve_sibling(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._serve(reader, writer, replica=False)

    async def _serve_replica(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                ours = os.urandom(_NONCE_BYTES)
                writer.write(ours)
                theirs = await reader.readexactly(_NONCE_BYTES)
                proof = await reader.readexactly(hashlib.sha256().digest_size)
                if not hmac.compare_digest(proof, self._proof(b"listener", ours, theirs)):
                    fields = {"peer": _peer(writer)}
                    log.warning(
                        "a peer with another token, other engines or another chunk_bytes", extra={"fields": fields}
                    )
                    writer.close()
                    return
                writer.write(self._proof(b"teller", ours, theirs))
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            writer.close()
            return
        await self._serve(reader, writer, replica=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replica: bool) -> None:
        listener = _Listener(writer, replica=replica)
        if len(self._listeners) >= LISTENERS_MAX:
            writer.close()
            return
        self._listeners.add(listener)
        try:
            for frame in _frames(self._state.known(self._snapshot_chunks_max)):
                writer.write(frame)
                await writer.drain()
                await asyncio.sleep(0)  # draining does not wait where there is room
            writer.write(_frame([]))
            while True:
                for told in await _read(reader):
                    found = self._state.telling.wanted(told) if isinstance(told, Wanted) else None
                    if found is not None:
                        listener.send(_frame([found]))
        except (OSError, asyncio.IncompleteReadError):
            pass
        except ValueError as error:
            self._garbage(_peer(writer), error)
        finally:
            self._listeners.discard(listener)
            writer.close()

    # --- hearing ---

    async def _listen(self, address: str, *, replica: bool) -> None:
        wait_s, warned = RECONNECT_S[0], False
        while True:
            try:
                reader, writer = await self._connect(address, replica=replica)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
                level = logging.WARNING if isinstance(error, ValueError) and not warned else logging.DEBUG
                warned = warned or isinstance(error, ValueError)
                log.log(level, "cannot listen to", extra={"fields": {"peer": address, "cause": str(error)}})
                self._no_longer_unheard(address)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RECONNECT_S[1])
                continue
            wait_s, warned = RECONNECT_S[0], False
            try:
                while True:
                    frame = await _read(reader)
                    if address not in self.connected:
                        self.connected.add(address)
                        log.info("listening to", extra={"fields": {"peer": address}})
                    self._hear(frame, writer, replica=replica)
                    if not frame:
                        self._no_longer_unheard(address)
                    await asyncio.sleep(0)
            except (OSError, asyncio.IncompleteReadError):
                pass
            except ValueError as error:
                self._garbage(address, error)
            finally:
                self.connected.discard(address)
                self._no_longer_unheard(address)
                writer.close()
            await asyncio.sleep(wait_s)

    async def _connect(self, address: str, *, replica: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            if not replica:
                return await asyncio.open_unix_connection(address)
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                theirs, ours = await reader.readexactly(_NONCE_BYTES), os.urandom(_NONCE_BYTES)
                writer.write(ours + self._proof(b"listener", theirs, ours))
                proof = b""
                with suppress(asyncio.IncompleteReadError):  # who is refused is cut off without a word
                    proof = await reader.readexactly(hashlib.sha256().digest_size)
                if not hmac.compare_digest(proof, self._proof(b"teller", theirs, ours)):
                    raise ValueError("it has another token, other engines or another chunk_bytes")
            except BaseException:
                writer.close()
                raise
            return reader, writer

    def _hear(self, frame: list[Told | Wanted], writer: asyncio.StreamWriter, *, replica: bool) -> None:
        now = self._clock()
        self._asking = writer
        heard = [told for told in frame if not isinstance(told, Wanted)]
        for told in heard:
            self._state.apply(Heard(told), now)
        self._asking = None
        self._count("heard", len(heard))
        if any(each.replica is not replica for each in self._listeners):
            self._relayed[replica] += heard
            self._flush_soon()

    def _garbage(self, peer: str, error: ValueError) -> None:
        self._count("garbage", 1)
        log.warning("a peer says what cannot be", extra={"fields": {"peer": peer, "cause": str(error)}})

    def _proof(self, who: bytes, tellers: bytes, listeners: bytes) -> bytes:
        return hmac.digest(self._key, who + tellers + listeners, "sha256")


def _frames(told: Iterable[Told]) -> Iterable[bytes]:
    """As few frames as the limit allows."""
    part: list[Told | Wanted] = []
    chunks = 0
    for each in told:
        part.append(each)
        chunks += 4 + (len(each.digests) if isinstance(each, Recorded) else 0)
        if chunks >= FRAME_CHUNKS:
            yield _frame(part)
            part, chunks = [], 0
    if part:
        yield _frame(part)


def _frame(told: list[Told | Wanted]) -> bytes:
    body = _pack([(_KIND_OF[type(each)], *(getattr(each, name) for name in each.__slots__)) for each in told])
    return len(body).to_bytes(4, "big") + body


async def _read(reader: asyncio.StreamReader) -> list[Told | Wanted]:
    """The next frame. Raises IncompleteReadError at the end, ValueError for what is none."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes")
    return parse(await reader.readexactly(size))


def parse(body: bytes) -> list[Told | Wanted]:
    """What a frame says. Raises ValueError for what is none."""
    try:
        return [_told(fields) for fields in msgspec.msgpack.decode(body, type=list[list[Any]])]
    except (msgspec.DecodeError, RecursionError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"no frame: {error}") from None


def _told(fields: list[Any]) -> Told | Wanted:
    kind = _KINDS[fields[0]]
    made: Told | Wanted = msgspec.convert(dict(zip(kind.__slots__, fields[1:], strict=True)), kind)
    return made


def _peer(writer: asyncio.StreamWriter) -> str:
    with suppress(OSError):
        return str(writer.get_extra_info("peername") or "a sibling")
    return "unknown"
