"""What engines publish of their KV caches (vLLM and SGLang), decoded; and the order of its numbers. Pure: no socket here.

A message is three frames: topic, sequence number (8 bytes, big endian), and msgpack `[time, [event, ...], data-parallel
rank]`, an event being a map with a "type". Hashes are bytes or integers. Fields that are not known are ignored, and so are
events that are not, or that cannot be: their number is told.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from smetric_router.blocks import (
    BlockEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    engine_key,
    stored_blocks,
)

RANKS_MAX = 4096
GROUPS_MAX = 64
"""Of layers; more of them is no engine."""
_pack = msgspec.msgpack.Encoder().encode
_Hash = int | bytes


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    token_ids: list[int]
    block_size: int
    parent_block_hash: _Hash | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    cache_salt: str | None = None


class _StoredPairs(_Stored, tag="BlockStored", gc=False):
    """SGLang with a draft model (EAGLE) names a page by pairs of each token and the next one."""

    token_ids: list[tuple[int, int]]  # type: ignore[assignment]


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


_Known = _Stored | _Removed | _Cleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Known]
    rank: int | None = None


class _LooseBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_loose = msgspec.msgpack.Decoder(_LooseBatch).decode
_decode_event = msgspec.msgpack.Decoder(_Known).decode
_decode_pairs = msgspec.msgpack.Decoder(_StoredPairs).decode


@dataclass(frozen=True, slots=True)
class Batch:
    """One message."""

    rank: int
    events: list[BlockEvent]
    ignored: int
    """Events that mean nothing here."""


# Of these a block is of use while all before it are there, so what is held is a prefix, as the index takes it to be.
_WHOLE_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention", "unknown"))


class Groups:
    """Which of a publisher's groups of layers decides how long a hit can be.

    A model may keep layers of several kinds, each with blocks and events of its own: full attention, a sliding window, a
    recurrent state. A prompt is found as far as all of them have it. Those with full attention need all of it, so theirs is the
    figure; a window or a state that is gone may make the engine's hit shorter. Without any such group nothing can be told.
    """

    def __init__(self) -> None:
        self.deciding: int | None = None
        self.kinds: dict[int, str] = {}
        """By group, as far as they have been named."""

    def __repr__(self) -> str:
        return f"<Groups {self.deciding} of {self.kinds}>"

    @property
    def undecided(self) -> bool:
        """Whether blocks have come, but of no group that tells how long a hit is."""
        return self.deciding is None and bool(self.kinds)

    def counts(self, group: int | None, kind: str | None) -> bool:
        """Whether blocks that are stored in the group count; `kind` as the event names it."""
        group = group or 0
        if group not in self.kinds and len(self.kinds) < GROUPS_MAX:
            self.kinds[group] = kind or "unknown"
            if self.deciding is None and (group == 0 if kind is None else kind in _WHOLE_KINDS):
                self.deciding = group
        return group == self.deciding


def decode(payload: bytes, groups: Groups | None = None) -> Batch:
    """The batch; `groups`: what its publisher has said of its groups so far. Raises ValueError when it is none."""
    if groups is None:
        groups = Groups()
    found: list[_Known] = []
    ignored = 0
    try:
        try:
            batch: _Batch | _LooseBatch = _decode_batch(payload)
            found, total = batch.events, len(batch.events)  # type: ignore[assignment]
        except msgspec.ValidationError:
            batch = _decode_loose(payload)
            total = len(batch.events)
            for raw in batch.events:
                if (event := _loose_event(raw)) is not None:
                    found.append(event)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a batch of events: {error}") from None
    events = [made for each in found if (made := _event(each, groups)) is not None]
    ignored = total - len(events)
    rank = batch.rank or 0
    if not 0 <= rank < RANKS_MAX:
        raise ValueError(f"no data-parallel rank: {rank}")
    return Batch(rank, events, ignored)


def _loose_event(raw: msgspec.Raw) -> _Known | None:
    """One event of a batch that has some that are not known; None for these."""
    try:
        return _decode_event(raw)
    except msgspec.ValidationError:
        pass
    try:
        pairs = _decode_pairs(raw)
    except msgspec.ValidationError:
        return None
    return msgspec.structs.replace(pairs, token_ids=[token for token, _ in pairs.token_ids])


def _event(event: _Known, groups: Groups) -> BlockEvent | None:
    if isinstance(event, _Cleared):
        return BlocksCleared()
    if event.locality == "REMOTE":  # what lies on other hosts is no hit here
        return None
    medium = event.medium or "GPU"
    if isinstance(event, _Removed):
        if (event.group_idx or 0) != groups.deciding:
            return None
        return BlocksRemoved(tuple([engine_key(each) for each in event.block_hashes]), medium)
    if not groups.counts(event.group_idx, event.kv_cache_spec_kind):
        return None
    try:
        return _stored(event, medium)
    except (OverflowError, ValueError, TypeError):
        return None


def _stored(event: _Stored, medium: str) -> BlocksStored:
    lora, salt, extras = event.lora_name or "", event.cache_salt or "", None
    if event.extra_keys:
        if len(event.extra_keys) != len(event.block_hashes):
            raise ValueError("extra keys for other blocks")
        if any(event.extra_keys):
            extras = tuple([_extra(keys, lora) if keys else b"" for keys in event.extra_keys])
        if extras and event.parent_block_hash is None:
            salt = next((key for key in event.extra_keys[0] or () if isinstance(key, str) and key != lora), salt)
            extras = (_extra(event.extra_keys[0], lora, salt), *extras[1:])
    return stored_blocks(
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        medium=medium,
        lora=lora,
        salt=salt,
        extras=extras if extras is not None and any(extras) else None,
    )


def _extra(keys: list[Any] | None, *known: str) -> bytes:
    """What decides the content of one block besides its tokens, its adapter and its salt."""
    left = [key for key in keys or () if not (isinstance(key, str) and key in known)]
    return _pack(left) if left else b""


class Arrival(StrEnum):
    """What a message's number says."""

    NEXT = "next"
    KNOWN = "known"
    """Its events were read in a replay."""
    GAP = "gap"
    """Some before it are missing."""
    RESTART = "restart"
    """The publisher began anew."""


@dataclass(slots=True)
class Order:
    """The numbers of one publisher's messages."""

    expected: int | None = None
    """None: any."""
    last_live: int | None = None
    """Of the stream itself, not of a replay."""

    def live(self, number: int) -> Arrival:
        """A message came on the stream. After NEXT it counts as taken."""
        if self.last_live is not None and number <= self.last_live:
            return Arrival.RESTART
        self.last_live = number
        if self.expected is None or number == self.expected:
            self.expected = number + 1
            return Arrival.NEXT
        return Arrival.KNOWN if number < self.expected else Arrival.GAP

    def replayed(self, number: int) -> Arrival:
        """A message came in a replay."""
        if self.expected is None or number == self.expected:
            self.expected = number + 1
            return Arrival.NEXT
        return Arrival.KNOWN if number < self.expected else Arrival.GAP

    def begin_at(self, number: int | None) -> None:
        """All before is given up."""
        self.expected = number

    def restart(self) -> None:
        """Another life of the publisher, which counts from 0."""
        self.expected, self.last_live = 0, None
