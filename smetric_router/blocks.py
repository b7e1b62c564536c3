"""Prompts as blocks of tokens, and what engines tell of the blocks they hold. Values only.

A block is named by a digest of its tokens chained to its parent's, 60 bits of xxh3; the parent of a first block is the seed
of the prompt. So instances with different hash functions agree, and nobody needs to know any of these.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from struct import iter_unpack

import msgspec
from xxhash import xxh3_64_intdigest

# An int of Python's with one digit less than 64 bits take, 16 bytes saved on each of two per block. Two of ten million
# blocks share a digest in one of 20,000 indices, which then predicts a hit that is none.
DIGEST_BITS = (1 << 60) - 1
_pack = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that follow each other and the parent, which an engine now holds (once more, if it did)."""

    keys: tuple[int, ...]
    """The engine's hashes."""
    parent: int | None
    """The engine's hash of the block before the first; None: the prompt begins here."""
    tokens: "array[int]"
    """Of all of them, one after the other."""
    block_size: int
    medium: str = "GPU"
    lora: str = ""
    salt: str = ""
    extras: tuple[bytes, ...] | None = None
    """Per block what besides its tokens decides its content (images), as opaque bytes."""

    def digests(self, parent: int) -> list[int]:
        """Of its blocks in order; `parent`: the digest before the first."""
        return block_digests(self.tokens, self.block_size, len(self.keys), parent, self.extras)


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks of which an engine no longer holds one copy."""

    keys: tuple[int, ...]
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """An engine holds nothing any more."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt in tokens. `digests` names its blocks."""

    tokens: "array[int]"
    seed: int = 0
    history: int = 0
    """Tokens up to the end of the last answer that it holds: what should be cached."""
    _digests: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def digests(self, block_size: int) -> list[int]:
        """Of its blocks in order, without the last token: an engine computes at least that one."""
        found = self._digests.get(block_size)
        if found is None:
            count = max(0, len(self.tokens) - 1) // block_size
            found = self._digests[block_size] = block_digests(self.tokens, block_size, count, self.seed)
        return found


def prompt_seed(lora: str = "", salt: str = "") -> int:
    """The seed of a prompt's chain: the adapter and the cache salt decide who may share it."""
    return xxh3_64_intdigest(_pack((lora, salt))) & DIGEST_BITS if lora or salt else 0


def block_digests(
    tokens: "array[int]", block_size: int, count: int, seed: int, extras: Sequence[bytes] | None = None
) -> list[int]:
    """The digests of the first `count` blocks of a prompt. `extras`: see BlocksStored."""
    digest, width, view = seed, 4 * block_size, memoryview(tokens).cast("B")
    digests = []
    for (block,), extra in zip(iter_unpack(f"{width}s", view[: count * width]), extras or repeat(b""), strict=False):
        if extra:
            digest = xxh3_64_intdigest(extra, digest)
        digest = xxh3_64_intdigest(block, digest) & DIGEST_BITS
        digests.append(digest)
    return digests


def engine_key(value: int | bytes) -> int:
    """An engine's hash in 60 bits, the same for as long as this process runs."""
    return hash(value) & DIGEST_BITS


def stored_blocks(
    hashes: Sequence[int | bytes],
    parent: int | bytes | None,
    tokens: list[int],
    block_size: int,
    *,
    medium: str = "GPU",
    lora: str = "",
    salt: str = "",
    extras: tuple[bytes, ...] | None = None,
) -> BlocksStored:
    """The event from what engines send. Raises OverflowError, TypeError or ValueError when it cannot be one."""
    keys = tuple([hash(each) & DIGEST_BITS for each in hashes])
    parent_key = None if parent is None else engine_key(parent)
    as_array = array("I")
    as_array.fromlist(tokens)
    return BlocksStored(keys, parent_key, as_array, block_size, medium, lora, salt, extras)
