"""A publisher of KV events as engines have it: numbered batches on a PUB socket, and a ROUTER socket that repeats them."""

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """As vLLM 0.32 and SGLang 0.5 write it."""

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[Any]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None
    locality: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[Any]
    medium: str | None = "GPU"
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True):
    pass


def batch(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


class Publisher:
    """`buffer` is what it can repeat; without `replay` it repeats nothing."""

    def __init__(self, *, replay: bool = True) -> None:
        self.buffer: list[tuple[int, bytes]] = []
        self.next = 0
        self.replays: list[int] = []
        self.replay = replay
        self.ports = (0, 0)
        self._context: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """After a stop on the same ports again, as another life."""
        self.buffer, self.next = [], 0
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._repeater = self._context.socket(zmq.ROUTER)
        pair = (self._publisher, self._repeater)
        self.ports = tuple(  # type: ignore[assignment]
            each.bind_to_random_port("tcp://127.0.0.1") if not port else (each.bind(f"tcp://127.0.0.1:{port}"), port)[1]
            for each, port in zip(pair, self.ports, strict=True)
        )
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._publisher.close(linger=0)
            self._repeater.close(linger=0)
            self._context.term()
            self._task = None

    @property
    def endpoints(self) -> str:
        publisher, repeater = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return f"{publisher} {repeater}" if self.replay else publisher

    async def publish(self, *events: Any, sent: bool = True, rank: int | None = 0) -> None:
        """One batch; not `sent`: it is lost on the way and can be asked for."""
        await self.publish_bytes(batch(*events, rank=rank), sent=sent)

    async def publish_bytes(self, payload: bytes, *, sent: bool = True) -> None:
        self.buffer.append((self.next, payload))
        if sent:
            await self.send(b"", self.next.to_bytes(8, "big"), payload)
        self.next += 1

    async def send(self, *frames: bytes) -> None:
        await self._publisher.send_multipart(frames)

    async def _repeat(self) -> None:
        while True:
            who, _, first = await self._repeater.recv_multipart()
            self.replays.append(int.from_bytes(first, "big"))
            for number, payload in list(self.buffer):
                if number >= self.replays[-1]:
                    await self._repeater.send_multipart((who, b"", b"", number.to_bytes(8, "big"), payload))
            await self._repeater.send_multipart((who, b"", b"", b"\xff" * 8, b""))
